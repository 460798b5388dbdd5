"""Half precision by float32 kernels: they run on widened copies of the tensors, and the result is rounded once.

On a GPU an unconditional lowering where there is no half-precision kernel; on the CPU the candidates beside ATen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import suggests_channels_last
from ..backend import Run
from ..problem import HALF_DTYPES, RESULTS, PaddingMode, Pass, Problem, Shape, Strides, dense_strides
from .base import Rewrite
from .epilogue import per_channel

if TYPE_CHECKING:
    from .extreme_geometry import Reduction
    from .volume_stack import Side


def has_no_half_kernel(problem: Problem, reduction: Reduction | None, backend: str) -> bool:
    """Whether a half-precision problem is computed in float32 before it is planned.

    Parts of an extreme geometry are summed before the result is rounded. A GPU has no half-precision kernel for unusual
    depthwise problems, nor for volumes that cannot be stacked; the CPU planner has float32 candidates for all of them.
    """
    if problem.dtype not in HALF_DTYPES:
        return False
    if backend != "cuda":
        return reduction is not None
    if problem.rank == 3:
        return reduction is not None or _has_no_stack(problem)
    return reduction is not None or (problem.depthwise and _has_no_tile(problem))


_LEAST_CHANNELS = 8
"""Channels per group from which stacked slices fill the tiles of tensor cores."""
_STACK_BYTES = 64 * 2**20
"""Most bytes of a stack: the default workspace on a GPU."""


def _has_no_stack(problem: Problem) -> bool:
    """Whether a volume is no single sum of half-precision problems: slices would be rounded before they are added."""
    if min(problem.channels_per_group) < _LEAST_CHANNELS:
        return True
    from .volume_stack import stack  # for volumes alone: these modules are not part of the package's import
    from .volume_sum import volume_sum

    side: Side = "y" if problem.kind is Pass.DGRAD else "x"
    return bool(volume_sum(problem).additions) and isinstance(stack(problem, side, _STACK_BYTES), str)


_TILE = 16
"""Positions along an axis of the tile of the GPU's depthwise kernels with the largest source."""
_MOST_SOURCE = 3072
"""Elements of that source, at most."""


def _has_no_tile(problem: Problem) -> bool:
    """Whether a GPU has no depthwise kernel: for a border's gradient, a large stride, a source too large for tiles."""
    border = problem.padding_mode is not PaddingMode.ZEROS and problem.kind is Pass.DGRAD
    reach = [
        (_TILE - 1) * stride + (taps - 1) * dilation + 1
        for taps, stride, dilation in zip(problem.kernel, problem.stride, problem.dilation, strict=True)
    ]
    return border or max(problem.stride) > 8 or prod(reach) * _TILE ** (2 - problem.rank) > _MOST_SOURCE


def widened(problem: Problem) -> Problem:
    """The problem on float32 copies: dense, and channels_last where the tensors are. Expanded axes stay expanded."""
    return replace(
        problem,
        dtype="float32",
        x_strides=_dense(problem.x_shape, problem.x_strides),
        w_strides=_dense(problem.w_shape, problem.w_strides),
        y_strides=_dense(problem.y_shape, problem.y_strides),
        vector_aligned=True,
    )


_IMAGES = ("x", "y", "residual")
"""Names of the tensors that have a batch."""


class Widened(Rewrite):
    """A half-precision problem in float32. The result is rounded once."""

    __slots__ = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (replace(widened(self.problem), frozen=False),)

    @property
    def extra_traffic(self) -> tuple[int, int]:
        """Casts: two bytes of each element on one side, and four on the other."""
        problem = self.problem
        return 6 * sum(map(prod, (problem.x_shape, problem.w_shape, problem.y_shape))), 3

    def adapt(
        self,
        runs: Mapping[Problem, Run],
        images: int | None = None,
        untouched: Collection[str] = (),
        scratch: Callable[[Tensor, int], Tensor] | None = None,
    ) -> Run:
        """Build the run of :attr:`problem` on float32 copies, which lie in one buffer.

        Args:
            runs: the run in float32.
            images: images of a block, whose copies stay in a cache and for which that run is called; None: all.
            untouched: names of tensors that it takes in half precision.
            scratch: allocates the buffer, on the device of a tensor.
        """
        ((wide, run),) = runs.items()
        results = (RESULTS[wide.kind], "db")
        strides = {"x": wide.x_strides, "w": wide.w_strides, "dw": wide.w_strides}

        def copies(tensors: Mapping[str, Tensor], buffer: Tensor, first: int = 0) -> dict[str, Tensor]:
            found = {}
            for name, tensor in tensors.items():
                if name in untouched:
                    found[name] = tensor
                    continue
                layout = strides.get(name, wide.y_strides) if tensor.dim() > 1 else (1,)
                once = _once(tensor, layout)
                copy = buffer.as_strided(once.shape, layout, first)
                found[name] = copy if name in results else copy.copy_(once).expand(tensor.shape)
                first += _room(once)
            return found

        def run_widened(tensors: MutableMapping[str, Tensor]) -> None:
            bias = tensors.pop("bias", None) if wide.kind is Pass.DGRAD else None  # of a transposed convolution
            split = {name: tensors[name].split(images or wide.batch) for name in _IMAGES if name in tensors}
            others = {name: tensor for name, tensor in tensors.items() if name not in _IMAGES}
            whole = sum(map(_room, others.values()))
            buffer = (scratch or _new)(tensors["y"], whole + sum(_room(parts[0]) for parts in split.values()))
            shared = copies(others, buffer)
            for block in zip(*split.values(), strict=True):
                half = dict(zip(split, block, strict=True))
                given = {**shared, **copies(half, buffer, whole)}
                run(given)
                if bias is not None:
                    given["x"].add_(per_channel(bias, given["x"].dim()))
                for name in results:
                    if name in given:
                        (half if name in half else tensors)[name].copy_(given[name])

        return run_widened

    def in_words(self) -> str:
        return f"widened to float32 (no kernel takes it in half precision) and rounded to {self.problem.dtype} once"


def _dense(shape: Shape, strides: Strides) -> Strides:
    """Dense strides in the memory format that torch infers from the given ones; expanded axes keep a stride of 0, so
    that the error model sees their repetition."""
    last = suggests_channels_last(shape, strides)
    if 0 not in strides:
        return dense_strides(shape, last)
    once = tuple(1 if stride == 0 else extent for extent, stride in zip(shape, strides, strict=True))
    dense = dense_strides(once, last)
    return tuple(0 if given == 0 else step for given, step in zip(strides, dense, strict=True))


def _once(tensor: Tensor, strides: Strides) -> Tensor:
    """The tensor with an extent of 1 where its copy is expanded."""
    for dim, stride in enumerate(strides):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 else tensor
    return tensor


def _room(tensor: Tensor) -> int:
    """Elements of a buffer for a copy: a multiple of a cache line."""
    return (tensor.numel() + 15) // 16 * 16


def _new(like: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float32, device=like.device)
