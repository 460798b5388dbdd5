"""Plans for fprop and dgrad of float32 tensors by one scaled FP16 product, with the source read in place
(kernels/scaled_fp16/halo.cuh).

Absmax of the weight, packed weights, and one GEMM whose blocks scale the source by themselves. Compared with
cuda/planner/scaled_fp16/fprop_dgrad.py it moves x and y once each, but reads the pixels that neighbouring tiles share
several times, from the L2, and the whole tile for every tile of output channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ....problem import PaddingMode, Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..cost import LINE, SECTOR
from ..epilogue import finishing, task_with_epilogue
from ..implicit_gemm.fprop_dgrad import (
    MOST_GROUPS,
    PhaseTables,
    Roles,
    Slab,
    dense_channels,
    dense_pixels,
    phase_tables,
    roles,
)
from ..implicit_gemm.fprop_dgrad_nhwc import COPIED, GENERATIONS, pipeline_facts
from ..implicit_gemm.tiles import PIPELINED_LONG, PIPELINED_SQUARE, PIPELINED_TALL, PipelinedTile
from ..kernel_params import DIVIDEND_LIMIT, PHASE_FACTS, declared, int32, with_fields
from ..plan import KernelSpec, Launch, Schedule, Task, Work
from .fprop_dgrad import ScaledCandidate
from .operand import scaled_error, w_of

ScaledHaloParams = declared("scaled_fp16/halo", "ScaledHaloParams")

DEPTH = PipelinedTile.depth
"""Channels of the halo at a time."""
PITCH = 2 * DEPTH + 16
"""Bytes of a pixel of the halo (``kHaloPitch``)."""
TILES = tuple(replace(tile, stages=4) for tile in (PIPELINED_LONG, PIPELINED_SQUARE, PIPELINED_TALL))


class Rectangle(NamedTuple):
    """Pixels of a tile, and of the source under its taps."""

    height: int
    width: int
    halo_height: int
    halo_width: int

    @property
    def pixels(self) -> int:
        return self.height * self.width

    @property
    def halo(self) -> int:
        return self.halo_height * self.halo_width


def rectangles(problem: Problem, most: int) -> Iterator[Rectangle]:
    """Rectangles of at most ``most`` pixels of fprop or dgrad. Widths are quads of pixels, or the whole image's."""
    r = roles(problem)
    h, w = r.phases_h[0], r.phases_w[0]
    for width in sorted({min(width, w.count) for width in range(4, most + 1, 4)}):
        height = min(h.count, most // width)
        height = ceil_div(h.count, ceil_div(h.count, height))
        rows = (height - 1) * h.read_step + (h.taps - 1) * abs(h.tap_step) + 1
        columns = (width - 1) * w.read_step + (w.taps - 1) * abs(w.tap_step) + 1
        yield Rectangle(height, width, rows, columns)


@lru_cache(maxsize=4096)
def rectangle(problem: Problem, most: int) -> Rectangle:
    """The rectangle of at most ``most`` pixels that is modelled to take the least time of L1 and shared memory."""
    r = roles(problem)

    def cost(one: Rectangle) -> int:
        """A warp reads 32 pixels of a row, and four rows are read at once."""
        tiles = ceil_div(r.phases_h[0].count, one.height) * ceil_div(r.phases_w[0].count, one.width)
        return tiles * (2 * most + round_up(one.halo_height, 4) * round_up(one.halo_width, 32))

    return min(rectangles(problem, most), key=cost)


class HaloCandidate(ScaledCandidate):
    """fprop, or dgrad with stride 1, of float32 tensors."""

    tile: PipelinedTile
    struct = ScaledHaloParams
    prefix = "scaled_fp16_halo"
    """Of the kernels' symbols."""

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = self.tile
        plain = KernelSpec.of(
            self.struct,
            "scaled_fp16/halo",
            tile,
            symbol=f"{self.prefix}_{tile.name}",
            threads=tile.threads,
            min_blocks=tile.min_blocks(0),
            facts={**pipeline_facts(tile), **PHASE_FACTS, "polyconv::kHaloPitch": PITCH},
            generations=GENERATIONS,
        )
        return replace(finishing(plain), dtype="float16")

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        r = roles(problem)
        if r.border is not PaddingMode.ZEROS:
            return f"cannot read a {r.border} border"
        if len(r.phases_h) * len(r.phases_w) != 1:
            return "not for input gradients with strides"
        if self._tiles(problem) * self.tile.m >= DIVIDEND_LIMIT:
            return "too many pixels for one launch"
        return w_of(problem, 1).refusal

    def _tiles(self, problem: Problem) -> int:
        r, one = roles(problem), rectangle(problem, self.tile.m)
        return problem.batch * ceil_div(r.phases_h[0].count, one.height) * ceil_div(r.phases_w[0].count, one.width)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return scaled_error(problem, self.sums(problem, sms, workspace))

    def _converted(self, problem: Problem, images: int) -> Problem:
        """The problem of the GEMM: FP16, with channels of the source padded to steps, and its strides as they are."""
        padded = problem.groups * round_up(roles(problem).channels, DEPTH)
        if problem.kind is Pass.FPROP:
            return replace(problem, dtype="float16", in_channels=padded)
        return replace(problem, dtype="float16", out_channels=padded)

    @staticmethod
    def _of_weights(problem: Problem) -> Problem:
        """The problem whose weights are packed."""
        return problem

    # ---- tasks

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        flat = self._of_weights(problem)
        converted = self._converted(flat, flat.batch)
        r, (tables,) = roles(converted), phase_tables(converted, DEPTH)
        yield w_of(flat, sms).magnitude_task
        yield self._pack_task(converted, r, tables)
        yield self._halo_task(problem)

    def _gather_task(self, problem: Problem, r: Roles, tables: PhaseTables, slab: Slab) -> Task:
        """A launch without work, which :meth:`_halo` replaces."""
        return Task(self.kernel, (1, 1, 1), Work())

    def _halo_task(self, problem: Problem) -> Task:
        r, tile = roles(problem), self.tile
        h, w, one = r.phases_h[0], r.phases_w[0], rectangle(problem, tile.m)
        grid = (int32(self._tiles(problem) * ceil_div(r.outputs, tile.n), "the number of tiles"), problem.groups, 1)
        blocks, parts = grid[0] * grid[1], ceil_div(r.channels, DEPTH)
        written = problem.batch * problem.groups * r.outputs * prod(r.written_size)
        packed = 2 * problem.groups * h.taps * w.taps * parts * DEPTH * round_up(r.outputs, tile.n)
        moved = 4 * (problem.batch * problem.groups * r.channels * prod(r.source_size) + written) + packed
        lines, sectors = (int(2 * blocks * each) for each in self._read(problem, r, one))
        single = 0 if self._written_vector(problem, r, one) else written // 2  # places are found once per pixel
        work = Work(blocks, blocks, blocks * parts * h.taps * w.taps, moved, lines, sectors, single)
        task = Task(self.kernel, grid, work, dynamic_shared=self._shared(one))
        return task_with_epilogue(problem, task, written)

    @staticmethod
    def _read(problem: Problem, r: Roles, one: Rectangle) -> tuple[float, float]:
        """Lines and sectors of a block's halo, read once. Pixels outside of the image are not read."""
        h = r.phases_h[0]
        rows = min(1.0, r.source_size[0] / (ceil_div(h.count, one.height) * one.height * h.read_step)) * one.halo_height
        columns = min(one.halo_width, r.source_size[1])
        if r.source_strides[1] == 1 and dense_channels(r.source_strides, r.channels, problem):
            bytes_read = 4 * r.channels * rows * columns
            return 2 * bytes_read / LINE, bytes_read / SECTOR
        step, segments = 4 * r.source_strides[3], ceil_div(one.halo_width, 32)
        lines, sectors = (
            r.channels * rows * (segments + (columns - segments) * min(1.0, step / unit)) for unit in (LINE, SECTOR)
        )
        return lines, sectors

    def _shared(self, one: Rectangle) -> int:
        """Dynamic shared memory of a block: halo and ring, or the sums."""
        columns = 16 * self.tile.units_n
        sums = 4 * self.tile.threads // 32 * max(20 * columns, 16 * (columns + 8))
        return max(sums, round_up(one.halo * PITCH, 128) + self.tile.stages * 2 * DEPTH * self.tile.n)

    @staticmethod
    def _written_vector(problem: Problem, r: Roles, one: Rectangle) -> int:
        if dense_pixels(r.written_strides, r.written_size, problem) and not (one.width | r.written_size[1]) % 4:
            return 1
        return 2 if dense_channels(r.written_strides, r.outputs, problem) else 0

    # ---- launches

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        flat = self._of_weights(problem)
        converted, w = self._converted(flat, flat.batch), w_of(flat, sms)
        r, (tables,) = roles(converted), phase_tables(converted, DEPTH)
        packed = ("workspace", w.magnitude_bytes)
        found = [w.magnitude(0), self._scaled_pack(flat, converted, r, tables, w, packed)]
        found.append(self._halo(problem, self._halo_task(problem), tables.rows, packed, w.exponent(0)))
        used = packed[1] + self._packed_bytes(converted, tables)
        return Schedule(tuple(found), used, used if problem.kind is Pass.FPROP else 0)

    def _halo(
        self, problem: Problem, task: Task, rows: int, packed: tuple[str, int], exponent: tuple[str, int]
    ) -> Launch:
        """``rows``: of the packed weights of a group."""
        own, one = roles(problem), rectangle(problem, self.tile.m)
        converted = self._converted(problem, problem.batch)
        r, (tables,) = roles(converted), phase_tables(converted, DEPTH)
        fields = {
            "tiles_h": ceil_div(r.phases_h[0].count, one.height),
            "tiles_w": ceil_div(r.phases_w[0].count, one.width),
            "tile_height": one.height,
            "tile_width": one.width,
            "halo_height": one.halo_height,
            "halo_width": one.halo_width,
            "unpadded": own.channels,
            "source_vector": int(dense_channels(own.source_strides, own.channels, problem)),
            "written_vector": self._written_vector(problem, own, one),
        }
        (launch,) = self._gather(converted, r, replace(tables, rows=rows), None, packed)
        pointers = (*launch.pointers, *kernel_params.slots(ScaledHaloParams, packed_exponent=exponent))
        launch = replace(launch, pointers=pointers, grid=task.grid, work=task.work, dynamic_shared=task.dynamic_shared)
        return with_fields(launch, fields)


CANDIDATES = tuple(HaloCandidate(tile, COPIED) for tile in TILES)


def candidates(problem: Problem) -> Iterator[HaloCandidate]:
    """Every tile, refused or not; none for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from CANDIDATES


def all_kernels() -> Iterator[KernelSpec]:
    yield from (candidate.kernel for candidate in CANDIDATES)
