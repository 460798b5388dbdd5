"""Plans for wgrad of 16-bit tensors as an implicit GEMM on tensor cores (kernels/implicit_gemm/wgrad_mma.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....numerics.prediction import half_error
from ....problem import HALF_DTYPES, Pass, Problem
from ....util.cached import cached_property
from ..kernel_params import half_structs
from ..plan import KernelSpec
from .fprop_dgrad import BORDER_FACTS
from .tiles import MATRIX_SMALL, MATRIX_SQUARE, MatrixTile
from .wgrad import REDUCES, WgradCandidate, WgradParams, bordered

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
