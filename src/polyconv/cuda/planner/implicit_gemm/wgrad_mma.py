"""Plans for wgrad of 16-bit tensors as an implicit GEMM on tensor cores (kernels/implicit_gemm/wgrad_mma.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ....numerics.prediction import half_error
from ....problem import HALF_DTYPES, Pass, Problem
from ..kernel_params import half_structs
from ..plan import KernelSpec, Task
from .fprop_dgrad import BORDER_FACTS
from .fprop_dgrad_mma import lines_of
from .tiles import MATRIX_SMALL, MATRIX_SQUARE, MatrixTile
from .wgrad import REDUCES, WgradCandidate, WgradCut, WgradParams, bordered

DTYPES = HALF_DTYPES
_PARAMS = half_structs(WgradParams)


@dataclass(frozen=True)
class WgradMmaCandidate(WgradCandidate):
    """wgrad of 16-bit tensors; tiles, columns and slices are cut as for float32."""

    tile: MatrixTile

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = self.tile
        symbol = f"implicit_gemm_wgrad_mma_{tile.name}" + "_vector" * self.vector + "_bordered" * self.bordered
        return KernelSpec.of(
            _PARAMS[tile.dtype],
            "implicit_gemm/wgrad_mma",
            tile,
            self.vector,
            self.bordered,
            symbol=symbol,
            threads=tile.threads,
            min_blocks=tile.min_blocks(weight=2),
            facts={**tile.facts, **BORDER_FACTS},
        ).of_halves(tile.dtype)

    def _task(self, problem: Problem, cut: WgradCut, pixels: int, slices: int) -> Task:
        """With the lines that a warp reads because the 16 pixels of its two rows are not adjacent."""
        task = super()._task(problem, cut, pixels, slices)
        of_dy = lines_of(16, problem.y_strides[3]) - 2
        of_x = lines_of(16, problem.stride[1] * problem.x_strides[3]) - 2
        lines = task.work.steps * (self.tile.m * max(of_dy, 0) + self.tile.n * max(of_x, 0)) // 2
        return replace(task, work=replace(task.work, scattered_lines=lines))

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return half_error(problem, self.sums(problem, sms, workspace))


CANDIDATES = {
    dtype: (
        *(
            WgradMmaCandidate(tile.of(dtype), vector, False)
            for tile in (MATRIX_SQUARE, MATRIX_SMALL)
            for vector in (True, False)
        ),
        WgradMmaCandidate(MATRIX_SMALL.of(dtype), False, True),
    )
    for dtype in DTYPES
}


def candidates(problem: Problem) -> Iterator[WgradMmaCandidate]:
    """Every instance for the problem's border; only for the weight gradient."""
    if problem.kind is Pass.WGRAD:
        yield from (one for one in CANDIDATES.get(problem.dtype, ()) if one.bordered is bordered(problem))


def all_kernels() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        yield REDUCES[dtype]
        yield from (candidate.kernel for candidate in CANDIDATES[dtype])
