"""Plans for fprop and dgrad of up to 3x3 taps as one fused Winograd kernel (kernels/winograd/fused.cuh)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from ....algebra.polyphase import DenseAxis
from ....algebra.segments import Scheme2d
from ....numerics.prediction import Way
from ....problem import PaddingMode, Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..cost import moved_bytes
from ..epilogue import kernel_with_epilogue, task_with_epilogue, with_epilogue
from ..implicit_gemm.fprop_dgrad import MANY_PHASES, MOST_GROUPS, Roles, roles, scattered_columns
from ..kernel_params import Params, declared
from ..plan import DEFAULT_EFFICIENCY, KernelSpec, Launch, Schedule, Task, Work
from .axis import ToomAxis

FusedAxis = declared("winograd/fused", "FusedAxis")
FusedParams = declared("winograd/fused", "FusedParams")
FusedTaps = declared("winograd/fused_filter", "FusedTaps")
FusedFilterParams = declared("winograd/fused_filter", "FusedFilterParams")


LIMIT = 2**31 - 1
FILLED = 4
"""Waves of blocks that fill a device evenly enough."""


@dataclass(frozen=True)
class FusedTile:
    """Distribution of one point's sums over lanes: ``FusedTile`` of winograd/fused.cuh."""

    lanes_k: int
    lanes_u: int
    thread_k: int
    thread_u: int
    each: int
    """Points per lane."""
    chunk: int
    """Channels per step."""
    meet: int
    """Channels per lane exchanged at a time for the output transform: as many as keep every warp busy."""
    min_blocks: int
    columns: int = 32
    """Output columns per block."""

    @property
    def k(self) -> int:
        """Written channels per block."""
        return self.lanes_k * self.thread_k

    @property
    def units(self) -> int:
        return self.lanes_u * self.thread_u


@dataclass(frozen=True)
class FusedCandidate:
    """F(h) x F(w) with one tile of written channels and units: one of :data:`CANDIDATES`."""

    h: ToomAxis
    w: ToomAxis
    tile: FusedTile
    direct = False
    params: ClassVar[type[Params]] = FusedParams
    weights_params: ClassVar[type[Params]] = FusedFilterParams
    channels_together: ClassVar[int] = 1
    """Channels per block of the filter transform."""

    @property
    def name(self) -> str:
        return f"winograd_fused_f{self.h.m}{self.h.taps}_f{self.w.m}{self.w.taps}_{self.tile.k}x{self.tile.units}"

    @property
    def points(self) -> int:
        return self.h.points * self.w.points

    @property
    def threads(self) -> int:
        return self.points // self.tile.each * self.tile.lanes_k * self.tile.lanes_u

    @property
    def shared(self) -> int:
        """Shared memory [bytes]: two buffers of transformed chunks and patches, and a slice of the sums."""
        t = self.tile
        patch = (self.rows + self.h.taps - 1) * round_up(self.tile.columns + self.w.taps - 1, 4)
        buffers = 2 * t.chunk * (self.points * (t.units + 8) + patch)
        return 4 * (buffers + self.points * t.lanes_k * t.meet * t.units)

    @property
    def rows(self) -> int:
        """Output rows per block."""
        return self.tile.units * self.w.m // self.tile.columns * self.h.m

    @cached_property
    def kernel(self) -> KernelSpec:
        t = self.tile
        sizes = t.lanes_k, t.lanes_u, t.thread_k, t.thread_u, t.each, t.chunk, t.meet
        return self._instance(
            "winograd/fused", "FusedTile", sizes, "2 * {tile}::kBuffer + {tile}::kExchange", efficiency=0.5
        )

    def _tile_cpp(self, struct: str, sizes: tuple[int, ...]) -> str:
        return f"polyconv::{struct}<{', '.join((self.h.cpp, self.w.cpp, *map(str, sizes)))}>"

    def _instance(
        self,
        stem: str,
        struct: str,
        sizes: tuple[int, ...],
        shared: str,
        generations: Sequence[int] = range(1000),
        efficiency: float = DEFAULT_EFFICIENCY,
    ) -> KernelSpec:
        """Kernel instance; ``shared`` is the header's expression for its shared memory [floats]."""
        tile = self._tile_cpp(struct, sizes)
        return KernelSpec.of(
            self.params,
            stem,
            tile,
            symbol=self.name,
            threads=self.threads,
            min_blocks=self.tile.min_blocks,
            axes=(self.h, self.w),
            facts={
                f"{tile}::kThreads": self.threads,
                f"{tile}::kK": self.tile.k,
                f"{tile}::kRows": self.rows,
                f"{tile}::kColumns": self.tile.columns,
                f"4 * ({shared.format(tile=tile)})": self.shared,
            },
            generations=generations,
            efficiency=efficiency,
        )

    @cached_property
    def weights_kernel(self) -> KernelSpec:
        t = self.tile
        return KernelSpec.of(
            FusedFilterParams,
            "winograd/fused_filter",
            *(self.h, self.w, 32 // (t.lanes_k * t.lanes_u), t.each, t.lanes_k, t.thread_k),
            symbol=f"winograd_fused_filter_f{self.h.m}{self.h.taps}_f{self.w.m}{self.w.taps}_{t.k}x{t.each}",
            threads=t.k,
        )

    def refusal(self, problem: Problem) -> str | None:
        if problem.kind is Pass.WGRAD:
            return "only for fprop and dgrad"
        r = roles(problem)
        if r.border is not PaddingMode.ZEROS:
            return f"cannot read a {r.border} border"
        if problem.groups > MOST_GROUPS or r.channels > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups or channels of a group"
        if r.many_phases:
            return MANY_PHASES
        for dense, axis in ((r.dense_h, self.h), (r.dense_w, self.w)):
            if any(d.taps == 0 for d in dense):
                return "a stride that leaves positions without taps"
            if any(len(d.classes) > 1 for d in dense):
                return "the source is read with a stride"
            if any(d.taps > axis.taps for d in dense):
                return f"more than {axis.taps} taps"
        for pair in r.kinds:
            if self._blocks(problem, pair.h, pair.w) * ceil_div(r.outputs, self.tile.k) > LIMIT:
                return "more than 2^31 tiles"
            if self._reach(r, pair.h, pair.w) > LIMIT:
                return "a tile reaches over more than 2^31 elements"
        return None

    def _reach(self, r: Roles, h: DenseAxis, w: DenseAxis) -> int:
        """Elements from the first to the last that a block reads of a channel, for strides of zero or more."""
        rows, columns = self.rows + self.h.taps, self.tile.columns + self.w.taps + 3
        row, column = r.source_strides[2:]
        return rows * h.read_step * h.dilation * row + columns * w.read_step * w.dilation * column

    def _tiles(self, h: DenseAxis, w: DenseAxis) -> tuple[int, int]:
        """Tiles along both axes; each residue of the dilation is counted like the longest."""
        tiles_h = ceil_div(ceil_div(h.count, h.dilation), self.rows)
        tiles_w = ceil_div(ceil_div(w.count, w.dilation), self.tile.columns)
        return tiles_h * h.dilation, tiles_w * w.dilation

    def _blocks(self, problem: Problem, h: DenseAxis, w: DenseAxis) -> int:
        """Tiles of positions."""
        tiles_h, tiles_w = self._tiles(h, w)
        return tiles_h * tiles_w * problem.batch

    def _k_tiles_each(self, problem: Problem, r: Roles, h: DenseAxis, w: DenseAxis, sms: int) -> int:
        """Tiles of written channels per block: as many as still fill the device."""
        k_tiles = ceil_div(r.outputs, self.tile.k)
        wanted = FILLED * sms * self.tile.min_blocks
        return ceil_div(k_tiles, min(k_tiles, ceil_div(wanted, self._blocks(problem, h, w) * problem.groups)))

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        r = roles(problem)
        for pair in r.kinds:
            yield self._weights_task(problem, r, pair.h, pair.w, pair.times)
            yield self._convolve_task(problem, r, pair.h, pair.w, sms, pair.times)

    def weights_at(self, problem: Problem) -> int:
        """Workspace offset of the transformed weights."""
        return 0

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """For every pair of phases: transform the weights, then convolve."""
        r = roles(problem)
        k_tiles, channels = ceil_div(r.outputs, self.tile.k), round_up(r.channels, self.tile.chunk)
        # One channel of slack: the kernel's last loads read past the last one, and their values are not used.
        each = 4 * (problem.groups * k_tiles * channels + 1) * self.tile.k * self.points
        found: list[Launch] = []
        at = self.weights_at(problem)
        for h, w in r.pairs:
            found.append(self._weights(problem, r, h, w, at))
            found.append(self._convolve(problem, r, h, w, at, sms))
            at += round_up(each, 256)
        return Schedule(tuple(found), at, at if problem.kind is Pass.FPROP else 0)  # fprop has one pair of phases

    def _weights_task(self, problem: Problem, r: Roles, h: DenseAxis, w: DenseAxis, times: int = 1) -> Task:
        channels = round_up(r.channels, self.tile.chunk) // self.channels_together
        grid = (ceil_div(r.outputs, self.tile.k), channels, problem.groups)
        blocks = grid[0] * grid[1] * grid[2]
        moved = 4 * blocks * self.channels_together * self.tile.k * (self.points + h.taps * w.taps)
        return Task(self.weights_kernel, grid, Work(blocks, blocks, blocks, moved), times)

    def _weights(self, problem: Problem, r: Roles, h: DenseAxis, w: DenseAxis, at: int) -> Launch:
        p = self.weights_params(channels=r.channels, outputs=r.outputs)
        p.w_group = problem.channels_per_group[1] * problem.w_strides[0]
        p.w_output, p.w_channel = r.w_output, r.w_channel
        p.w_row, p.w_column = problem.w_strides[2:]
        p.h, p.w_taps = (FusedTaps(c.taps, c.tap_first, c.tap_stride) for (c,) in (h.classes, w.classes))
        pointers = kernel_params.slots(FusedFilterParams, w="w", transformed=("workspace", at))
        return self._weights_task(problem, r, h, w).launch(bytes(p), pointers)

    def _convolve_task(self, problem: Problem, r: Roles, h: DenseAxis, w: DenseAxis, sms: int, times: int = 1) -> Task:
        positions, k_tiles = self._blocks(problem, h, w), ceil_div(r.outputs, self.tile.k)
        splits = ceil_div(k_tiles, self._k_tiles_each(problem, r, h, w, sms))
        blocks, tiles = positions * splits * problem.groups, positions * k_tiles * problem.groups
        channels = round_up(r.channels, self.tile.chunk)
        moved = moved_bytes(problem) // (len(r.phases_h) * len(r.phases_w))
        # Warps load patch rows and store output rows: in a dilated row every element is in a line of its own.
        apart = min(32, w.dilation) - 1
        rows = blocks * channels * (self.rows + self.h.taps - 1) + tiles * self.tile.k * self.rows
        scattered = apart * rows * ceil_div(self.tile.columns, 32)
        lines, sectors = self._in_columns(r, w, blocks * channels, tiles)
        scattered_sectors = 4 * scattered + sectors
        work = Work(blocks, tiles, tiles * (channels // self.tile.chunk), moved, scattered + lines, scattered_sectors)
        task = Task(self.kernel, (positions * splits, problem.groups, 1), work, times, self.shared)
        return task_with_epilogue(problem, task, prod(problem.y_shape))

    def _in_columns(self, r: Roles, w: DenseAxis, patches: int, tiles: int) -> tuple[int, int]:
        """Extra lines of the patch rows, and lines and sectors of the output rows, where columns are not adjacent."""
        across = ceil_div(self.tile.columns, 32)
        loads, stores = patches * (self.rows + self.h.taps - 1) * across, tiles * self.tile.k * self.rows * across
        loaded, _ = scattered_columns(r.source_strides, loads, w.read_step * w.dilation)
        stored, sectors = scattered_columns(r.written_strides, stores, w.written_step * w.dilation)
        return loaded + stored, sectors

    def _convolve(self, problem: Problem, r: Roles, h: DenseAxis, w: DenseAxis, at: int, sms: int) -> Launch:
        p = self.params(channels=r.channels, channels_padded=round_up(r.channels, self.tile.chunk), outputs=r.outputs)
        p.source_batch, p.source_channel, p.source_row, p.source_column = r.source_strides
        p.written_batch, p.written_channel, p.written_row, p.written_column = r.written_strides
        p.source_height, p.source_width = r.source_size
        p.source_channel_bytes = 4 * p.source_channel
        p.source_rewind_bytes = -p.channels_padded * p.source_channel_bytes
        pitch = round_up(self.tile.columns + self.w.taps - 1, 4)
        p.patch_step_bytes = 4 * (self.threads // pitch) * h.read_step * h.dilation * p.source_row
        p.across_bytes = 4 * 32 * w.written_step * w.dilation * p.written_column
        p.down_bytes = 4 * self.h.m * h.written_step * h.dilation * p.written_row
        steps = p.written_batch, p.written_channel, p.written_row, w.written_first
        dense = p.written_column == w.written_step == w.dilation == 1
        p.pairs = dense and problem.vector_aligned and all(step % 2 == 0 for step in steps)
        p.job_bytes = 4 * 4 * (self.threads // 32 // self.h.m) * p.written_channel
        p.k_tiles = ceil_div(r.outputs, self.tile.k)
        p.k_tiles_each = self._k_tiles_each(problem, r, h, w, sms)
        p.k_splits = ceil_div(p.k_tiles, p.k_tiles_each)
        tiles_h, tiles_w = self._tiles(h, w)
        p.h, p.w = _axis(h, tiles_h), _axis(w, tiles_w)
        weights = ("workspace", at)
        slots = kernel_params.slots(FusedParams, source=r.source, weights=weights, written=r.written, bias=r.bias)
        task = self._convolve_task(problem, r, h, w, sms)
        return with_epilogue(problem, task.launch(bytes(p), slots))

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        """Largest expected error, relative to the output's scale; equal for all phases of a stride."""
        return self.ways(problem)[0].error(problem)

    def ways(self, problem: Problem) -> tuple[Way, ...]:
        """How the output maps are summed: one entry per tap count among the phases, all by one scheme."""
        r = roles(problem)
        kinds = dict.fromkeys((kind.h.taps, kind.w.taps) for kind in r.kinds)
        return tuple(self._way(r.channels, taps) for taps in kinds)

    def _way(self, channels: int, taps: tuple[int, int]) -> Way:
        return Way(Scheme2d(self.h.scheme(), self.w.scheme()), channels, (), taps)


@dataclass(frozen=True)
class ResidentCandidate(FusedCandidate):
    """Variant for few channels: a block transforms its source once and keeps it in shared memory."""

    channels: int = 16
    """Most channels that fit."""
    floats_of_shared: ClassVar[str] = "{tile}::kChannels * {tile}::kV + {tile}::kMeeting"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Template arguments of the tile after the algorithms."""
        return self.tile.columns, self.channels

    @property
    def name(self) -> str:
        return f"{super().name}_resident{self.channels}"

    @property
    def shared(self) -> int:
        """Shared memory [bytes]: the transformed source, and the sums of one channel of every lane."""
        t = self.tile
        return 4 * t.units * (self.points * self.channels + self.h.m * self.w.points * t.k // 4)

    @cached_property
    def kernel(self) -> KernelSpec:
        return self._instance("winograd/fused_resident", "ResidentTile", self.sizes, self.floats_of_shared)

    def refusal(self, problem: Problem) -> str | None:
        refused = super().refusal(problem)
        if refused is None and roles(problem).channels > self.channels:
            return f"more than {self.channels} channels of a group"
        return refused


F23 = ToomAxis(2, (3,))
F43 = ToomAxis(4, (3,))
CANDIDATES = (
    FusedCandidate(F43, F43, FusedTile(4, 8, 8, 4, 3, 2, 3, 1)),
    FusedCandidate(F43, F43, FusedTile(2, 16, 8, 4, 3, 1, 3, 1)),
    FusedCandidate(F23, F43, FusedTile(4, 8, 8, 4, 2, 2, 3, 1)),
    FusedCandidate(F23, F23, FusedTile(4, 8, 8, 4, 2, 2, 2, 2)),
    ResidentCandidate(F43, F43, FusedTile(4, 8, 8, 4, 3, 1, 1, 1, 64)),
)


def candidates(problem: Problem) -> Iterator[FusedCandidate]:
    """All candidates, refused or not."""
    yield from CANDIDATES


def all_kernels() -> Iterator[KernelSpec]:
    yield from dict.fromkeys(spec for one in CANDIDATES for spec in (one.weights_kernel, one.kernel))
    yield from (kernel_with_epilogue(one.kernel) for one in CANDIDATES)


def _axis(axis: DenseAxis, tiles: int) -> Params:
    return FusedAxis(
        axis.written_first,
        axis.written_step,
        axis.classes[0].read_first,
        axis.read_step,
        axis.count,
        axis.dilation,
        tiles,
    )
