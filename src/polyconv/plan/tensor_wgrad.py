"""Plans for wgrad of half-precision tensors as an implicit GEMM on tensor cores (kernels/tensor_wgrad.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..accuracy import half_error
from ..problem import HALF_DTYPES, Pass, Problem
from . import layout
from .plan import KernelSpec
from .tiles import MATRIX_SMALL, MATRIX_SQUARE, MatrixTile
from .wgrad import REDUCES, WgradCandidate, bordered

DTYPES = HALF_DTYPES
"""What the tensors of this family's problems are made of."""
_PARAMS = dict(zip(DTYPES, (layout.HalfWgradParams, layout.BFloat16WgradParams), strict=True))


@dataclass(frozen=True)
class TensorWgradCandidate(WgradCandidate):
    """wgrad of half-precision tensors: cut, columns and slices are those of float32."""

    tile: MatrixTile

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = self.tile
        symbol = f"tensor_wgrad_{tile.name}" + "_vector" * self.vector + "_bordered" * self.bordered
        return KernelSpec.of(
            _PARAMS[tile.dtype],
            "tensor_wgrad",
            tile,
            self.vector,
            self.bordered,
            symbol=symbol,
            threads=tile.threads,
            min_blocks=tile.min_blocks(weight=2),
            facts=tile.facts,
        ).of_halves(tile.dtype)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return half_error(problem, self.sums(problem, sms, workspace))


CANDIDATES = {
    dtype: (
        *(
            TensorWgradCandidate(tile.of(dtype), vector, False)
            for tile in (MATRIX_SQUARE, MATRIX_SMALL)
            for vector in (True, False)
        ),
        TensorWgradCandidate(MATRIX_SMALL.of(dtype), False, True),
    )
    for dtype in DTYPES
}


def candidates(problem: Problem) -> Iterator[TensorWgradCandidate]:
    """Every instance for the problem's border; only for the weight gradient."""
    if problem.kind is Pass.WGRAD:
        yield from (one for one in CANDIDATES.get(problem.dtype, ()) if one.bordered is bordered(problem))


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    for dtype in DTYPES:
        yield REDUCES[dtype]
        yield from (candidate.kernel for candidate in CANDIDATES[dtype])
