"""Plans for fprop and dgrad as one implicit GEMM (kernels/gather_gemm.cuh)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from ..accuracy import direct_error
from ..algebra.lattice import DenseAxis, Phase, dense_axis, forward_phases, gradient_phases
from ..problem import Extents, PaddingMode, Pass, Problem, Strides
from ..rounding import ceil_div, round_up
from . import layout
from .epilogue import has_epilogue, kernel_with_epilogue, task_with_epilogue, with_epilogue
from .layout import DIVIDEND_LIMIT, MAX_PHASES, AxisPhase, FastDivisor, GatherParams, PackParams, int32
from .plan import KernelSpec, Launch, Schedule, Task, Work
from .tiles import GATHER_TILES, GemmTile
from .traffic import moved_bytes

DEPTH = 8
"""Reduction rows per step (``kDepth`` in gemm_tile.cuh)."""
BORDERS = {PaddingMode.ZEROS: 0, PaddingMode.REFLECT: 1, PaddingMode.REPLICATE: 2, PaddingMode.CIRCULAR: 3}
MOST_GROUPS = 65535
"""Groups are the grid's y dimension."""
MOST_PHASES = 128
MANY_PHASES = f"a stride of more than {MOST_PHASES} phases, each of which would be launches of its own"
"""Why candidates that launch for each phase refuse: planning alone would take seconds."""


@dataclass(frozen=True, slots=True)
class PairKind:
    """Pairs of phases, one of each axis, that differ in nothing but where they begin: so they are the same work."""

    h: DenseAxis
    w: DenseAxis
    times: int


@dataclass(frozen=True)
class Roles:
    """Which tensor plays which part: fprop gathers x and writes y, dgrad gathers y and writes x."""

    source: str
    written: str
    source_size: Extents
    written_size: Extents
    source_strides: Strides
    written_strides: Strides
    channels: int
    """Source channels of a group."""
    outputs: int
    """Written channels of a group."""
    w_output: int
    """Element stride of the weight per written channel."""
    w_channel: int
    """Element stride of the weight per source channel."""
    phases_h: tuple[Phase, ...]
    phases_w: tuple[Phase, ...]
    border: PaddingMode

    @property
    def many_phases(self) -> bool:
        return len(self.phases_h) * len(self.phases_w) > MOST_PHASES

    @cached_property
    def dense_h(self) -> tuple[DenseAxis, ...]:
        """The phases as fast algorithms take them."""
        return tuple(map(dense_axis, self.phases_h))

    @cached_property
    def dense_w(self) -> tuple[DenseAxis, ...]:
        return tuple(map(dense_axis, self.phases_w))

    @property
    def pairs(self) -> Iterator[tuple[DenseAxis, DenseAxis]]:
        """Each is a convolution of its own."""
        return product(self.dense_h, self.dense_w)

    @cached_property
    def kinds(self) -> tuple[PairKind, ...]:
        """The same, those that are alike counted: a stride has many phases, and few kinds of them."""
        kinds_h, kinds_w = _kinds(self.dense_h), _kinds(self.dense_w)
        return tuple(PairKind(h, w, m * n) for (h, m), (w, n) in product(kinds_h, kinds_w))


def _kinds(axes: tuple[DenseAxis, ...]) -> list[tuple[DenseAxis, int]]:
    """One axis of each kind, and how many there are."""
    found: dict[tuple[int, ...], list[DenseAxis]] = {}
    for axis in axes:
        found.setdefault((axis.count, axis.taps, axis.dilation, len(axis.classes)), []).append(axis)
    return [(alike[0], len(alike)) for alike in found.values()]


@lru_cache(maxsize=1024)
def roles(problem: Problem) -> Roles:
    """The problem in the kernel's own words. A border of no width counts as zeros, whatever its mode."""
    channels, outputs = problem.channels_per_group
    top, _, left, _ = problem.padding
    border = problem.padding_mode if any(problem.padding) else PaddingMode.ZEROS
    (r, s), (sh, sw), (dh, dw) = problem.kernel, problem.stride, problem.dilation
    k_stride, c_stride, _, _ = problem.w_strides
    if problem.kind is Pass.FPROP:
        out_h, out_w = problem.out_size
        return Roles(
            "x",
            "y",
            problem.in_size,
            problem.out_size,
            problem.x_strides,
            problem.y_strides,
            channels,
            outputs,
            k_stride,
            c_stride,
            forward_phases(out_h, r, sh, dh, top),
            forward_phases(out_w, s, sw, dw, left),
            border,
        )
    in_h, in_w = problem.in_size
    if border is PaddingMode.ZEROS:
        phases_h, phases_w = gradient_phases(in_h, r, sh, dh, top), gradient_phases(in_w, s, sw, dw, left)
    else:
        # A pixel's images outside fall into other residues of the stride than the pixel: every tap is tried.
        phases_h = (Phase(0, 1, in_h, 0, 1, -dh, r, 0, 1),)
        phases_w = (Phase(0, 1, in_w, 0, 1, -dw, s, 0, 1),)
    return Roles(
        "y",
        "x",
        problem.out_size,
        problem.in_size,
        problem.y_strides,
        problem.x_strides,
        outputs,
        channels,
        c_stride,
        k_stride,
        phases_h,
        phases_w,
        border,
    )


@dataclass(frozen=True, slots=True)
class LoaderKind:
    """One way to gather (a loader of gather_gemm.cuh) and what it costs per element."""

    name: str
    call: str
    """C++ call with ``{tile}`` to fill in."""
    weight: int
    """How many registers it carries: 0 few, 1 more, 2 many."""
    tabulated: bool
    gather_instructions: float
    epilogue_tiles: tuple[str, ...]
    """Tiles that have a twin with an epilogue: those that the planner chooses for forward passes of known networks."""


TAPS = LoaderKind(
    "taps",
    "polyconv::gather_gemm<{tile}, polyconv::TapMajorLoader<{tile}, false>>(params);",
    0,
    False,
    2.5,
    ("128x128", "128x64", "256x32", "64x64", "64x32", "256x16", "256x8"),
)
TAPS_VECTOR = LoaderKind(
    "taps_vector",
    "polyconv::gather_gemm<{tile}, polyconv::TapMajorLoader<{tile}, true>>(params);",
    1,
    False,
    1.0,
    ("128x128", "128x64", "256x32", "64x64"),
)
POINTWISE = LoaderKind(
    "pointwise",
    "polyconv::gather_gemm<{tile}, polyconv::PointwiseLoader<{tile}>>(params);",
    1,
    False,
    0.5,
    ("128x128", "128x64", "256x32", "64x64", "256x8"),
)
ROWS = LoaderKind(
    "rows",
    "polyconv::gather_gemm<{tile}, polyconv::RowLoader<{tile}, polyconv::Gather::kZeros>>(params);",
    1,
    True,
    9.0,
    ("128x128", "128x64", "256x32", "64x64", "256x8"),
)
ROWS_BORDERED = LoaderKind(
    "rows_bordered",
    "polyconv::gather_gemm<{tile}, polyconv::RowLoader<{tile}, polyconv::Gather::kBordered>>(params);",
    1,
    True,
    24.0,
    ("128x64", "64x64", "256x8"),
)
FOLDED = LoaderKind("folded", "polyconv::gather_folded<{tile}>(params);", 2, True, 30.0, ())
LOADERS = (TAPS, TAPS_VECTOR, POINTWISE, ROWS, ROWS_BORDERED, FOLDED)


@lru_cache(maxsize=1024)
def kernel(tile: GemmTile, loader: LoaderKind) -> KernelSpec:
    return KernelSpec(
        stem="gather_gemm",
        symbol=f"gather_{loader.name}_{tile.name}",
        body=loader.call.format(tile=tile.cpp),
        params="polyconv::GatherParams",
        params_bytes=ctypes.sizeof(GatherParams),
        threads=tile.threads,
        min_blocks=tile.min_blocks(loader.weight),
    )


PACK = KernelSpec(
    stem="pack_weights",
    symbol="pack_weights",
    body="polyconv::pack_weights(params);",
    params="polyconv::PackParams",
    params_bytes=ctypes.sizeof(PackParams),
    threads=256,
)


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    yield PACK
    for tile in GATHER_TILES:
        for loader in LOADERS:
            yield kernel(tile, loader)
            if tile.name in loader.epilogue_tiles:
                yield kernel_with_epilogue(kernel(tile, loader))


def refusal(tile: GemmTile, loader: LoaderKind, problem: Problem, r: Roles) -> str | None:
    """Why a loader cannot gather this problem on this tile, or None."""
    if has_epilogue(problem) and tile.name not in loader.epilogue_tiles:
        return "stores its sums as they are, without an activation or a residual"
    zeros = r.border is PaddingMode.ZEROS
    if loader is FOLDED:
        return None if problem.kind is Pass.DGRAD and not zeros else "only for the gradient of a border of image values"
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
    if r.channels % DEPTH:
        return f"{r.channels} source channels per group are not a multiple of {DEPTH}"
    if loader is TAPS_VECTOR and not dense_channels(r.source_strides, r.channels, problem):
        return "channels are not dense quads"
    return None


@dataclass(frozen=True, slots=True)
class _PhaseTables:
    """Phases that go into one launch, and where the weights of each pair begin."""

    h: tuple[Phase, ...]
    w: tuple[Phase, ...]
    first_rows: tuple[int, ...]
    rows: int

    def fill(self, params: GatherParams | PackParams) -> None:
        for i, phase in enumerate(self.h):
            params.phase_h[i] = AxisPhase.of(phase)
        for i, phase in enumerate(self.w):
            params.phase_w[i] = AxisPhase.of(phase)
        for i, row in enumerate(self.first_rows):
            params.first_row[i] = row
        params.phases_w = len(self.w)
        params.packed_rows = int32(self.rows, "the number of weight rows (taps times channels)")
        params.tap_step_h, params.tap_step_w = self.h[0].tap_step, self.w[0].tap_step


@lru_cache(maxsize=1024)
def _tables(problem: Problem) -> tuple[_PhaseTables, ...]:
    r = roles(problem)
    found = []
    for phases_h in _chunks(r.phases_h):
        for phases_w in _chunks(r.phases_w):
            first_rows, total = [], 0
            for h in phases_h:
                for w in phases_w:
                    first_rows.append(total)
                    total += round_up(h.taps * w.taps * r.channels, DEPTH)
            found.append(_PhaseTables(phases_h, phases_w, tuple(first_rows), total))
    return tuple(found)


def _chunks(phases: tuple[Phase, ...]) -> Iterator[tuple[Phase, ...]]:
    for first in range(0, len(phases), MAX_PHASES):
        yield phases[first : first + MAX_PHASES]


@dataclass(frozen=True, slots=True)
class _Slab:
    """What one launch writes: so many images, and lines of each phase of them."""

    first_image: int
    images: int
    first_line: int
    lines: int

    def lines_of(self, phase: Phase) -> int:
        return max(0, min(self.lines, phase.count - self.first_line))


def _slabs(problem: Problem, r: Roles, tables: _PhaseTables, tile: GemmTile) -> Iterator[_Slab]:
    """Flattened pixels must stay below 2^31: first whole images per launch, then rows of one image."""
    most_rows, most_columns = max(h.count for h in tables.h), max(w.count for w in tables.w)
    limit = (DIVIDEND_LIMIT - 1) // ceil_div(r.outputs, tile.n) // tile.m * tile.m
    images = min(problem.batch, max(1, limit // (most_rows * most_columns)))
    lines = most_rows if images > 1 else min(most_rows, limit // most_columns)
    for first_image in range(0, problem.batch, images):
        for first_line in range(0, most_rows, max(lines, 1)):
            yield _Slab(first_image, min(images, problem.batch - first_image), first_line, lines)


def sums(problem: Problem, loader: LoaderKind) -> tuple[int, ...]:
    """How one element of the result is summed: so many products in sequence."""
    r = roles(problem)
    longest = max(h.taps for h in r.phases_h) * max(w.taps for w in r.phases_w) * r.channels
    if loader is FOLDED:
        top, bottom, left, right = (max(side, 0) for side in problem.padding)
        longest *= (1 + max(2, top + bottom)) * (1 + max(2, left + right))
    return (longest + problem.bias,)


def tasks(problem: Problem, tile: GemmTile, loader: LoaderKind) -> Iterator[Task]:
    """What one candidate launches, in counts."""
    r = roles(problem)
    for tables in _tables(problem):
        if tables.rows:
            yield _pack_task(problem, r, tables, tile)
        for slab in _slabs(problem, r, tables, tile):
            yield _gather_task(problem, r, tables, slab, tile, loader)


def launches(problem: Problem, tile: GemmTile, loader: LoaderKind) -> Schedule:
    """The launches of one candidate."""
    r = roles(problem)
    found: list[Launch] = []
    workspace = 0
    for tables in _tables(problem):
        table_at = workspace
        packed_at = round_up(table_at + (16 * tables.rows if loader.tabulated else 0), 256)
        # One step of slack: the kernel's last load goes past the last row, and its values are not used.
        packed = 4 * (problem.groups * tables.rows + DEPTH) * round_up(r.outputs, tile.n)
        workspace = round_up(packed_at + packed, 256)
        if tables.rows:
            found.append(_pack(problem, r, tables, tile, loader, table_at, packed_at))
        found += _gather(problem, r, tables, tile, loader, table_at, packed_at)
    return Schedule(tuple(found), workspace)


def _pack_task(problem: Problem, r: Roles, tables: _PhaseTables, tile: GemmTile) -> Task:
    outputs_padded = round_up(r.outputs, tile.n)
    output_tiles = int32(ceil_div(outputs_padded, 32) * problem.groups, "the number of weight tiles")
    grid = (output_tiles, ceil_div(r.channels, 8), len(tables.first_rows))
    blocks, elements = grid[0] * grid[1] * grid[2], problem.groups * tables.rows * outputs_padded
    taps = sum(h.taps for h in tables.h) * sum(w.taps for w in tables.w)
    return Task(PACK, grid, Work(blocks, blocks, grid[0] * grid[1] * taps, 8 * elements))


def _pack(
    problem: Problem,
    r: Roles,
    tables: _PhaseTables,
    tile: GemmTile,
    loader: LoaderKind,
    table_at: int,
    packed_at: int,
) -> Launch:
    outputs_padded = round_up(r.outputs, tile.n)
    p = PackParams(channels=r.channels, outputs=r.outputs, outputs_padded=outputs_padded)
    tables.fill(p)
    p.w_group = problem.channels_per_group[1] * problem.w_strides[0]
    p.w_output, p.w_channel = r.w_output, r.w_channel
    p.w_row, p.w_column = problem.w_strides[2:]
    p.output_tiles = ceil_div(outputs_padded, 32)
    p.table_channel = r.source_strides[1]
    if loader is ROWS:  # the other row loaders fold the coordinate first and add rows and columns themselves
        p.table_row, p.table_column = pixel_strides(r.source_strides, r.source)
    where = {"packed": ("workspace", packed_at)}
    if loader.tabulated:
        where["table"] = ("workspace", table_at)
    return _pack_task(problem, r, tables, tile).launch(bytes(p), layout.slots(PackParams, w="w", **where))


def _gather_task(
    problem: Problem, r: Roles, tables: _PhaseTables, slab: _Slab, tile: GemmTile, loader: LoaderKind
) -> Task:
    channel_tiles = ceil_div(r.outputs, tile.n)
    most_rows, most_columns = max(h.count for h in tables.h), max(w.count for w in tables.w)
    tiles = ceil_div(slab.images * min(slab.lines, most_rows) * most_columns, tile.m) * channel_tiles
    blocks = steps = 0
    for h in tables.h:
        pixels = slab.images * slab.lines_of(h)
        for w in tables.w:
            here = ceil_div(pixels * w.count, tile.m) * channel_tiles * problem.groups
            blocks, steps = blocks + here, steps + here * ceil_div(h.taps * w.taps * r.channels, DEPTH)
    part = slab.images * min(slab.lines, most_rows) / (problem.batch * most_rows)
    packed = 4 * problem.groups * tables.rows * round_up(r.outputs, tile.n)
    work = Work(blocks, blocks, steps, int(part * moved_bytes(problem)) + packed)
    task = Task(kernel(tile, loader), (tiles, problem.groups, len(tables.first_rows)), work)
    return task_with_epilogue(problem, task, int(part * prod(problem.y_shape)))


def _gather(
    problem: Problem,
    r: Roles,
    tables: _PhaseTables,
    tile: GemmTile,
    loader: LoaderKind,
    table_at: int,
    packed_at: int,
) -> Iterator[Launch]:
    outputs_padded = round_up(r.outputs, tile.n)
    p = GatherParams(channels=r.channels, outputs=r.outputs, outputs_padded=outputs_padded)
    tables.fill(p)
    p.source_batch, p.source_channel = r.source_strides[:2]
    p.source_channel_bytes = 4 * p.source_channel
    p.packed_step_bytes = 4 * DEPTH * outputs_padded
    p.next_tap_bytes = 4 * (p.tap_step_w * r.source_strides[3] - r.channels * p.source_channel)
    p.written_batch, p.written_channel = r.written_strides[:2]
    p.source_row, p.source_column = pixel_strides(r.source_strides, r.source)
    p.written_row, p.written_column = pixel_strides(r.written_strides, r.written)
    p.source_height, p.source_width = r.source_size
    p.channel_tiles = FastDivisor.of(ceil_div(r.outputs, tile.n))
    p.written_vector = _written_vector(problem, r)
    p.border = BORDERS[r.border]
    crop_top, crop_bottom, crop_left, crop_right = (max(-side, 0) for side in problem.padding)
    p.image_top, p.image_left = crop_top, crop_left
    p.image_height = r.written_size[0] - crop_top - crop_bottom
    p.image_width = r.written_size[1] - crop_left - crop_right
    p.pad_top, p.pad_bottom, p.pad_left, p.pad_right = (max(side, 0) for side in problem.padding)
    p.stride_h, p.stride_w = FastDivisor.of(problem.stride[0]), FastDivisor.of(problem.stride[1])
    where: dict[str, str | tuple[str, int]] = {"source": r.source, "packed": ("workspace", packed_at)}
    if loader.tabulated:
        where["table"] = ("workspace", table_at)
    if problem.kind is Pass.FPROP and problem.bias:
        where["bias"] = "bias"
    for slab in _slabs(problem, r, tables, tile):
        p.batch = slab.images
        for i, h in enumerate(tables.h):
            p.phase_h[i] = AxisPhase.of(h.cut(min(slab.first_line, h.count), slab.lines))
            p.phase_h[i].count.divisor = slab.lines_of(h)
        where["source"] = (r.source, 4 * slab.first_image * r.source_strides[0])
        where["written"] = (r.written, 4 * slab.first_image * r.written_strides[0])
        task = _gather_task(problem, r, tables, slab, tile, loader)
        yield with_epilogue(problem, task.launch(bytes(p), layout.slots(GatherParams, **where)))


def _written_vector(problem: Problem, r: Roles) -> int:
    """How the epilogue may store: 1 four pixels, 2 four channels, 0 one element at a time."""
    if len(r.phases_h) * len(r.phases_w) == 1 and dense_pixels(r.written_strides, r.written_size, problem):
        return 1
    return 2 if dense_channels(r.written_strides, r.outputs, problem) else 0


def dense_pixels(strides: Strides, size: Extents, problem: Problem) -> bool:
    batch, channel, row, column = strides
    dense = column == 1 and row == size[1] and size[0] * size[1] % 4 == 0
    return dense and batch % 4 == 0 and channel % 4 == 0 and problem.vector_aligned


def dense_channels(strides: Strides, channels: int, problem: Problem) -> bool:
    batch, channel, row, column = strides
    quads = channels % 4 == 0 and batch % 4 == 0 and row % 4 == 0 and column % 4 == 0
    return channel == 1 and quads and problem.vector_aligned


def pixel_strides(strides: Strides, what: str) -> Extents:
    return int32(strides[2], f"the row stride of {what}"), int32(strides[3], f"the column stride of {what}")


@dataclass(frozen=True)
class GatherCandidate:
    """fprop or dgrad as an implicit GEMM."""

    tile: GemmTile
    loader: LoaderKind
    direct = True

    @property
    def name(self) -> str:
        return kernel(self.tile, self.loader).symbol

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if self.loader is TAPS_VECTOR and DEPTH * self.tile.m // self.tile.threads < 4:
            return "a thread gathers fewer than four channels"
        return refusal(self.tile, self.loader, problem, roles(problem))

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        return tasks(problem, self.tile, self.loader)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return launches(problem, self.tile, self.loader)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return direct_error(problem, sums(problem, self.loader))


CANDIDATES = tuple(GatherCandidate(tile, loader) for loader in LOADERS for tile in GATHER_TILES)


def candidates(problem: Problem) -> Iterator[GatherCandidate]:
    """Every loader with every tile, whether it takes this problem or not; not for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from CANDIDATES
