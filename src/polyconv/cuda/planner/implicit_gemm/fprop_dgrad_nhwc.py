"""Plans for fprop and dgrad of 16-bit tensors in channels_last, from sm_80 on
(kernels/implicit_gemm/fprop_dgrad_nhwc.cuh).

Phases, slabs and packed weights are those of cuda/planner/implicit_gemm/fprop_dgrad.py, with rows in steps of 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....problem import HALF_DTYPES, PaddingMode, Pass, Problem
from ....util.cached import cached_property
from ..cost import LINE
from ..epilogue import finishing
from ..kernel_params import PHASE_FACTS, half_structs
from ..plan import KernelSpec, Task
from .fprop_dgrad import (
    MOST_GROUPS,
    PACK_FACTS,
    ImplicitGemmParams,
    LoaderKind,
    PackParams,
    PhaseTables,
    Roles,
    Slab,
    roles,
)
from .fprop_dgrad_mma import ImplicitGemmMmaCandidate
from .tiles import PIPELINED_LONG, PIPELINED_SMALL, PIPELINED_SQUARE, PIPELINED_TALL, PipelinedTile

DTYPES = HALF_DTYPES
CHUNK = 8
"""Channels of one copy and of one store (``kChunk`` in implicit_gemm/mma_tile.cuh)."""
GENERATIONS = range(80, 1000)
"""Compute capabilities with cp.async and m16n8k16."""
TILES = (PIPELINED_SQUARE, PIPELINED_LONG, PIPELINED_TALL, PIPELINED_SMALL)
COPIED = LoaderKind("nhwc", (), 0, False, ())

PACKS = {
    dtype: KernelSpec.of(
        struct,
        "implicit_gemm/pack_weights",
        PipelinedTile.depth,
        symbol=f"implicit_gemm_pack_weights_{PipelinedTile.depth}",
        threads=256,
        facts=PACK_FACTS,
        generations=GENERATIONS,
    ).of_halves(dtype)
    for dtype, struct in half_structs(PackParams).items()
}


def pipeline_facts(tile: PipelinedTile) -> dict[str, int]:
    """Device constants that launches with a tile rely on."""
    return {**tile.facts, f"{tile.cpp}::kRingBytes": tile.ring_bytes, "polyconv::kChunk": CHUNK}


def why_not_in_chunks(problem: Problem, *, grouped: bool = True) -> str | None:
    """Why the channels of x or y (of each group, if ``grouped``) cannot be copied eight at a time, or None."""
    if grouped and any(channels % CHUNK for channels in problem.channels_per_group):
        return f"channels per group are not multiples of {CHUNK}"
    for batch, channel, row, column in (problem.x_strides, problem.y_strides):
        if channel != 1 or batch % CHUNK or row % CHUNK or column % CHUNK or not problem.vector_aligned:
            return "channels are not adjacent (channels_last) and aligned to 16 bytes"
    return None


@dataclass(frozen=True)
class ImplicitGemmNhwcCandidate(ImplicitGemmMmaCandidate):
    """fprop or dgrad of 16-bit tensors with adjacent channels."""

    tile: PipelinedTile
    stores_chunks = True
    volume = False
    structs = half_structs(ImplicitGemmParams)

    @property
    def pack(self) -> KernelSpec:
        return PACKS[self.tile.dtype]

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = self.tile
        plain = KernelSpec.of(
            self.structs[tile.dtype],
            "implicit_gemm/fprop_dgrad_nhwc",
            *((tile, True) if self.volume else (tile,)),
            function="implicit_gemm_nhwc",
            symbol=f"implicit_gemm_{'ndhwc' if self.volume else 'nhwc'}_{tile.name}",
            threads=tile.threads,
            min_blocks=tile.min_blocks(0),
            facts={**pipeline_facts(tile), **PHASE_FACTS},
            generations=GENERATIONS,
        )
        return finishing(plain).of_halves(tile.dtype)

    def refusal(self, problem: Problem) -> str | None:
        r = roles(problem)
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if r.border is not PaddingMode.ZEROS:
            return f"cannot read a {r.border} border"
        return why_not_in_chunks(problem)

    def _scattered(self, problem: Problem, r: Roles, tables: PhaseTables, rows: float) -> int:
        """A warp copies four chunks of each of eight pixels. With few channels they lie under several taps, in lines of
        their own unless the taps are neighbours."""
        taps = max(1.0, self.tile.depth / r.channels)
        turns = (taps - 1) / max(1, tables.w[0].taps)
        pixel = min(LINE, problem.element_bytes * r.source_strides[3]) / LINE
        return int(rows / (32 * CHUNK) * (taps - 1 + 7 * turns) * pixel)

    def _gather_task(self, problem: Problem, r: Roles, tables: PhaseTables, slab: Slab) -> Task:
        return replace(super()._gather_task(problem, r, tables, slab), dynamic_shared=self.tile.ring_bytes)


CANDIDATES = {dtype: tuple(ImplicitGemmNhwcCandidate(tile.of(dtype), COPIED) for tile in TILES) for dtype in DTYPES}


def candidates(problem: Problem) -> Iterator[ImplicitGemmNhwcCandidate]:
    """Every tile, refused or not; none for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from CANDIDATES.get(problem.dtype, ())


def all_kernels() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        yield PACKS[dtype]
        yield from (candidate.kernel for candidate in CANDIDATES[dtype])
