"""Padding as a copy, and its derivative: for kernels that know no border of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import PaddingMode, Pass, Problem, contiguous_strides


def has_border(problem: Problem) -> bool:
    """Whether something other than zeros stands around the image."""
    return problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding)


def pad(problem: Problem, x: Tensor) -> Tensor:
    """A copy of ``x`` with the problem's padding around it."""
    top, bottom, left, right = problem.padding
    mode = "constant" if problem.padding_mode is PaddingMode.ZEROS else problem.padding_mode.value
    return F.pad(x, (left, right, top, bottom), mode=mode)


def padded(problem: Problem) -> Problem:
    """The same input gradient for the padded image, as if the border were pixels: :func:`fold` then adds it up."""
    top, bottom, left, right = problem.padding
    size = (problem.in_size[0] + top + bottom, problem.in_size[1] + left + right)
    shape = (problem.batch, problem.in_channels, *size)
    if problem.kind is not Pass.DGRAD:
        raise ValueError(f"only the input gradient of a border is folded; got {problem}")
    return replace(
        problem,
        in_size=size,
        padding=(0, 0, 0, 0),
        padding_mode=PaddingMode.ZEROS,
        x_strides=contiguous_strides(shape),
    )


def fold(problem: Problem, grad: Tensor, dx: Tensor) -> Tensor:
    """The derivative of :func:`pad`, written out: operators run below autograd, which cannot be asked for it there."""
    top, bottom, left, right = problem.padding
    if problem.padding_mode is PaddingMode.ZEROS:
        return F.pad(grad, (-left, -right, -top, -bottom))
    if problem.padding_mode is PaddingMode.CIRCULAR:
        return _unwrap(_unwrap(grad, 3, left, right), 2, top, bottom)
    backward = {
        PaddingMode.REFLECT: torch.ops.aten.reflection_pad2d_backward,
        PaddingMode.REPLICATE: torch.ops.aten.replication_pad2d_backward,
    }[problem.padding_mode]
    result: Tensor = backward(grad, dx, [left, right, top, bottom])
    return result


def _unwrap(grad: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Adds the gradients of wrapped copies to the pixels that they were copied from."""
    size = grad.shape[dim] - before - after
    inner = grad.narrow(dim, before, size).clone()
    inner.narrow(dim, size - before, before).add_(grad.narrow(dim, 0, before))
    inner.narrow(dim, 0, after).add_(grad.narrow(dim, before + size, after))
    return inner
