"""Half precision by float32 kernels: they run on widened copies of the tensors, and the result is rounded once.

On a GPU an unconditional lowering where there is no half-precision kernel; on the CPU the candidates beside ATen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import suggests_channels_last
from ..backend import Run
from ..problem import HALF_DTYPES, RESULTS, Pass, Problem, Shape, Strides, dense_strides
from .base import Rewrite
from .epilogue import per_channel

if TYPE_CHECKING:
    from .extreme_geometry import Reduction


def has_no_half_kernel(problem: Problem, reduction: Reduction | None, backend: str) -> bool:
    """Whether a half-precision problem is computed in float32 before it is planned.

    Parts of an extreme geometry are summed before the result is rounded. A GPU's depthwise kernels exist in float32
    only, and slices of a volume are summed like the parts; the CPU planner has float32 candidates for both.
    """
    if problem.dtype not in HALF_DTYPES:
        return False
    return reduction is not None or (backend == "cuda" and (problem.depthwise or problem.rank == 3))


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


class Widened(Rewrite):
    """A half-precision problem in float32. The result is rounded once."""

    __slots__ = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (replace(widened(self.problem), frozen=False),)

    def adapt(self, runs: Mapping[Problem, Run], untouched: Collection[str] = ()) -> Run:
        """``untouched``: names of tensors that the run takes in half precision."""
        ((wide, run),) = runs.items()
        result = RESULTS[wide.kind]
        results = (result, "db")
        strides = {"x": wide.x_strides, "w": wide.w_strides, "dw": wide.w_strides}

        def run_widened(tensors: MutableMapping[str, Tensor]) -> None:
            given = {}
            bias = tensors.pop("bias", None) if wide.kind is Pass.DGRAD else None
            for name, tensor in tensors.items():
                if name in untouched:
                    given[name] = tensor
                elif name != "owner":
                    layout = strides.get(name, wide.y_strides) if tensor.dim() > 1 else (1,)
                    given[name] = _empty(tensor, layout) if name in results else _wide(tensor, layout)
            run(given)
            if bias is not None:  # of a transposed convolution
                given["x"].add_(per_channel(bias, given["x"].dim()))
            for name in results:
                if name in tensors:
                    tensors[name].copy_(given[name])

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


def _empty(like: Tensor, strides: Strides) -> Tensor:
    return torch.empty_strided(like.shape, strides, dtype=torch.float32, device=like.device)


def _wide(tensor: Tensor, strides: Strides) -> Tensor:
    """Float32 copy with the given strides."""
    if 0 not in strides:
        return _empty(tensor, strides).copy_(tensor)
    once = tensor
    for dim, stride in enumerate(strides):
        once = once.narrow(dim, 0, 1) if stride == 0 else once
    return _empty(once, strides).copy_(once).expand(tensor.shape)
