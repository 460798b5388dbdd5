"""Borders: padding other than zeros.

A border next to a cropped image (negative padding) is lowered to a border of the part. For kernels without border
handling there is padding by copy, and its derivative as a lowering.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import suggests_channels_last
from ..backend import Run
from ..problem import Extents, PaddingMode, Pass, Problem, contiguous_strides, dense_strides
from .base import Rewrite


class Cropped(Rewrite):
    """A problem with a border and negative padding, as a problem on the cropped image."""

    __slots__ = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problem on a view of the input; its gradient is computed in a dense buffer."""
        problem, ranges = self.problem, self.ranges
        offset = sum(kept.start * stride for kept, stride in zip(ranges, problem.x_strides[2:], strict=True))
        part = replace(
            problem,
            in_size=tuple(map(len, ranges)),
            padding=tuple(max(side, 0) for side in problem.padding),
            vector_aligned=problem.vector_aligned and offset * problem.element_bytes % 16 == 0,
        )
        if problem.kind is Pass.DGRAD:
            last = suggests_channels_last(problem.x_shape, problem.x_strides)
            part = replace(part, x_strides=dense_strides(part.x_shape, last), vector_aligned=problem.vector_aligned)
        return (part,)

    @property
    def ranges(self) -> list[range]:
        """Pixels that are kept, by axis."""
        sides = zip(self.problem.in_size, self.problem.padding[::2], self.problem.padding[1::2], strict=True)
        return [range(max(-before, 0), size - max(-after, 0)) for size, before, after in sides]

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        ((part, run),) = runs.items()
        ranges = self.ranges

        def run_cropped(tensors: MutableMapping[str, Tensor]) -> None:
            x = tensors["x"]
            for dim, kept in enumerate(ranges, start=2):
                x = x.narrow(dim, kept.start, len(kept))
            if part.kind is not Pass.DGRAD:
                given = {**tensors, "x": x}
                run(given)
                tensors.update({name: tensor for name, tensor in given.items() if name != "x"})
                return
            given = {**tensors, "x": x.new_empty_strided(part.x_shape, part.x_strides)}
            run(given)
            tensors["x"].zero_()
            x.copy_(given["x"])

        return run_cropped

    def in_words(self) -> str:
        return "on the cropped image"


class Folded(Rewrite):
    """Input gradient of a border: that of the padded input, whose border is then added to the pixels it copies."""

    __slots__ = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (padded(self.problem),)

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        ((whole, run),) = runs.items()

        def run_folded(tensors: MutableMapping[str, Tensor]) -> None:
            dx = tensors["x"]
            given = {**tensors, "x": dx.new_empty(whole.x_shape)}
            run(given)
            dx.copy_(fold(self.problem, given["x"], dx))

        return run_folded

    def in_words(self) -> str:
        return "border folded"


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
