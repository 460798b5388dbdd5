"""Sizes of one chain of winograd_fp16x3 launches: how the kernels of winograd_fp16x3/layout.cuh cut their work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ....algebra.polyphase import DenseAxis
from ....numerics.tensor_core import SplitProducts
from ....problem import Problem
from ....util.intmath import ceil_div, round_up
from ..implicit_gemm.fprop_dgrad import MOST_GROUPS, roles
from ..winograd.axis import ToomAxis
from ..winograd.nonfused_tiling import segments_of

K_TILE = 32
"""Written channels per tile (``kTensorK``)."""
UNITS = 64
"""Most rows times columns of a tile (``kTensorUnits``)."""
CHUNK = 4
"""Channels per quad (``kTensorChannels``)."""
PARTS = 128
"""Absmax parts per image, one per block (``kMagnitudeParts``)."""
WARPS = 8
QUAD = 16
"""Bytes of a quad: four channels, split."""
SECTOR = 2
"""Quads per sector. A point of V begins on a sector, so that warps store whole sectors."""
MOST_STAGE = 128
"""Most quads of a chunk that a tile reads: four per lane."""
PARKED_BYTES = 4 * (K_TILE * UNITS + 4)
"""Shared memory per warp for sums parked in a pass of nested segments."""


@dataclass(frozen=True, slots=True)
class MatrixInstruction:
    """Tensor-core instruction (kernels/common/mma.cuh), and how the GEMM uses it."""

    name: str
    """Suffix of its C++ struct: ``884`` of ``Mma884``."""
    word: str
    """Infix of kernel and candidate names."""
    rows: int
    """Written channels per fragment (``kRows``)."""
    depth: int
    """Channels per step (``kDepth``)."""
    steps_per_flush: int
    """Steps accumulated on a tensor core. It truncates, so the error grows with the length of the sum."""
    generations: range
    """Compute capabilities whose tensor cores have it; others emulate it slowly, or lack it."""
    products: SplitProducts
    """Arithmetic. Both FP16 values of an operand share a scale, so one set of sums serves all three products. Where
    generations differ, the coarsest."""
    strip: int
    """Units of a tile that are multiplied together, or skipped where the tile has fewer."""
    parks: bool
    """Whether sums that a pass of nested segments does not need are parked in shared memory; else in registers."""

    @property
    def cpp(self) -> str:
        return f"polyconv::Mma{self.name}"

    def steps(self, w: ToomAxis) -> str:
        """C++ main loop (kernels/winograd_fp16x3/mainloop_m8n8k4.cuh, mainloop_m16n8k16.cuh)."""
        return f"polyconv::MainloopK{self.depth}<{w.cpp}>"

    @property
    def chunks(self) -> int:
        """Chunks per step."""
        return self.depth // CHUNK

    @property
    def exchange_bytes(self) -> int:
        """Shared memory per warp to exchange the sums of a fragment between points."""
        return 4 * (self.rows * UNITS + 4)

    def stage_bytes(self, stage: int) -> int:
        """Shared memory for the quads that a tile reads per step. Several chunks are padded to lie in different banks
        (``chunk_pitch``)."""
        return QUAD * (stage if self.chunks == 1 else self.chunks * ((stage + 1 | 3) - 1))


@dataclass(frozen=True, slots=True)
class Tiling:
    """Cut of the positions of a plane into tiles (kernels/winograd_fp16x3/layout.cuh)."""

    rows: int
    phases: int
    units: int
    row_groups: int
    phase_groups: int
    unit_groups: int
    pitch: int
    """Columns of V per column group."""
    stage: int
    """Quads of one chunk that a tile reads."""

    @property
    def columns(self) -> int:
        return self.phases * self.units

    @property
    def column_groups(self) -> int:
        return self.phase_groups * self.unit_groups

    @property
    def tiles(self) -> int:
        """Tiles per plane."""
        return self.row_groups * self.column_groups


@lru_cache(maxsize=1024)
def tiling(rows: int, units: int, outputs: int, dilation: int, taps_h: int, shifts: int) -> Tiling | None:
    """Cheapest cut of ``rows`` rows of ``units`` units; None if the taps read too much for any tile."""

    def cost(cut: Tiling) -> float:
        """Tiles, each weighted by its products, its reads and how well its runs of results fill sectors: in shares of
        the counted traffic of W1's tiles."""
        run = cut.columns * outputs if cut.phases == dilation else cut.phases
        return cut.tiles * (3 + 0.3 * cut.stage / 100 + 0.3 * (run + 7) / run)

    return min(_tilings(rows, units, dilation, taps_h, shifts), key=cost, default=None)


def _tilings(rows: int, units: int, dilation: int, taps_h: int, shifts: int) -> Iterator[Tiling]:
    """Cuts whose stage fits: all residues of a dilation and some units, or some residues and one unit."""
    for phase_groups in range(1, dilation + 1):
        phases = ceil_div(dilation, phase_groups)
        for each in range(1, min(units, UNITS // phases) + 1 if phase_groups == 1 else 2):
            tall = min(UNITS // (phases * each), rows)
            pitch = (each + shifts - 1) * phases
            stage = (tall + taps_h - 1) * pitch
            if tall and stage <= MOST_STAGE:
                groups = ceil_div(rows, tall), ceil_div(dilation, phases), ceil_div(units, each)
                yield Tiling(tall, phases, each, *groups, pitch, stage)


class Slab(NamedTuple):
    """Work of one input transform and one GEMM: whole planes, or row groups of one plane."""

    plane: int
    """First plane."""
    planes: int
    first: int
    """First row group."""
    row_groups: int
    known: int
    """Absmax parts of images known before its GEMM: at least those of its own images."""
    found: int
    """Absmax parts that trailing blocks of its GEMM compute for later slabs."""


class Chain:
    """Sizes of the launches for one pair of phases."""

    def __init__(self, problem: Problem, h: DenseAxis, w: DenseAxis, along_w: ToomAxis, mma: MatrixInstruction):
        r = roles(problem)
        self.h, self.w, self.along_w, self.mma = h, w, along_w, mma
        self.batch, self.groups, self.channels, self.outputs = problem.batch, problem.groups, r.channels, r.outputs
        self.nested = along_w.tiles > 1
        self.passes = 3 if self.nested else 1
        self.shifts = 1 if self.nested else segments_of(along_w, w.taps)
        self.taps_h = max(1, h.taps)
        self.channels_all = len(h.classes) * len(w.classes) * r.channels
        self.chunks = round_up(ceil_div(self.channels_all, CHUNK), self.mma.chunks)
        self.rows = ceil_div(h.count, h.dilation)
        units = ceil_div(w.count, w.dilation * along_w.outputs)
        self.cut = tiling(self.rows, units, along_w.outputs, w.dilation, self.taps_h, self.shifts)
        self.planes = problem.batch * h.dilation
        self.k_tiles = ceil_div(r.outputs, K_TILE)
        rounds = self.passes * self.chunks * self.taps_h * self.shifts
        self.steps = rounds // self.mma.chunks
        # One step of slack: the GEMM prefetches one step ahead.
        quads = (problem.groups * self.k_tiles * along_w.points * rounds + 1) * K_TILE
        self.weight_bytes = QUAD * quads

    @property
    def tiled(self) -> Tiling:
        assert self.cut is not None, "refused"
        return self.cut

    def plane_quads(self, row_groups: int) -> int:
        """Quads per point, chunk and column group of V, rounded up to whole sectors; the padding is never read."""
        return round_up((row_groups * self.tiled.rows + self.taps_h - 1) * self.tiled.pitch, SECTOR)

    def source_bytes(self, planes: int, row_groups: int) -> int:
        """Bytes of V of a slab."""
        each = self.tiled.column_groups * self.passes * self.chunks * self.along_w.points
        return round_up(QUAD * self.groups * planes * each * self.plane_quads(row_groups), 256)

    def slab_bytes(self, planes: int, row_groups: int) -> int:
        """Workspace in use while a slab is processed: U and V."""
        return self.weight_bytes + self.source_bytes(planes, row_groups)

    def shared_bytes(self) -> int:
        stages, exchange, parks = 2 * self.mma.stage_bytes(self.tiled.stage), self.mma.exchange_bytes, self.mma.parks
        tiles = 2 if self.nested and not parks else 1
        return WARPS * (max(stages, tiles * exchange) + (PARKED_BYTES if self.nested and parks else 0))

    @property
    def most_planes(self) -> int:
        """Most planes per launch: planes times groups are the blocks of one grid axis."""
        return MOST_GROUPS // self.groups

    def slab(self, left: int) -> tuple[int, int]:
        """Planes and row groups per plane that fit ``left`` bytes: whole planes, or at least a row group of one."""
        whole = self.tiled.row_groups
        planes = min(self.planes, self.most_planes, max(0, left) // self.source_bytes(1, whole))
        if planes:
            return ceil_div(self.planes, ceil_div(self.planes, planes)), whole
        row_groups = whole
        while row_groups > 1 and self.source_bytes(1, row_groups) > left:
            row_groups = row_groups - max(1, row_groups // 32)
        return 1, ceil_div(whole, ceil_div(whole, row_groups))

    def slabs(self, left: int, known: int) -> Iterator[Slab]:
        """Slabs of ``left`` bytes each, if ``known`` absmax parts are available before the first. Each GEMM computes
        the parts that the next slab needs, and more in proportion to the planes done, so that all share the work."""
        planes, row_groups = self.slab(left)
        whole = self.tiled.row_groups
        parts, beforehand = PARTS * self.batch, known
        for plane in range(0, self.planes, planes):
            last = min(plane + planes, self.planes)
            for first in range(0, whole, row_groups):
                end = min(first + row_groups, whole)
                next_last = last if end < whole else min(last + planes, self.planes)
                in_step = beforehand + ceil_div(PARTS * ((last - 1) * whole + end), self.h.dilation * whole)
                wanted = max(self.parts_until(next_last), in_step)
                found = max(0, min(parts, wanted) - known)
                yield Slab(plane, last - plane, first, end - first, known, found)
                known += found

    def parts_until(self, plane: int) -> int:
        """Absmax parts of the images of all planes before ``plane``."""
        return PARTS * ceil_div(plane, self.h.dilation)

    def parts_beforehand(self, left: int) -> int:
        """Absmax parts of the images of the first slab."""
        return self.parts_until(self.slab(left)[0])
