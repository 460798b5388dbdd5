"""Plans for fprop and dgrad of 16-bit tensors in channels_last, from sm_80 on
(kernels/implicit_gemm/fprop_dgrad_nhwc.cuh).

Phases, slabs and packed weights are those of cuda/planner/implicit_gemm/fprop_dgrad.py, with rows in steps of 32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ....problem import HALF_DTYPES, PaddingMode, Pass, Problem, Strides
from ..epilogue import kernel_with_epilogue
from ..kernel_params import PHASE_FACTS, half_structs
from ..plan import KernelSpec, Task
from .fprop_dgrad import (
    MOST_GROUPS,
    PACK_FACTS,
    ImplicitGemmParams,
    LoaderKind,
    PackParams,
    Roles,
    _PhaseTables,
    _Slab,
    roles,
)
from .fprop_dgrad_mma import ImplicitGemmMmaCandidate
from .tiles import PIPELINED_LONG, PIPELINED_SMALL, PIPELINED_SQUARE, PIPELINED_TALL, PipelinedTile

DTYPES = HALF_DTYPES
CHUNK = 8
"""Channels of one copy and of one store (``kChunk`` in the header)."""
GENERATIONS = range(80, 1000)
"""Compute capabilities with cp.async and m16n8k16."""
TILES = (PIPELINED_SQUARE, PIPELINED_LONG, PIPELINED_TALL, PIPELINED_SMALL)
COPIED = LoaderKind("nhwc", (), 0, False, ())

_PARAMS = half_structs(ImplicitGemmParams)
PACKS = {
    dtype: KernelSpec.of(
        struct,
        "implicit_gemm/pack_weights",
        PipelinedTile.depth,
        symbol=f"implicit_gemm_pack_weights_{PipelinedTile.depth}",
        threads=256,
        facts=PACK_FACTS,
    ).of_halves(dtype)
    for dtype, struct in half_structs(PackParams).items()
}


@dataclass(frozen=True)
class ImplicitGemmNhwcCandidate(ImplicitGemmMmaCandidate):
    """fprop or dgrad of 16-bit tensors with adjacent channels."""

    tile: PipelinedTile

    @property
    def pack(self) -> KernelSpec:
        return PACKS[self.tile.dtype]

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = self.tile
        plain = KernelSpec.of(
            _PARAMS[tile.dtype],
            "implicit_gemm/fprop_dgrad_nhwc",
            tile,
            function="implicit_gemm_nhwc",
            symbol=f"implicit_gemm_nhwc_{tile.name}",
            threads=tile.threads,
            min_blocks=tile.min_blocks(0),
            facts={
                **tile.facts,
                f"{tile.cpp}::kRingBytes": tile.ring_bytes,
                "polyconv::kChunk": CHUNK,
                **PHASE_FACTS,
            },
            generations=GENERATIONS,
        )
        return replace(kernel_with_epilogue(plain), symbol=plain.symbol).of_halves(tile.dtype)

    def refusal(self, problem: Problem) -> str | None:
        r = roles(problem)
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if r.border is not PaddingMode.ZEROS:
            return f"cannot read a {r.border} border"
        if r.channels % CHUNK or r.outputs % CHUNK:
            return f"channels per group are not multiples of {CHUNK}"
        if not (problem.vector_aligned and _in_chunks(r.source_strides) and _in_chunks(r.written_strides)):
            return "channels are not adjacent (channels_last) and aligned to 16 bytes"
        return None

    def _gather_task(self, problem: Problem, r: Roles, tables: _PhaseTables, slab: _Slab) -> Task:
        return replace(super()._gather_task(problem, r, tables, slab), dynamic_shared=self.tile.ring_bytes)


def _in_chunks(strides: Strides) -> bool:
    batch, channel, row, column = strides
    return channel == 1 and not any(stride % CHUNK for stride in (batch, row, column))


CANDIDATES = {
    dtype: tuple(ImplicitGemmNhwcCandidate(tile.of(dtype), COPIED) for tile in TILES) for dtype in DTYPES
}


def candidates(problem: Problem) -> Iterator[ImplicitGemmNhwcCandidate]:
    """Every tile, refused or not; none for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from CANDIDATES.get(problem.dtype, ())


def all_kernels() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        yield PACKS[dtype]
        yield from (candidate.kernel for candidate in CANDIDATES[dtype])
