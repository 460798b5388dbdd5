"""Padding by copy, and its derivative, for kernels without border handling."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import Extents, PaddingMode, Pass, Problem, contiguous_strides


def has_border(problem: Problem) -> bool:
    """True if the padding is not zeros."""
    return problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding)


def pad(problem: Problem, x: Tensor) -> Tensor:
    """Copy of ``x`` with the problem's padding."""
    mode = "constant" if problem.padding_mode is PaddingMode.ZEROS else problem.padding_mode.value
    return F.pad(x, sides_for_torch(problem), mode=mode)


def padded_size(problem: Problem) -> Extents:
    return tuple(map(sum, zip(problem.in_size, problem.padding[::2], problem.padding[1::2], strict=True)))


def padded(problem: Problem) -> Problem:
    """Input gradient with respect to the padded image, to be reduced by :func:`fold`."""
    size = padded_size(problem)
    if problem.kind is not Pass.DGRAD:
        raise ValueError(f"only the input gradient of a border is folded; got {problem}")
    return replace(
        problem,
        in_size=size,
        padding=tuple(0 for _ in problem.padding),
        padding_mode=PaddingMode.ZEROS,
        x_strides=contiguous_strides((problem.batch, problem.in_channels, *size)),
    )


def fold(problem: Problem, grad: Tensor, dx: Tensor) -> Tensor:
    """Derivative of :func:`pad`, written out because operators run below autograd."""
    sides = sides_for_torch(problem)
    if problem.padding_mode is PaddingMode.ZEROS:
        return F.pad(grad, [-side for side in sides])
    if problem.padding_mode is PaddingMode.CIRCULAR:
        for axis in reversed(range(problem.rank)):
            grad = _unwrap(grad, 2 + axis, *problem.padding[2 * axis : 2 * axis + 2])
        return grad
    backward = {
        (PaddingMode.REFLECT, 2): torch.ops.aten.reflection_pad2d_backward,
        (PaddingMode.REFLECT, 3): torch.ops.aten.reflection_pad3d_backward,
        (PaddingMode.REPLICATE, 2): torch.ops.aten.replication_pad2d_backward,
        (PaddingMode.REPLICATE, 3): torch.ops.aten.replication_pad3d_backward,
    }[problem.padding_mode, problem.rank]
    result: Tensor = backward(grad, dx, sides)
    return result


def sides_for_torch(problem: Problem) -> list[int]:
    """Padding as ``torch.nn.functional.pad`` takes it, last axis first."""
    pairs = zip(problem.padding[::2], problem.padding[1::2], strict=True)
    return [side for pair in reversed(list(pairs)) for side in pair]


def _unwrap(grad: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Add the gradients of wrapped copies to the pixels they were copied from."""
    size = grad.shape[dim] - before - after
    inner = grad.narrow(dim, before, size).clone()
    inner.narrow(dim, size - before, before).add_(grad.narrow(dim, 0, before))
    inner.narrow(dim, 0, after).add_(grad.narrow(dim, before + size, after))
    return inner
