"""Half precision on a GPU without half-precision kernels: float32 kernels run on widened copies of the tensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import suggests_channels_last
from ..backend import Run
from ..problem import HALF_DTYPES, RESULTS, Problem, Shape, Strides, dense_strides
from .base import Rewrite

if TYPE_CHECKING:
    from .extreme_geometry import Reduction


def has_no_half_kernel(problem: Problem, reduction: Reduction | None) -> bool:
    """Whether a GPU computes a half-precision problem in float32.

    Depthwise kernels exist in float32 only; parts of an extreme geometry or slices of a volume are summed before the
    result is rounded.
    """
    return problem.dtype in HALF_DTYPES and (problem.depthwise or problem.rank == 3 or reduction is not None)


class Widened(Rewrite):
    """A half-precision problem in float32. The result is rounded once."""

    __slots__ = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The problem on float32 copies: dense, and channels_last where the tensors are."""
        problem = self.problem
        return (
            replace(
                problem,
                dtype="float32",
                x_strides=_dense(problem.x_shape, problem.x_strides),
                w_strides=_dense(problem.w_shape, problem.w_strides),
                y_strides=_dense(problem.y_shape, problem.y_strides),
                vector_aligned=True,
                frozen=False,
            ),
        )

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        ((wide, run),) = runs.items()
        results = (RESULTS[wide.kind], "db")
        strides = {"x": wide.x_strides, "w": wide.w_strides, "dw": wide.w_strides, "residual": wide.y_strides}

        def run_widened(tensors: MutableMapping[str, Tensor]) -> None:
            given = {}
            for name, tensor in tensors.items():
                layout = strides.get(name, wide.y_strides) if tensor.dim() > 1 else (1,)
                copy = torch.empty_strided(tensor.shape, layout, dtype=torch.float32, device=tensor.device)
                given[name] = copy if name in results else copy.copy_(tensor)
            run(given)
            for name in results:
                if name in tensors:
                    tensors[name].copy_(given[name])

        return run_widened

    def in_words(self) -> str:
        return f"widened to float32 (no kernel takes it in half precision) and rounded to {self.problem.dtype} once"


def _dense(shape: Shape, strides: Strides) -> Strides:
    """Dense strides in the memory format that torch infers from the given ones."""
    return dense_strides(shape, suggests_channels_last(shape, strides))
