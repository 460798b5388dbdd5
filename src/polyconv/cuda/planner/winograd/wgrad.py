"""Plans for the Winograd weight gradient (kernels/winograd/wgrad.cuh, winograd/wgrad_output.cuh).

The operands may be large, the result is small. So no operand is transformed in memory: each product of the algorithm
along H has its own blocks, which combine rows as they read them (mostly from L2, since all products of a row run at
about the same time). The workspace holds only partial sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from ....algebra.polyphase import DenseAxis, dense_axis
from ....algebra.segments import Scheme2d
from ....numerics.aliasing import repetition_of
from ....numerics.error_model import FLOAT32, Arithmetic, predicted_error
from ....problem import PaddingMode, Pass, Problem
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..cost import moved_bytes, waves
from ..implicit_gemm.fprop_dgrad import roles, scattered_columns
from ..kernel_params import Params, declared, int32
from ..plan import KernelSpec, Launch, Schedule, Task, Work
from .axis import ToomAxis

MAX_CLASSES = 8
"""Tap classes per axis of a Winograd weight gradient (``kMaxClasses`` in winograd/wgrad.cuh)."""


WinogradWgradParams = declared("winograd/wgrad", "WinogradWgradParams", kMaxClasses=MAX_CLASSES)
WinogradWgradSumParams = declared("winograd/wgrad_output", "WinogradWgradSumParams")
WinogradWgradOutputParams = declared("winograd/wgrad_output", "WinogradWgradOutputParams", kMaxTapClasses=MAX_CLASSES)


TILE_CHUNK = 8
"""Tiles multiplied between two barriers (``kChunk`` in winograd/wgrad.cuh)."""
STATE_BYTES = 392
"""``sizeof(WinogradWgradState)``, which lies in shared memory behind a block's buffers."""
INTERLEAVES = (3, 2, 1)
"""Phases along W that can share a chunk, best first (``kMaxInterleave``)."""
SLICES_PER_GROUP = 8
"""``kSlicesPerGroup`` in winograd/wgrad_output.cuh."""
FLUSH = 192
"""Tiles summed in an accumulator before it is added to the block's partial sums. More would increase the rounding
error, fewer the memory traffic."""
MOST_WAVES = 8
"""Most full waves of blocks that slices make."""
FACTS = {
    "polyconv::kChunk": TILE_CHUNK,
    "polyconv::kMaxInterleave": max(INTERLEAVES),
    "polyconv::kMaxClasses": MAX_CLASSES,
    "sizeof(polyconv::WinogradWgradState)": STATE_BYTES,
}
OUTPUT_FACTS = {"polyconv::kSlicesPerGroup": SLICES_PER_GROUP, "polyconv::kMaxTapClasses": MAX_CLASSES}

DIRECT = ToomAxis(1, (1,))
THREE = ToomAxis(4, (3,))
FIVE = ToomAxis(4, (5,))
NINE = ToomAxis(4, (4, 5))
THIRTEEN = ToomAxis(4, (4, 4, 5))
ALONG_H = (DIRECT, THREE, FIVE, NINE, THIRTEEN)
"""Algorithms along H; a problem takes the first one with enough taps."""
ALONG_W = (THREE, FIVE, NINE, THIRTEEN)


@dataclass(frozen=True)
class WgradTile:
    """``polyconv::WgradTile``: ``k`` output by ``c`` source channels per block."""

    k: int
    c: int
    warps_k: int
    warps_c: int
    warps_pass: int
    split: int
    lanes_k: int

    @property
    def name(self) -> str:
        return f"{self.k}x{self.c}"

    @property
    def cpp(self) -> str:
        sizes = (self.k, self.c, self.warps_k, self.warps_c, self.warps_pass, self.split, self.lanes_k)
        return f"polyconv::WgradTile<{', '.join(map(str, sizes))}>"

    @property
    def warps_per_point(self) -> int:
        return self.warps_k * self.warps_c * self.warps_pass * self.split

    @property
    def accumulators(self) -> int:
        """Accumulators per thread and segment."""
        return self.k * self.c // (32 * self.warps_k * self.warps_c)


SQUARE = WgradTile(64, 64, 1, 2, 1, 1, 8)
HALVES = WgradTile(64, 32, 1, 1, 1, 2, 8)
TALL = WgradTile(128, 16, 1, 1, 1, 2, 16)
POINTS = WgradTile(64, 32, 1, 1, 1, 1, 8)
SEGMENTS = WgradTile(64, 32, 1, 1, 2, 1, 8)
SMALL = WgradTile(32, 32, 1, 1, 1, 1, 4)


def tiles(h: ToomAxis, w: ToomAxis, classed: bool) -> tuple[WgradTile, ...]:
    """Tiles instantiated for a pair of algorithms, with or without tap classes (strides)."""
    if classed and (h.taps > 5 or w.taps > 5):
        return ()
    if w == THREE:
        return (HALVES, TALL) if classed else (SQUARE, HALVES, TALL) if h in (THREE, FIVE) else (HALVES,)
    return (POINTS,) if w == FIVE else (SEGMENTS,) if w == NINE else (SMALL,)


def shared_bytes(w: ToomAxis, tile: WgradTile) -> int:
    """Shared memory: two buffers of transformed and of staged operands, and the state of the block."""
    warps = w.points * tile.warps_per_point
    beyond = ceil_div(w.span, 4) - 1  # blocks of four positions, per phase, that a tile reads after its own
    quads = (TILE_CHUNK + beyond * INTERLEAVES[0]) | 1
    operands = w.points * TILE_CHUNK * (tile.k + w.passes * tile.c)
    staged = 4 * TILE_CHUNK * round_up(tile.k, warps) + 4 * quads * round_up(tile.c, warps)
    return 8 * (operands + staged) + STATE_BYTES


@lru_cache(maxsize=1024)
def kernel(h: ToomAxis, w: ToomAxis, tile: WgradTile, classed: bool) -> KernelSpec:
    threads, sizes = 32 * w.points * tile.warps_per_point, f"polyconv::WinogradWgradSizes<{h.cpp}, {w.cpp}, {tile.cpp}>"
    return KernelSpec.of(
        WinogradWgradParams,
        "winograd/wgrad",
        *(h, w, tile, classed),
        symbol=f"winograd_wgrad_{h.struct}_{w.struct}_{tile.name}" + "_strided" * classed,
        threads=threads,
        efficiency=0.5,  # simulated
        facts={
            **FACTS,
            f"{sizes}::kThreads": threads,
            f"4 * 2 * ({sizes}::kOperands + {sizes}::kStaged)": shared_bytes(w, tile) - STATE_BYTES,
        },
    )


SUM = KernelSpec.of(
    WinogradWgradSumParams,
    "winograd/wgrad_output",
    function="winograd_wgrad_sum",
    symbol="winograd_wgrad_sum",
    threads=256,
    facts=OUTPUT_FACTS,
)


@lru_cache(maxsize=1024)
def finish_kernel(h: ToomAxis, w: ToomAxis) -> KernelSpec:
    symbol = f"winograd_wgrad_output_{h.struct}_{w.struct}"
    return KernelSpec.of(
        WinogradWgradOutputParams, "winograd/wgrad_output", h, w, symbol=symbol, threads=128, facts=OUTPUT_FACTS
    )


def all_kernels() -> Iterator[KernelSpec]:
    yield SUM
    for h in ALONG_H:
        for w in ALONG_W:
            yield finish_kernel(h, w)
            for classed in (False, True):
                for tile in tiles(h, w, classed):
                    yield kernel(h, w, tile, classed)


@lru_cache(maxsize=4096)
def lattices(problem: Problem) -> tuple[DenseAxis, DenseAxis]:
    """Both axes of the forward convolution, in dense form."""
    r = roles(problem.for_pass(Pass.FPROP))
    return dense_axis(r.phases_h[0]), dense_axis(r.phases_w[0])


def axis_for(taps: int, among: tuple[ToomAxis, ...]) -> ToomAxis | None:
    """First algorithm with enough taps, or None. Surplus taps are computed and dropped."""
    return next((axis for axis in among if axis.taps >= taps), None)


@dataclass(frozen=True)
class Cut:
    """Cut of a problem into rows of tiles, slices and partial sums."""

    rows: int
    tiles: int
    tiles_h: int
    interleave: int
    outer_phases: int
    k_tiles: int
    c_tiles: int
    products: int
    slices: int
    flush: int

    @property
    def chunks(self) -> int:
        """Chunks of one row."""
        return ceil_div(self.tiles, TILE_CHUNK)

    @property
    def chunks_per_slice(self) -> int:
        return ceil_div(self.rows, self.slices) * self.chunks

    @property
    def blocks(self) -> int:
        """Blocks per slice and group."""
        return self.k_tiles * self.c_tiles * self.products


@dataclass(frozen=True)
class WinogradWgradCandidate:
    """F(m, r) along both axes of the weight gradient, with one channel tile."""

    h: ToomAxis
    w: ToomAxis
    tile: WgradTile
    direct = False
    along_h: ClassVar[tuple[ToomAxis, ...]] = ALONG_H
    along_w: ClassVar[tuple[ToomAxis, ...]] = ALONG_W
    params: ClassVar[type[Params]] = WinogradWgradParams
    arithmetic: ClassVar[Arithmetic] = FLOAT32
    """Arithmetic of the products and of the first of their :meth:`sums`."""

    @property
    def name(self) -> str:
        return f"winograd_wgrad_{self.h.struct}_{self.w.struct}_{self.tile.name}"

    def refusal(self, problem: Problem) -> str | None:
        if problem.kind is not Pass.WGRAD:
            return "only for the weight gradient"
        if problem.depthwise:
            return "depthwise: every output channel has one source channel"
        if problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding):
            return f"cannot read a {problem.padding_mode} border"
        h, w = lattices(problem)
        if max(len(h.classes), len(w.classes)) > MAX_CLASSES:
            return f"a stride of more than {MAX_CLASSES} classes of taps"
        if axis_for(h.taps, self.along_h) != self.h or axis_for(w.taps, self.along_w) != self.w:
            return f"another algorithm fits {h.taps} x {w.taps} taps"
        if self.tile not in self.offered(len(h.classes) * len(w.classes) > 1):
            return "no such tile"
        if self.multiplications >= problem.kernel[0] * problem.kernel[1]:
            return f"{problem.kernel[0]} x {problem.kernel[1]} taps: saves no multiplications"
        return None

    def offered(self, classed: bool) -> tuple[WgradTile, ...]:
        """Tiles instantiated for these algorithms."""
        return tiles(self.h, self.w, classed)

    @property
    def multiplications(self) -> float:
        """Multiplications per output and pair of channels."""
        h = len(self.h.segments) * self.h.points / self.h.m
        return h * self.w.passes * self.w.points / self.w.m

    def channels(self, problem: Problem) -> int:
        """Channels of a group times tap classes."""
        h, w = lattices(problem)
        return problem.channels_per_group[0] * len(h.classes) * len(w.classes)

    def spec(self, problem: Problem) -> KernelSpec:
        h, w = lattices(problem)
        return kernel(self.h, self.w, self.tile, len(h.classes) * len(w.classes) > 1)

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.w, self.tile)

    @property
    def partial_elements(self) -> int:
        """Partial sums of one channel tile."""
        return len(self.h.segments) * self.h.points * self.w.passes * self.w.points * self.tile.k * self.tile.c

    def work(self, problem: Problem, sms: int, workspace: int) -> Cut:
        """Choose slices: enough to fill whole waves and to keep sums short, few enough for the workspace."""
        h, w = lattices(problem)
        k = problem.channels_per_group[1]
        interleave = next(e for e in INTERLEAVES if w.dilation % e == 0)
        outer = w.dilation // interleave
        tiles_h = round_up(h.count, h.dilation * self.h.m) // (h.dilation * self.h.m)
        tiles = round_up(w.count, w.dilation * 4) // (w.dilation * 4) * interleave
        rows = problem.batch * h.dilation * tiles_h * outer
        k_tiles, c_tiles = ceil_div(k, self.tile.k), ceil_div(self.channels(problem), self.tile.c)
        products = len(self.h.segments) * self.h.points
        per_slice = k_tiles * c_tiles * products * problem.groups
        bytes_per_slice = 4 * self.tile.split * k_tiles * c_tiles * problem.groups * self.partial_elements
        most = max(1, min(rows, workspace // (bytes_per_slice + 4 * problem.out_channels)))
        best = min(
            (max(1, min(most, count * sms // per_slice)) for count in range(1, MOST_WAVES + 1)),
            key=lambda slices: (round(waves(per_slice * slices, sms) * ceil_div(rows, slices), 6), -slices),
        )
        flush = max(1, FLUSH * self.tile.split // TILE_CHUNK)
        return Cut(rows, tiles, tiles_h, interleave, outer, k_tiles, c_tiles, products, best, flush)

    def elements(self, problem: Problem, work: Cut) -> int:
        """Partial sums of one slice."""
        return problem.groups * work.k_tiles * work.c_tiles * self.partial_elements

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        return self._tasks(problem, self.work(problem, sms, workspace))

    def _tasks(self, problem: Problem, work: Cut) -> Iterator[Task]:
        """Partial sums of all slices; their reduction, if there are several; the transform to taps."""
        slices, elements = work.slices * self.tile.split, self.elements(problem, work)
        blocks = int32(work.blocks * problem.groups * work.slices, "the number of blocks")
        walked = blocks // work.slices * work.rows
        steps = walked * work.chunks
        lines = self.tile.k * self.h.m + self.tile.c * self.h.points  # rows that a chunk reads
        scattered = steps * lines * (min(32, work.outer_phases) - 1) + self._in_columns(problem, work, steps)
        done = Work(blocks, walked, steps, moved_bytes(problem) + 4 * elements * slices, scattered)
        yield Task(self.spec(problem), (blocks, 1, 1), done, dynamic_shared=self.shared_bytes)
        if slices > 1:
            blocks = ceil_div(elements, 4 * SUM.threads)
            yield Task(SUM, (blocks, 1, 1), Work(blocks, blocks, blocks * slices, 4 * elements * (slices + 1)))
        finish = finish_kernel(self.h, self.w)
        pairs = int32(problem.out_channels * self.channels(problem), "the number of pairs of channels")
        blocks = ceil_div(pairs, finish.threads)
        taps = problem.kernel[0] * problem.kernel[1]
        moved = 4 * pairs * (taps + self.partial_elements // (self.tile.k * self.tile.c))
        yield Task(finish, (blocks, 1, 1), Work(blocks, blocks, blocks, moved))

    def _in_columns(self, problem: Problem, work: Cut, steps: int) -> int:
        """Extra lines of the rows that chunks read, where columns are not adjacent. The outermost points of H need one
        row of dy, and every second row of x."""
        points, m = self.h.points, self.h.m
        of_dy, of_x = (m, points) if points <= 2 else ((2 + (points - 2) * m) / points, 1 + (points - 2) ** 2 / points)
        positions = lattices(problem)[1].count / work.outer_phases
        filled = steps * positions / (4 * TILE_CHUNK * work.chunks)
        dy, _ = scattered_columns(problem.y_strides, int(filled * self.tile.k * of_dy), work.outer_phases)
        x, _ = scattered_columns(problem.x_strides, int(filled * self.tile.c * of_x), work.outer_phases)
        return dy + x

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        work = self.work(problem, sms, workspace)
        h, w = lattices(problem)
        channels, k = self.channels(problem), problem.channels_per_group[1]
        groups, classes = problem.groups, len(h.classes) * len(w.classes)
        int32(work.rows * work.chunks, "the number of tiles")
        p = self.params(channels=channels, outputs=k, count_h=h.count, count_w=w.count)
        p.x_batch, p.x_channel, _, _ = problem.x_strides
        p.place("dy", problem.y_strides, "the gradient of y")
        x_row, x_column = kernel_params.pixel_strides(problem.x_strides, "x")
        p.x_row = int32(x_row * h.read_step, "the row stride of x")
        p.x_column = int32(x_column * w.read_step, "the column stride of x")
        p.x_next_row, p.dy_next_row = 4 * p.x_row * h.dilation, 4 * p.dy_row * h.dilation
        warps = self.spec(problem).threads // 32
        p.x_next_channel, p.dy_next_channel = 4 * warps * p.x_channel, 4 * warps * p.dy_channel
        for i, tap_class in enumerate(h.classes):
            p.read_first_h[i] = int32(tap_class.read_first, "the first row that a tap reads")
            p.x_first_h[i] = tap_class.read_first * x_row
        for i, tap_class in enumerate(w.classes):
            p.read_first_w[i] = int32(tap_class.read_first, "the first column that a tap reads")
            p.x_first_w[i] = tap_class.read_first * x_column
        p.read_step_h, p.read_step_w = h.read_step, w.read_step
        p.height, p.width = min(problem.in_size[0], _reach(h)), min(problem.in_size[1], _reach(w))
        p.dilation_h, p.dilation_w, p.interleave = h.dilation, w.dilation, work.interleave
        p.rows, p.tiles, p.slices, p.flush = work.rows, work.tiles, work.slices, work.flush
        p.channel_tiles, p.k_tiles = work.k_tiles * work.c_tiles, work.k_tiles
        p.groups, p.outer_phases = groups, work.outer_phases
        p.tiles_h, p.phases_h = work.tiles_h, h.dilation
        p.interleaved = work.interleave
        p.classes, p.classes_w = classes, len(w.classes)

        bias_at = 4 * self.elements(problem, work) * work.slices * self.tile.split
        bias_partial = ("workspace", bias_at) if problem.bias else None
        slots = kernel_params.slots(WinogradWgradParams, x="x", dy="y", partial="workspace", bias_partial=bias_partial)
        first, *between, last = self._tasks(problem, work)
        found = [first.launch(bytes(p), slots)]
        for task in between:
            s = WinogradWgradSumParams(elements=self.elements(problem, work), slices=work.slices * self.tile.split)
            found.append(task.launch(bytes(s), kernel_params.slots(WinogradWgradSumParams, partial="workspace")))
        found.append(self._finish(problem, work, last, bias_partial))
        return Schedule(tuple(found), bias_at + 4 * work.slices * problem.out_channels * problem.bias)

    def sums(self, work: Cut) -> tuple[int, ...]:
        """Tiles in sequence, such sums per slice, slices per group; the groups are added last."""
        return work.flush * TILE_CHUNK // self.tile.split, ceil_div(work.chunks_per_slice, work.flush), SLICES_PER_GROUP

    def _finish(self, problem: Problem, work: Cut, task: Task, bias_partial: tuple[str, int] | None) -> Launch:
        h, w = lattices(problem)
        channels, k = self.channels(problem), problem.channels_per_group[1]
        p = WinogradWgradOutputParams(slices=work.slices, outputs=k, all_outputs=problem.out_channels)
        p.pairs = problem.out_channels * channels
        p.dw_k, p.dw_channel, _, _ = problem.w_strides
        p.dw_row, p.dw_column = kernel_params.pixel_strides(problem.w_strides, "the weight")
        p.channels, p.outputs_divisor = channels, k
        p.tile_k, p.tile_c = self.tile.k, self.tile.c
        p.k_tiles, p.channel_tiles = work.k_tiles, work.k_tiles * work.c_tiles
        p.classes, p.classes_w = len(h.classes) * len(w.classes), len(w.classes)
        for i, tap_class in enumerate(h.classes):
            p.taps_h[i], p.tap_first_h[i], p.tap_stride_h = tap_class.taps, tap_class.tap_first, tap_class.tap_stride
        for i, tap_class in enumerate(w.classes):
            p.taps_w[i], p.tap_first_w[i], p.tap_stride_w = tap_class.taps, tap_class.tap_first, tap_class.tap_stride
        db = "db" if problem.bias else None
        slots = kernel_params.slots(
            WinogradWgradOutputParams, partial="workspace", dw="dw", bias_partial=bias_partial, db=db
        )
        return task.launch(bytes(p), slots)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        """Largest expected error, relative to the scale of dw."""
        work = self.work(problem, sms, workspace)
        out_h, out_w = problem.out_size
        scheme = Scheme2d(self.h.scheme(), self.w.scheme())
        reduction = max(1, problem.batch * out_h * out_w)
        outputs = problem.out_channels * self.channels(problem) * self.h.taps * self.w.taps
        return predicted_error(
            scheme,
            reduction,
            form="weight gradient",
            blocks=self.sums(work),
            outputs=float(outputs),
            repetition=repetition_of(problem),
            arithmetic=self.arithmetic,
        )


def _reach(axis: DenseAxis) -> int:
    """One past the last source position that any output reads."""
    last = axis.count - 1
    return max(c.read_first + axis.read_step * (last + axis.dilation * (c.taps - 1)) for c in axis.classes) + 1


def candidates(problem: Problem) -> Iterator[WinogradWgradCandidate]:
    """Every tile of the algorithms that fit the problem's taps."""
    if problem.kind is not Pass.WGRAD:
        return
    h, w = lattices(problem)
    along_h, along_w = axis_for(h.taps, ALONG_H), axis_for(w.taps, ALONG_W)
    if along_h is None or along_w is None:
        return
    for tile in tiles(along_h, along_w, len(h.classes) * len(w.classes) > 1):
        yield WinogradWgradCandidate(along_h, along_w, tile)
