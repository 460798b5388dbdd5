"""Plans for fprop and dgrad as one implicit GEMM (kernels/implicit_gemm/fprop_dgrad.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import ClassVar

from ....algebra.polyphase import DenseAxis, Phase, dense_axis, forward_phases, gradient_phases
from ....problem import Extents, PaddingMode, Pass, Problem, Strides
from ....util.cached import cached_property
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..candidate import DirectCandidate
from ..cost import LINE, SECTOR, moved_bytes, scattered
from ..epilogue import has_epilogue, kernel_with_epilogue, task_with_epilogue, with_epilogue
from ..kernel_params import (
    DIVIDEND_LIMIT,
    MAX_PHASES,
    PHASE_FACTS,
    Params,
    axis_phase,
    declared,
    int32,
)
from ..plan import KernelSpec, Launch, Schedule, Task, Work
from .tiles import NARROW, SLIM, SLIMMER, SMALL, SQUARE, TALL, TINY, BlockTile, GemmTile

ImplicitGemmParams = declared("implicit_gemm/loaders", "ImplicitGemmParams", kMaxPhases=MAX_PHASES)
PackParams = declared("implicit_gemm/pack_weights", "PackParams", kMaxPhases=MAX_PHASES)


BORDERS = {PaddingMode.ZEROS: 0, PaddingMode.REFLECT: 1, PaddingMode.REPLICATE: 2, PaddingMode.CIRCULAR: 3}
BORDER_FACTS = {f"int(polyconv::Border::k{mode.value.title()})": number for mode, number in BORDERS.items()}
MOST_GROUPS = 65535
"""Limit of grid.y, which counts groups."""
MOST_PHASES = 128
MANY_PHASES = f"a stride of more than {MOST_PHASES} phases, each of which would be launches of its own"
"""Refusal of candidates that launch per phase: planning alone would take seconds."""


@dataclass(frozen=True, slots=True)
class PairKind:
    """Pairs of phases, one of each axis, that differ only in where they begin and so need equal work."""

    h: DenseAxis
    w: DenseAxis
    times: int


@dataclass(frozen=True)
class Roles:
    """Tensor roles: fprop reads x and writes y, dgrad reads y and writes x."""

    source: str
    source_size: Extents
    source_strides: Strides
    channels: int
    """Source channels per group."""
    w_channel: int
    """Weight stride per source channel [elements]."""
    written: str
    written_size: Extents
    written_strides: Strides
    outputs: int
    """Written channels per group."""
    w_output: int
    """Weight stride per written channel [elements]."""
    phases_h: tuple[Phase, ...]
    phases_w: tuple[Phase, ...]
    border: PaddingMode
    bias: str | None
    """Bias buffer, or None."""

    @property
    def many_phases(self) -> bool:
        return len(self.phases_h) * len(self.phases_w) > MOST_PHASES

    @cached_property
    def dense_h(self) -> tuple[DenseAxis, ...]:
        """Phases in the dense form that Winograd algorithms take."""
        return tuple(map(dense_axis, self.phases_h))

    @cached_property
    def dense_w(self) -> tuple[DenseAxis, ...]:
        return tuple(map(dense_axis, self.phases_w))

    @property
    def pairs(self) -> Iterator[tuple[DenseAxis, DenseAxis]]:
        """Pairs of phases; each is a convolution of its own."""
        return product(self.dense_h, self.dense_w)

    @cached_property
    def kinds(self) -> tuple[PairKind, ...]:
        """:attr:`pairs` grouped by equal work: a stride has many phases, but few kinds of them."""
        kinds_h, kinds_w = _kinds(self.dense_h), _kinds(self.dense_w)
        return tuple(PairKind(h, w, m * n) for (h, m), (w, n) in product(kinds_h, kinds_w))


def _kinds(axes: tuple[DenseAxis, ...]) -> list[tuple[DenseAxis, int]]:
    """One axis of each kind, and their number."""
    found: dict[tuple[int, ...], list[DenseAxis]] = {}
    for axis in axes:
        found.setdefault((axis.count, axis.taps, axis.dilation, len(axis.classes)), []).append(axis)
    return [(alike[0], len(alike)) for alike in found.values()]


@lru_cache(maxsize=1024)
def roles(problem: Problem) -> Roles:
    """The problem in the kernels' terms. A border of no width counts as zeros, whatever its mode."""
    channels, outputs = problem.channels_per_group
    top, _, left, _ = problem.padding
    border = problem.padding_mode if any(problem.padding) else PaddingMode.ZEROS
    (r, s), (sh, sw), (dh, dw) = problem.kernel, problem.stride, problem.dilation
    k_stride, c_stride, _, _ = problem.w_strides
    x = "x", problem.in_size, problem.x_strides, channels, c_stride
    y = "y", problem.out_size, problem.y_strides, outputs, k_stride
    if problem.kind is Pass.FPROP:
        (out_h, out_w), bias = problem.out_size, "bias" if problem.bias else None
        phases_h, phases_w = forward_phases(out_h, r, sh, dh, top), forward_phases(out_w, s, sw, dw, left)
        return Roles(*x, *y, phases_h, phases_w, border, bias)
    in_h, in_w = problem.in_size
    if border is PaddingMode.ZEROS:
        phases_h, phases_w = gradient_phases(in_h, r, sh, dh, top), gradient_phases(in_w, s, sw, dw, left)
    else:
        # Border copies of a pixel fall into other residues of the stride than the pixel: every tap is tried.
        phases_h = (Phase(0, 1, in_h, 0, 1, -dh, r, 0, 1),)
        phases_w = (Phase(0, 1, in_w, 0, 1, -dw, s, 0, 1),)
    return Roles(*y, *x, phases_h, phases_w, border, None)


@dataclass(frozen=True, slots=True)
class LoaderKind:
    """Source loader of the implicit GEMM (implicit_gemm/loaders.cuh)."""

    name: str
    types: tuple[str, ...]
    """Template arguments after the tile; ``{tile}`` is substituted."""
    weight: int
    """Register weight: 0 few, 1 more, 2 many."""
    tabulated: bool
    epilogue_tiles: tuple[str, ...]
    """Tiles with an epilogue twin: those that the planner chooses for forward passes of known networks."""
    function: str = "implicit_gemm"


_MOST = ("128x128", "128x64", "256x32", "64x64")
TAPS = LoaderKind("taps", ("TapMajorLoader<{tile}, false>",), 0, False, (*_MOST, "64x32", "256x16", "256x8"))
TAPS_VECTOR = LoaderKind("taps_vector", ("TapMajorLoader<{tile}, true>",), 1, False, _MOST)
POINTWISE = LoaderKind("pointwise", ("PointwiseLoader<{tile}>",), 1, False, (*_MOST, "256x8"))
ROWS = LoaderKind("rows", ("RowLoader<{tile}, polyconv::Gather::kZeros>",), 1, True, (*_MOST, "256x8"))
ROWS_BORDERED = LoaderKind(
    "rows_bordered", ("RowLoader<{tile}, polyconv::Gather::kBordered>",), 1, True, ("128x64", "64x64", "256x8")
)
FOLDED = LoaderKind("folded", (), 2, True, (), "implicit_gemm_folded")
GATHERS_PIXELS = (TAPS, TAPS_VECTOR, ROWS, ROWS_BORDERED, FOLDED)
"""Loaders whose warps read from each of 32 neighbouring pixels."""
LOADERS = (TAPS, TAPS_VECTOR, POINTWISE, ROWS, ROWS_BORDERED, FOLDED)

PACK_FACTS = {"polyconv::kDepth": GemmTile.depth, **PHASE_FACTS}
PACK = KernelSpec.of(PackParams, "implicit_gemm/pack_weights", GemmTile.depth, threads=256, facts=PACK_FACTS)


@dataclass(frozen=True, slots=True)
class PhaseTables:
    """Phases of one launch, and the first row of packed weights of each pair."""

    h: tuple[Phase, ...]
    w: tuple[Phase, ...]
    first_rows: tuple[int, ...]
    rows: int

    def fill(self, params: Params) -> None:
        kernel_params.set_phases(params, self.h, self.w)
        for i, row in enumerate(self.first_rows):
            params.first_row[i] = row
        params.packed_rows = int32(self.rows, "the number of weight rows (taps times channels)")


@lru_cache(maxsize=1024)
def phase_tables(problem: Problem, depth: int) -> tuple[PhaseTables, ...]:
    r = roles(problem)
    found = []
    for phases_h in _chunks(r.phases_h):
        for phases_w in _chunks(r.phases_w):
            first_rows, total = [], 0
            for h in phases_h:
                for w in phases_w:
                    first_rows.append(total)
                    total += round_up(h.taps * w.taps * r.channels, depth)
            found.append(PhaseTables(phases_h, phases_w, tuple(first_rows), total))
    return tuple(found)


def _chunks(phases: tuple[Phase, ...]) -> Iterator[tuple[Phase, ...]]:
    for first in range(0, len(phases), MAX_PHASES):
        yield phases[first : first + MAX_PHASES]


@dataclass(frozen=True, slots=True)
class Slab:
    """Images that one launch writes, and lines of each of their phases."""

    first_image: int
    images: int
    first_line: int
    lines: int

    def lines_of(self, phase: Phase) -> int:
        return max(0, min(self.lines, phase.count - self.first_line))


def _written_vector(problem: Problem, r: Roles) -> int:
    """Elements per store: 1 means four pixels, 2 four channels, 0 one element."""
    if len(r.phases_h) * len(r.phases_w) == 1 and dense_pixels(r.written_strides, r.written_size, problem):
        return 1
    return 2 if dense_channels(r.written_strides, r.outputs, problem) else 0


@lru_cache(maxsize=4096)
def _taps_inside(phase: Phase, size: int) -> float:
    """Taps that read inside an image of ``size``, on average over the positions of a phase."""
    step, inside = phase.read_step, 0
    for tap in range(phase.taps):
        first = phase.read_first + tap * phase.tap_step
        before, within = max(0, ceil_div(-first, step)), max(0, ceil_div(size - first, step))
        inside += max(0, min(phase.count, within) - before)
    return inside / max(1, phase.count)


def scattered_pixels(pixels: int, each: int, width: int, step: int, row: int) -> float:
    """Extra lines of a load of ``each`` bytes from each of some flattened pixels: neighbours are ``step`` bytes apart
    within a row of ``width`` pixels, rows ``row`` bytes."""
    turns = 1 / max(width, 1)
    within, between = scattered(each, step, lanes=pixels), scattered(each, row - (width - 1) * step, lanes=pixels)
    return (1 - turns) * within + turns * between


def scattered_columns(strides: Strides, accesses: int, step: int = 1, each: int = 4) -> tuple[int, int]:
    """Extra lines and sectors of warps that access every ``step``-th column of a row, one element to a lane, where
    columns are not adjacent in memory. The profiles are those of adjacent columns."""
    near = each * step
    far = near * abs(strides[3])
    lines, sectors = (scattered(near, far, unit) for unit in (LINE, SECTOR))
    return int(accesses * lines), int(accesses * sectors)


def dense_pixels(strides: Strides, size: Extents, problem: Problem) -> bool:
    batch, channel, row, column = strides
    dense = column == 1 and row == size[1] and size[0] * size[1] % 4 == 0
    return dense and batch % 4 == 0 and channel % 4 == 0 and problem.vector_aligned


def dense_channels(strides: Strides, channels: int, problem: Problem) -> bool:
    batch, channel, row, column = strides
    quads = channels % 4 == 0 and batch % 4 == 0 and row % 4 == 0 and column % 4 == 0
    return channel == 1 and quads and problem.vector_aligned


@dataclass(frozen=True)
class ImplicitGemmCandidate(DirectCandidate):
    """fprop or dgrad as an implicit GEMM."""

    tile: BlockTile
    loader: LoaderKind
    stores_chunks: ClassVar[bool] = False
    """Whether several channels are stored at a time in any case."""

    @property
    def pack(self) -> KernelSpec:
        """Kernel that packs the weight into GEMM rows."""
        return PACK

    @cached_property
    def kernel(self) -> KernelSpec:
        tile, loader = self.tile, self.loader
        return KernelSpec.of(
            ImplicitGemmParams,
            "implicit_gemm/fprop_dgrad",
            tile,
            *(f"polyconv::{name.format(tile=tile.cpp)}" for name in loader.types),
            function=loader.function,
            symbol=f"implicit_gemm_{loader.name}_{tile.name}",
            threads=tile.threads,
            min_blocks=tile.min_blocks(loader.weight),
            facts={**tile.facts, **PHASE_FACTS, **BORDER_FACTS},
            efficiency=0.94,  # simulated
        )

    def refusal(self, problem: Problem) -> str | None:
        r, loader = roles(problem), self.loader
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if loader is TAPS_VECTOR and self.tile.depth * self.tile.m // self.tile.threads < 4:
            return "a thread gathers fewer than four channels"
        if has_epilogue(problem) and not self._can_finish():
            return "stores its sums as they are, without an activation or a residual"
        zeros = r.border is PaddingMode.ZEROS
        if loader is FOLDED:
            folds = problem.kind is Pass.DGRAD and not zeros
            return None if folds else "only for the gradient of a border of image values"
        if loader is ROWS_BORDERED:
            return None if problem.kind is Pass.FPROP and not zeros else "only for a border of image values"
        if not zeros:
            return f"cannot read a {r.border} border"
        if loader is ROWS:
            return None
        if loader is POINTWISE:
            if problem.kernel != (1, 1) or problem.stride != (1, 1) or any(problem.padding):
                return "only for 1x1 kernels with stride 1 and no padding"
            return None if dense_pixels(r.source_strides, r.source_size, problem) else "pixels are not dense quads"
        if r.channels % self.tile.depth:
            return f"{r.channels} source channels per group are not a multiple of {self.tile.depth}"
        if loader is TAPS_VECTOR and not dense_channels(r.source_strides, r.channels, problem):
            return "channels are not dense quads"
        return None

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        r = roles(problem)
        longest = max(h.taps for h in r.phases_h) * max(w.taps for w in r.phases_w) * r.channels
        if self.loader is FOLDED:
            top, bottom, left, right = (max(side, 0) for side in problem.padding)
            longest *= (1 + max(2, top + bottom)) * (1 + max(2, left + right))
        return (longest + problem.bias,)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        r = roles(problem)
        for tables in phase_tables(problem, self.tile.depth):
            if tables.rows:
                yield self._pack_task(problem, r, tables)
            for slab in self._slabs(problem, r, tables):
                yield self._gather_task(problem, r, tables, slab)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """For each set of phases that fits one launch: pack the weights, then one GEMM per slab."""
        r = roles(problem)
        found: list[Launch] = []
        used = 0
        for tables in phase_tables(problem, self.tile.depth):
            table = ("workspace", used) if self.loader.tabulated else None
            packed = ("workspace", round_up(used + (16 * tables.rows if self.loader.tabulated else 0), 256))
            # One step of slack: the kernel's last load reads past the last row, and its values are not used.
            rows = problem.groups * tables.rows + self.tile.depth
            packed_bytes = problem.element_bytes * rows * self._outputs_padded(r)
            used = round_up(packed[1] + packed_bytes, 256)
            if tables.rows:
                found.append(self._pack(problem, r, tables, table, packed))
            found += self._gather(problem, r, tables, table, packed)
        return Schedule(tuple(found), used, used if problem.kind is Pass.FPROP else 0)  # fprop has one phase

    def _outputs_padded(self, r: Roles) -> int:
        return round_up(r.outputs, self.tile.n)

    def _slabs(self, problem: Problem, r: Roles, tables: PhaseTables) -> Iterator[Slab]:
        """Slabs of fewer than 2^31 flattened pixels: whole images, or rows of one image."""
        most_rows, most_columns = max(h.count for h in tables.h), max(w.count for w in tables.w)
        limit = (DIVIDEND_LIMIT - 1) // ceil_div(r.outputs, self.tile.n) // self.tile.m * self.tile.m
        images = min(problem.batch, max(1, limit // (most_rows * most_columns)))
        lines = most_rows if images > 1 else min(most_rows, limit // most_columns)
        for first_image in range(0, problem.batch, images):
            for first_line in range(0, most_rows, max(lines, 1)):
                yield Slab(first_image, min(images, problem.batch - first_image), first_line, lines)

    def _pack_task(self, problem: Problem, r: Roles, tables: PhaseTables) -> Task:
        outputs_padded = self._outputs_padded(r)
        output_tiles = int32(ceil_div(outputs_padded, 32) * problem.groups, "the number of weight tiles")
        grid = (output_tiles, ceil_div(r.channels, 8), len(tables.first_rows))
        blocks, elements = grid[0] * grid[1] * grid[2], problem.groups * tables.rows * outputs_padded
        taps = sum(h.taps for h in tables.h) * sum(w.taps for w in tables.w)
        each = problem.element_bytes
        lines = elements * r.outputs / outputs_padded / 32 * scattered(each, each * r.w_output)
        work = Work(blocks, blocks, grid[0] * grid[1] * taps, 2 * each * elements, int(lines))
        return Task(self.pack, grid, work)

    def _pack(
        self, problem: Problem, r: Roles, tables: PhaseTables, table: tuple[str, int] | None, packed: tuple[str, int]
    ) -> Launch:
        outputs_padded = self._outputs_padded(r)
        p = PackParams(channels=r.channels, outputs=r.outputs, outputs_padded=outputs_padded)
        tables.fill(p)
        p.w_group = problem.channels_per_group[1] * problem.w_strides[0]
        p.w_output, p.w_channel = r.w_output, r.w_channel
        p.w_row, p.w_column = problem.w_strides[2:]
        p.output_tiles = ceil_div(outputs_padded, 32)
        p.table_channel = r.source_strides[1]
        if self.loader is ROWS:  # other row loaders fold the coordinate first and add rows and columns themselves
            p.table_row, p.table_column = kernel_params.pixel_strides(r.source_strides, r.source)
        slots = kernel_params.slots(PackParams, w="w", packed=packed, table=table)
        return self._pack_task(problem, r, tables).launch(bytes(p), slots)

    def _gather_task(self, problem: Problem, r: Roles, tables: PhaseTables, slab: Slab) -> Task:
        tile = self.tile
        channel_tiles = ceil_div(r.outputs, tile.n)
        most_rows, most_columns = max(h.count for h in tables.h), max(w.count for w in tables.w)
        tiles = ceil_div(slab.images * min(slab.lines, most_rows) * most_columns, tile.m) * channel_tiles
        blocks = steps = 0
        rows = 0.0  # loaded: of the reduction, by pixels
        for h in tables.h:
            pixels = slab.images * slab.lines_of(h)
            for w in tables.w:
                here = ceil_div(pixels * w.count, tile.m) * channel_tiles * problem.groups
                blocks, steps = blocks + here, steps + here * ceil_div(h.taps * w.taps * r.channels, tile.depth)
                inside = _taps_inside(h, r.source_size[0]) * _taps_inside(w, r.source_size[1])
                rows += pixels * w.count * channel_tiles * problem.groups * r.channels * inside
        part = slab.images * min(slab.lines, most_rows) / (problem.batch * most_rows)
        packed = problem.element_bytes * problem.groups * tables.rows * self._outputs_padded(r)
        moved = int(part * moved_bytes(problem)) + packed
        singly = not self.stores_chunks and _written_vector(problem, r) == 0
        stored = int(part * problem.batch * problem.groups * r.outputs * prod(r.written_size)) if singly else 0
        lines, sectors = self._stored_apart(problem, r, tables, stored)
        lines += self._scattered(problem, r, tables, rows)
        work = Work(blocks, blocks, steps, moved, lines, sectors, stored)
        task = Task(self.kernel, (tiles, problem.groups, len(tables.first_rows)), work)
        return task_with_epilogue(problem, task, int(part * prod(problem.y_shape)))

    def _scattered(self, problem: Problem, r: Roles, tables: PhaseTables, rows: float) -> int:
        """Extra lines of loads of ``rows`` elements: a warp reads one, or four channels, of each of 32 pixels."""
        if self.loader not in GATHERS_PIXELS:
            return 0
        h, w, each = tables.h[0], tables.w[0], problem.element_bytes
        step, row = each * w.read_step * r.source_strides[3], each * h.read_step * r.source_strides[2]
        channels = 4 if self.loader is TAPS_VECTOR else 1
        return int(rows / (32 * channels) * scattered_pixels(32, channels * each, w.count, step, row))

    def _stored_apart(self, problem: Problem, r: Roles, tables: PhaseTables, stored: int) -> tuple[int, int]:
        """Extra lines and sectors of elements that are stored singly where pixels of a phase are not adjacent."""
        lanes, apart = self.tile.stored_lanes
        near = apart * problem.element_bytes
        far = near * tables.w[0].written_step * r.written_strides[3]
        lines, sectors = (scattered(near, far, unit, lanes) for unit in (LINE, SECTOR))
        return int(stored / lanes * lines), int(stored / lanes * sectors)

    def _can_finish(self) -> bool:
        """Whether an instance with an epilogue exists."""
        return self.tile.name in self.loader.epilogue_tiles

    def _gather(
        self, problem: Problem, r: Roles, tables: PhaseTables, table: tuple[str, int] | None, packed: tuple[str, int]
    ) -> Iterator[Launch]:
        each, outputs_padded = problem.element_bytes, self._outputs_padded(r)
        p = ImplicitGemmParams(channels=r.channels, outputs=r.outputs, outputs_padded=outputs_padded)
        tables.fill(p)
        p.place("source", r.source_strides, r.source)
        p.place("written", r.written_strides, r.written)
        p.source_height, p.source_width = r.source_size
        p.source_channel_bytes = each * p.source_channel
        p.packed_step_bytes = each * self.tile.depth * outputs_padded
        p.next_tap_bytes = each * (p.tap_step_w * r.source_strides[3] - r.channels * p.source_channel)
        p.channel_tiles = ceil_div(r.outputs, self.tile.n)
        p.written_vector = _written_vector(problem, r)
        p.border = BORDERS[r.border]
        crop_top, crop_bottom, crop_left, crop_right = (max(-side, 0) for side in problem.padding)
        p.image_top, p.image_left = crop_top, crop_left
        p.image_height = r.written_size[0] - crop_top - crop_bottom
        p.image_width = r.written_size[1] - crop_left - crop_right
        p.pad_top, p.pad_bottom, p.pad_left, p.pad_right = (max(side, 0) for side in problem.padding)
        p.stride_h, p.stride_w = problem.stride[0], problem.stride[1]
        for slab in self._slabs(problem, r, tables):
            p.batch = slab.images
            for i, h in enumerate(tables.h):
                p.phase_h[i] = axis_phase(h.cut(min(slab.first_line, h.count), slab.lines))
                p.phase_h[i].count.divisor = slab.lines_of(h)
            slots = kernel_params.slots(
                ImplicitGemmParams,
                source=(r.source, each * slab.first_image * r.source_strides[0]),
                packed=packed,
                table=table,
                bias=r.bias,
                written=(r.written, each * slab.first_image * r.written_strides[0]),
            )
            yield with_epilogue(problem, self._gather_task(problem, r, tables, slab).launch(bytes(p), slots))


FPROP_DGRAD_TILES = (SQUARE, TALL, NARROW, SMALL, TINY, SLIM, SLIMMER)
"""By falling width in channels: 128x128, 128x64, 256x32, 64x64, 64x32, 256x16, 256x8."""
CANDIDATES = tuple(ImplicitGemmCandidate(tile, loader) for loader in LOADERS for tile in FPROP_DGRAD_TILES)


def candidates(problem: Problem) -> Iterator[ImplicitGemmCandidate]:
    """Every loader with every tile, refused or not; none for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from CANDIDATES


def all_kernels() -> Iterator[KernelSpec]:
    yield PACK
    for candidate in CANDIDATES:
        yield candidate.kernel
        if candidate.tile.name in candidate.loader.epilogue_tiles:
            yield kernel_with_epilogue(candidate.kernel)
