"""Plans for fprop and dgrad of 16-bit tensors as an implicit GEMM on tensor cores
(kernels/implicit_gemm/fprop_dgrad_mma.cuh).

Phases, slabs, tables and packed weights are those of cuda/planner/implicit_gemm/fprop_dgrad.py. One instance serves
with and without an epilogue: sums are finished at the store, four at a time, so the test costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....numerics.prediction import half_error
from ....problem import HALF_DTYPES, Pass, Problem
from ....util.cached import cached_property
from ..epilogue import finishing
from ..kernel_params import PHASE_FACTS, half_structs
from ..plan import KernelSpec
from .fprop_dgrad import (
    BORDER_FACTS,
    FOLDED,
    PACK_FACTS,
    POINTWISE,
    ROWS,
    ROWS_BORDERED,
    TAPS,
    TAPS_VECTOR,
    ImplicitGemmCandidate,
    ImplicitGemmParams,
    LoaderKind,
    PackParams,
)
from .tiles import MATRIX_SLIM, MATRIX_SMALL, MATRIX_SQUARE, MATRIX_TALL, MatrixTile

DTYPES = HALF_DTYPES

TILES: dict[LoaderKind, tuple[MatrixTile, ...]] = {
    TAPS: (MATRIX_SQUARE, MATRIX_TALL, MATRIX_SMALL, MATRIX_SLIM),
    TAPS_VECTOR: (MATRIX_SQUARE, MATRIX_TALL, MATRIX_SMALL, MATRIX_SLIM),
    POINTWISE: (MATRIX_SQUARE, MATRIX_SMALL),
    ROWS: (MATRIX_TALL, MATRIX_SMALL, MATRIX_SLIM),
    ROWS_BORDERED: (MATRIX_TALL, MATRIX_SLIM),
    FOLDED: (MATRIX_SMALL, MATRIX_SLIM),
}
"""Tiles by loader: few, because each instance is compiled for two formats."""

PACKS = {
    dtype: KernelSpec.of(
        struct, "implicit_gemm/pack_weights", MatrixTile.depth, threads=256, facts=PACK_FACTS
    ).of_halves(dtype)
    for dtype, struct in half_structs(PackParams).items()
}
_PARAMS = half_structs(ImplicitGemmParams)


@dataclass(frozen=True)
class ImplicitGemmMmaCandidate(ImplicitGemmCandidate):
    """fprop or dgrad of 16-bit tensors."""

    tile: MatrixTile

    @property
    def pack(self) -> KernelSpec:
        return PACKS[self.tile.dtype]

    @cached_property
    def kernel(self) -> KernelSpec:
        tile, loader = self.tile, self.loader
        plain = KernelSpec.of(
            _PARAMS[tile.dtype],
            "implicit_gemm/fprop_dgrad_mma",
            tile,
            *(f"polyconv::{name.format(tile=tile.cpp)}" for name in loader.types),
            function="implicit_gemm_mma_folded" if loader is FOLDED else "implicit_gemm_mma",
            symbol=f"implicit_gemm_mma_{loader.name}_{tile.name}",
            threads=tile.threads,
            min_blocks=tile.min_blocks(loader.weight),
            facts={**tile.facts, **PHASE_FACTS, **BORDER_FACTS},
        )
        return finishing(plain).of_halves(tile.dtype)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return half_error(problem, self.sums(problem, sms, workspace))

    def _can_finish(self) -> bool:
        return True


CANDIDATES = {
    dtype: tuple(ImplicitGemmMmaCandidate(tile.of(dtype), loader) for loader, tiles in TILES.items() for tile in tiles)
    for dtype in DTYPES
}


def candidates(problem: Problem) -> Iterator[ImplicitGemmMmaCandidate]:
    """Every loader with its tiles, refused or not; none for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from CANDIDATES.get(problem.dtype, ())


def all_kernels() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        yield PACKS[dtype]
        yield from (candidate.kernel for candidate in CANDIDATES[dtype])
