"""Plans for fprop and dgrad of half-precision tensors as an implicit GEMM on tensor cores (kernels/tensor_gather.cuh).

Phases, slabs, tables and packed weights are those of plan/gather.py, of elements of 16 bits. One instance serves with
and without an epilogue: sums are finished where they are stored, four at a time, so it costs next to nothing to ask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..accuracy import half_error
from ..problem import HALF_DTYPES, Pass, Problem
from . import layout
from .epilogue import has_epilogue, kernel_with_epilogue, with_epilogue_params
from .gather import FOLDED, POINTWISE, ROWS, ROWS_BORDERED, TAPS, TAPS_VECTOR, GatherCandidate, LoaderKind
from .plan import KernelSpec, Launch, Task
from .tiles import MATRIX_SLIM, MATRIX_SMALL, MATRIX_SQUARE, MATRIX_TALL, MatrixTile

DTYPES = HALF_DTYPES
"""What the tensors of this family's problems are made of."""

TILES: dict[LoaderKind, tuple[MatrixTile, ...]] = {
    TAPS: (MATRIX_SQUARE, MATRIX_TALL, MATRIX_SMALL, MATRIX_SLIM),
    TAPS_VECTOR: (MATRIX_SQUARE, MATRIX_TALL, MATRIX_SMALL, MATRIX_SLIM),
    POINTWISE: (MATRIX_SQUARE, MATRIX_SMALL),
    ROWS: (MATRIX_TALL, MATRIX_SMALL, MATRIX_SLIM),
    ROWS_BORDERED: (MATRIX_TALL, MATRIX_SLIM),
    FOLDED: (MATRIX_SMALL, MATRIX_SLIM),
}
"""Instances are few: each is compiled for two formats."""

PACKS = {
    dtype: KernelSpec.of(struct, "pack_weights", MatrixTile.depth, threads=256).of_halves(dtype)
    for dtype, struct in zip(DTYPES, (layout.HalfPackParams, layout.BFloat16PackParams), strict=True)
}
_PARAMS = dict(zip(DTYPES, (layout.HalfGatherParams, layout.BFloat16GatherParams), strict=True))


@dataclass(frozen=True)
class TensorGatherCandidate(GatherCandidate):
    """fprop or dgrad of half-precision tensors."""

    tile: MatrixTile

    @property
    def pack(self) -> KernelSpec:
        return PACKS[self.tile.dtype]

    @cached_property
    def kernel(self) -> KernelSpec:
        tile, loader = self.tile, self.loader
        plain = KernelSpec.of(
            _PARAMS[tile.dtype],
            "tensor_folded" if loader is FOLDED else "tensor_gather",
            tile,
            *(f"polyconv::{name.format(tile=tile.cpp)}" for name in loader.types),
            stem="tensor_gather",
            symbol=f"tensor_{loader.name}_{tile.name}",
            threads=tile.threads,
            min_blocks=tile.min_blocks(loader.weight),
            facts=tile.facts,
        )
        return replace(kernel_with_epilogue(plain), symbol=plain.symbol).of_halves(tile.dtype)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return half_error(problem, self.sums(problem, sms, workspace))

    def _can_finish(self) -> bool:
        return True

    def _task_with_epilogue(self, problem: Problem, task: Task, elements: int) -> Task:
        if not has_epilogue(problem):
            return task
        moved = task.work.dram_bytes + problem.element_bytes * elements * problem.residual
        return replace(task, work=replace(task.work, dram_bytes=moved, finished=elements))

    def _with_epilogue(self, problem: Problem, launch: Launch) -> Launch:
        return with_epilogue_params(problem, launch)


CANDIDATES = {
    dtype: tuple(TensorGatherCandidate(tile.of(dtype), loader) for loader, tiles in TILES.items() for tile in tiles)
    for dtype in DTYPES
}


def candidates(problem: Problem) -> Iterator[TensorGatherCandidate]:
    """Every loader with its tiles, whether it takes this problem or not; not for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from CANDIDATES.get(problem.dtype, ())


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    for dtype in DTYPES:
        yield PACKS[dtype]
        yield from (candidate.kernel for candidate in CANDIDATES[dtype])
