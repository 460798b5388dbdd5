"""Plans for depthwise convolutions with common kernel sizes: one thread per strip of rows, bound by memory alone.

Forward and input gradient: kernels/depthwise/strip.cuh; input gradient of a strided convolution:
kernels/depthwise/strip_scatter.cuh; weight gradient: kernels/depthwise/strip_wgrad.cuh. The fallback is
cuda/planner/depthwise/halo.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from ....problem import HALF_DTYPES, Extents, PaddingMode, Pair, Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..candidate import CudaCandidate, DirectCandidate
from ..cost import moved_bytes
from ..epilogue import finishing, kernel_with_epilogue, task_with_epilogue, with_epilogue
from ..implicit_gemm.fprop_dgrad import roles
from ..implicit_gemm.wgrad import reduction, reduction_task
from ..kernel_params import DIVIDEND_LIMIT, Params, declared, half_structs
from ..plan import KernelSpec, Schedule, Task, Work
from .halo import MOST_CHANNELS, element

StripParams = declared("depthwise/strip_tile", "StripParams")
StripWgradParams = declared("depthwise/strip_wgrad", "StripWgradParams")
_HALF_PARAMS = half_structs(StripParams)
_HALF_WGRAD_PARAMS = half_structs(StripWgradParams)
DTYPES = ("float32", *HALF_DTYPES)


THREADS = 128
MOST_ROWS = 64
"""Most rows of a strip: enough to make its halo rows, which the strip below reads again, a small share."""
LEAST_ROWS = 4
COLUMNS = "columns"
"""Lanes of a warp are neighbouring columns (``Lanes`` in depthwise/strip_tile.cuh)."""
CHANNELS = "channels"
"""Lanes are channels, which are adjacent in channels_last tensors."""
KERNELS: dict[tuple[str, int], tuple[Pair, ...]] = {
    (COLUMNS, 1): ((3, 3), (5, 5), (7, 7), (3, 1), (1, 3), (5, 1), (1, 5), (3, 7), (7, 3)),
    (COLUMNS, 2): ((3, 3), (5, 5)),
    (CHANNELS, 1): ((3, 3), (5, 5), (7, 7)),
    (CHANNELS, 2): ((3, 3), (5, 5)),
}
"""Compiled kernel sizes, by lanes and stride along both axes."""
HALF_KERNELS = {key: tuple(taps for taps in kernels if taps[0] == taps[1]) for key, kernels in KERNELS.items()}
"""Those compiled for 16-bit tensors: few, because each is compiled for two formats."""


@dataclass(frozen=True)
class _Strips(DirectCandidate):
    """A kernel compiled for one kernel size, with one thread per strip."""

    taps: Pair
    stride: int
    lanes: str
    dtype: str = field(default="float32", kw_only=True)

    @property
    def half(self) -> bool:
        return self.dtype in HALF_DTYPES

    def _instance(
        self,
        struct: type[Params],
        stem: str,
        blocks: tuple[int, int, int],
        *arguments: object,
        facts: dict[str, int] | None = None,
    ) -> KernelSpec:
        """Kernel instance; ``blocks`` are the launch bounds with enough registers for up to 9, 25 and 49 taps."""
        (h, w), (few, some, many) = self.taps, blocks
        variant = f"_stride{self.stride}" * (self.stride > 1) + "_channels_last" * (self.lanes == CHANNELS)
        return KernelSpec.of(
            struct,
            stem,
            *(h, w, self.stride, self._lanes, *arguments, *element(self.dtype)),
            symbol=f"{stem.replace('/', '_')}_{h}x{w}{variant}",
            threads=THREADS,
            min_blocks=few if h * w <= 9 else some if h * w <= 25 else many,
            facts=facts,
        )

    @property
    def _lanes(self) -> str:
        return f"polyconv::Lanes::k{self.lanes.capitalize()}"

    @property
    def halo_steps(self) -> int:
        """Steps of a strip beyond its rows, which open its first outputs or complete its last ones."""
        return ceil_div(self.taps[0], self.stride) - 1

    def refusal(self, problem: Problem) -> str | None:
        taps = self.taps
        if not problem.depthwise:
            return f"{problem.in_channels} input channels in {problem.groups} groups are not depthwise"
        if problem.kernel != taps or problem.stride != (self.stride, self.stride):
            return f"made for a kernel of {taps[0]}x{taps[1]} with stride {self.stride}"
        if any(problem.dilation[axis] > 1 and taps[axis] > 1 for axis in (0, 1)):
            return "the taps are not neighbours"
        if problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding):
            return f"a {problem.padding_mode} border"
        inner = 3 if self.lanes == COLUMNS else 1
        if any(strides[inner] != 1 for strides in (problem.x_strides, problem.y_strides)):
            return f"{self.lanes} are not neighbours in memory"
        return None

    def rows_per_strip(self, rows: int, side_by_side: int, sms: int) -> int:
        """Height of every strip. Tall strips have few halo steps; short ones make more threads, up to three waves."""
        filled = 3 * THREADS * self.kernel.min_blocks * sms

        def cost(most: int) -> float:
            strips = ceil_div(rows, most)
            return (ceil_div(rows, strips) + self.halo_steps) * max(side_by_side * strips, filled)

        most = min(range(MOST_ROWS, LEAST_ROWS - 1, -1), key=cost)
        return ceil_div(rows, ceil_div(rows, most))


@dataclass(frozen=True, slots=True)
class StripCut:
    """Cut of the positions of all planes into strips."""

    rows_per_strip: int
    row_strips: int
    """Strips of a plane, top to bottom."""
    column_strips: int
    """Strips of a plane, side by side."""
    strips: int
    """Strips of all planes."""


@dataclass(frozen=True)
class StripCandidate(_Strips):
    """fprop or dgrad, one thread per strip."""

    scatters: bool
    """dgrad of a strided convolution: each position writes a cell of stride x stride elements."""

    @cached_property
    def kernel(self) -> KernelSpec:
        struct = _HALF_PARAMS.get(self.dtype, StripParams)
        wide = self._columns > 1
        blocks = 8, 6 if self.scatters or wide else 8, 3 if wide else 5
        if self.scatters:
            kernel = self._instance(struct, "depthwise/strip_scatter", blocks)
            return kernel.of_halves(self.dtype) if self.half else kernel
        columns = {f"polyconv::kStripColumns<{', '.join((self._lanes, *element(self.dtype)))}>": self._columns}
        kernel = self._instance(struct, "depthwise/strip", blocks, facts=columns)
        return finishing(kernel, self.fewer_blocks).of_halves(self.dtype) if self.half else kernel

    @property
    def fewer_blocks(self) -> int:
        """Blocks given up for an epilogue: prefetched residuals of several columns need their registers."""
        return int(self._columns > 1 and 9 < self.taps[0] * self.taps[1] <= 25)

    def refusal(self, problem: Problem) -> str | None:
        reason = super().refusal(problem)
        if reason is not None:
            return reason
        if self.scatters != (problem.kind is Pass.DGRAD and self.stride > 1):
            return "only the gradient of a strided convolution is scattered"
        if problem.kind is Pass.DGRAD and problem.channels_per_group[1] > 1:
            return "the gradient of a channel sums over several outputs"
        rows, columns = self._positions(problem)
        planes = problem.batch * problem.groups * roles(problem).outputs
        if planes * columns * ceil_div(rows, LEAST_ROWS) >= DIVIDEND_LIMIT:
            return "too many strips to number"
        return None

    @property
    def _columns(self) -> int:
        """Adjacent positions per thread (``kStripColumns`` in depthwise/strip.cuh)."""
        if self.scatters:
            return 1
        return 4 if self.lanes == CHANNELS else 2 if self.half else 1

    def _positions(self, problem: Problem) -> Extents:
        """Rows and columns of positions: written elements or, if scattered, cells."""
        if not self.scatters:
            return roles(problem).written_size
        (height, width), (top, _, left, _) = problem.in_size, problem.padding
        first_h, first_w = top // self.stride, left // self.stride
        return (height - 1 + top) // self.stride - first_h + 1, (width - 1 + left) // self.stride - first_w + 1

    def cut(self, problem: Problem, sms: int) -> StripCut:
        rows, columns = self._positions(problem)
        column_strips = ceil_div(columns, self._columns)
        side_by_side = column_strips * problem.batch * problem.groups * roles(problem).outputs
        rows_each = self.rows_per_strip(rows, side_by_side, sms)
        row_strips = ceil_div(rows, rows_each)
        return StripCut(rows_each, row_strips, column_strips, side_by_side * row_strips)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        cut = self.cut(problem, sms)
        blocks = ceil_div(cut.strips, THREADS)
        steps = blocks * (cut.rows_per_strip + self.halo_steps)
        task = Task(self.kernel, (blocks, 1, 1), Work(blocks, blocks, steps, moved_bytes(problem)))
        yield task_with_epilogue(problem, task, prod(problem.y_shape), self.fewer_blocks)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        r = roles(problem)
        rows, columns = self._positions(problem)
        cut = self.cut(problem, sms)
        p = StripParams(rows=rows, columns=columns, rows_per_strip=cut.rows_per_strip, strips=cut.strips)
        p.place("source", r.source_strides, r.source)
        p.place("written", r.written_strides, r.written)
        p.source_height, p.source_width = r.source_size
        p.written_height, p.written_width = r.written_size
        p.w_channel, p.w_row, p.w_column = problem.w_strides[0], problem.w_strides[2], problem.w_strides[3]
        top, _, left, _ = problem.padding
        if self.scatters:
            p.first_row, p.first_column = top // self.stride, left // self.stride
            p.cell_row, p.cell_column = p.first_row * self.stride - top, p.first_column * self.stride - left
        elif problem.kind is Pass.DGRAD:
            # Taps are flipped: the last one meets the first output.
            last_h, last_w = self.taps[0] - 1, self.taps[1] - 1
            p.first_row, p.first_column = top - last_h, left - last_w
            p.w_first = last_h * p.w_row + last_w * p.w_column
            p.w_row, p.w_column = -p.w_row, -p.w_column
        else:
            p.first_row, p.first_column = -top, -left
        p.column_strips, p.row_strips = cut.column_strips, cut.row_strips
        p.channels, p.multiplier = problem.groups * r.outputs, r.outputs
        slots = kernel_params.slots(StripParams, source=r.source, w="w", written=r.written, bias=r.bias)
        (task,) = self.tasks(problem, sms, workspace)
        return Schedule((with_epilogue(problem, task.launch(bytes(p), slots)),), 0)

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        return (self.taps[0] * self.taps[1] + problem.bias,)


@dataclass(frozen=True, slots=True)
class StripWgradCut:
    """Cut of the weight gradient into strips, rounds of a block over strips, and slices of rounds."""

    rows_per_strip: int
    row_strips: int
    strips: int
    at_once: int
    """Strips of one round of a block."""
    channel_blocks: int
    rounds: int
    rounds_per_slice: int
    slices: int
    columns_padded: int


@dataclass(frozen=True)
class StripWgradCandidate(_Strips):
    """wgrad: all taps at once, one thread per column of a strip."""

    @cached_property
    def kernel(self) -> KernelSpec:
        fewer = self.half and self.lanes == CHANNELS
        blocks = 8, 4 if self.stride == 1 else 3 - fewer, 3 - fewer
        struct = _HALF_WGRAD_PARAMS.get(self.dtype, StripWgradParams)
        kernel = self._instance(struct, "depthwise/strip_wgrad", blocks, THREADS)
        return kernel.of_halves(self.dtype) if self.half else kernel

    def refusal(self, problem: Problem) -> str | None:
        reason = super().refusal(problem)
        if reason is None and problem.out_channels > MOST_CHANNELS:
            reason = f"more than {MOST_CHANNELS} channels"
        if reason is None and problem.batch * problem.out_size[1] * problem.out_size[0] >= DIVIDEND_LIMIT:
            reason = "too many strips to number"
        return reason

    def cut(self, problem: Problem, sms: int, workspace: int) -> StripWgradCut:
        """Choose slices for about 32 blocks per multiprocessor, and partial sums that fit the workspace."""
        (rows, columns), channels = problem.out_size, problem.out_channels
        columns_padded = round_up(self.taps[0] * self.taps[1] + problem.bias, 4)
        rows_each = self.rows_per_strip(rows, columns * problem.batch * channels, sms)
        row_strips = ceil_div(rows, rows_each)
        strips = problem.batch * row_strips * columns
        at_once, channels_at_once = (THREADS, 1) if self.lanes == COLUMNS else (THREADS // 32, 32)
        channel_blocks, rounds = ceil_div(channels, channels_at_once), ceil_div(strips, at_once)
        most = max(1, min(workspace // (4 * channels * columns_padded), ceil_div(32 * sms, channel_blocks)))
        rounds_each = ceil_div(rounds, most)
        slices = ceil_div(strips, at_once * rounds_each)
        return StripWgradCut(
            rows_each, row_strips, strips, at_once, channel_blocks, rounds, rounds_each, slices, columns_padded
        )

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        cut = self.cut(problem, sms, workspace)
        yield self._task(problem, cut)
        yield reduction_task(problem, cut.slices, cut.columns_padded)

    def _task(self, problem: Problem, cut: StripWgradCut) -> Task:
        walked = cut.rounds * cut.channel_blocks
        work = Work(
            cut.slices * cut.channel_blocks,
            walked,
            walked * (cut.rows_per_strip + self.halo_steps),
            moved_bytes(problem) + 4 * cut.slices * problem.out_channels * cut.columns_padded,
        )
        return Task(self.kernel, (cut.slices, cut.channel_blocks, 1), work)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        cut = self.cut(problem, sms, workspace)
        (rows, columns), channels = problem.out_size, problem.out_channels
        p = StripWgradParams(height=problem.in_size[0], width=problem.in_size[1], channels=channels)
        p.rows, p.rows_per_strip = rows, cut.rows_per_strip
        p.columns_padded, p.bias = cut.columns_padded, problem.bias
        p.place("x", problem.x_strides, "x")
        p.place("dy", problem.y_strides, "the gradient of y")
        p.pad_top, p.pad_left = problem.padding[0], problem.padding[2]
        p.column_strips, p.row_strips = columns, cut.row_strips
        p.multiplier = problem.channels_per_group[1]
        p.strips, p.strips_per_slice = cut.strips, cut.at_once * cut.rounds_per_slice
        slots = kernel_params.slots(StripWgradParams, x="x", dy="y", partial="workspace")
        first = self._task(problem, cut).launch(bytes(p), slots)
        second = reduction(problem, cut.slices, self.taps[0] * self.taps[1], cut.columns_padded)
        return Schedule((first, second), 4 * cut.slices * channels * cut.columns_padded)

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        """In a thread, across a warp (if lanes are columns), across warps, over slices."""
        cut = self.cut(problem, sms, workspace)
        in_warp = (2, 2, 2, 2, 2) if self.lanes == COLUMNS else ()
        return (cut.rows_per_strip * cut.rounds_per_slice, *in_warp, THREADS // 32, cut.slices)


def _all(kind: Pass, dtype: str) -> Iterator[StripCandidate | StripWgradCandidate]:
    for (lanes, stride), kernels in (HALF_KERNELS if dtype in HALF_DTYPES else KERNELS).items():
        for taps in kernels:
            if kind is Pass.WGRAD:
                yield StripWgradCandidate(taps, stride, lanes, dtype=dtype)
            else:
                scatters = kind is Pass.DGRAD and stride > 1
                yield StripCandidate(taps, stride, lanes, scatters, dtype=dtype)


CANDIDATES = {(kind, dtype): tuple(_all(kind, dtype)) for dtype in DTYPES for kind in Pass}


def all_kernels() -> Iterator[KernelSpec]:
    yield from dict.fromkeys(candidate.kernel for every in CANDIDATES.values() for candidate in every)
    for candidate in CANDIDATES[Pass.FPROP, "float32"]:
        if isinstance(candidate, StripCandidate):
            yield kernel_with_epilogue(candidate.kernel, candidate.fewer_blocks)


def candidates(problem: Problem) -> Iterator[CudaCandidate]:
    """Candidates compiled for the problem's kernel size; none if it is not depthwise."""
    if problem.depthwise:
        yield from (one for one in CANDIDATES[problem.kind, problem.dtype] if one.taps == problem.kernel)
