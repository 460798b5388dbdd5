"""Plans for depthwise convolutions of 16-bit tensors along rows, such as causal signals (kernels/depthwise/line.cuh).

A strip of rows has a single row there, so that its threads would spend more on finding their place than on the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ....problem import HALF_DTYPES, PaddingMode, Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..candidate import CudaCandidate, DirectCandidate
from ..cost import moved_bytes
from ..epilogue import finishing, task_with_epilogue, with_epilogue
from ..implicit_gemm.fprop_dgrad import roles
from ..implicit_gemm.wgrad import reduction, reduction_task
from ..kernel_params import DIVIDEND_LIMIT, Params, declared, half_structs
from ..plan import KernelSpec, Schedule, Task, Work
from .halo import MOST_CHANNELS, element

LineCut = declared("depthwise/line", "LineCut")
LineParams = declared("depthwise/line", "LineParams")
LineWgradParams = declared("depthwise/line", "LineWgradParams")
_PARAMS = half_structs(LineParams)
_WGRAD_PARAMS = half_structs(LineWgradParams)

DTYPES = HALF_DTYPES
THREADS = 128
WARPS = THREADS // 32
STEP = 64
"""Columns of a warp's step (``kLineStep``)."""
MOST_STEPS = 16
"""Most steps of a piece: enough to make finding its place and loading its taps a small share."""
TAPS = (2, 3, 4, 5, 7)
"""Compiled kernel widths."""
FACTS = {"polyconv::kLineStep": STEP}


@dataclass(frozen=True)
class _Lines(DirectCandidate):
    """A kernel compiled for one width, with one warp per piece of a row."""

    taps: int
    dtype: str

    def _instance(self, struct: type[Params], function: str, *arguments: object) -> KernelSpec:
        return KernelSpec.of(
            struct,
            "depthwise/line",
            *(self.taps, *arguments, *element(self.dtype)),
            function=function,
            symbol=f"{function}_{self.taps}",
            threads=THREADS,
            min_blocks=8,
            facts=FACTS,
        )

    def refusal(self, problem: Problem) -> str | None:
        if not problem.depthwise:
            return f"{problem.in_channels} input channels in {problem.groups} groups are not depthwise"
        if problem.kernel != (1, self.taps) or problem.stride != (1, 1) or problem.dilation[1] != 1:
            return f"made for a kernel of one row and {self.taps} neighbouring columns with stride 1"
        if any(problem.padding[:2]):
            return "rows are padded"
        if problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding):
            return f"a {problem.padding_mode} border"
        if problem.kind is Pass.DGRAD and problem.channels_per_group[1] > 1:
            return "the gradient of a channel sums over several outputs"
        if any(strides[3] != 1 for strides in (problem.x_strides, problem.y_strides)):
            return "columns are not neighbours in memory"
        if problem.kind is Pass.WGRAD and problem.out_channels > MOST_CHANNELS:
            return f"more than {MOST_CHANNELS} channels"
        # Every piece has at least one step; columns are counted in 32 bits.
        columns = max(problem.in_size[1], problem.out_size[1])
        lines = problem.batch * problem.out_channels * problem.out_size[0]
        if lines * ceil_div(columns, STEP) >= DIVIDEND_LIMIT or columns >= DIVIDEND_LIMIT // 2:
            return "too many pieces to number"
        return None

    @staticmethod
    def steps_of(columns: int, lines: int, sms: int) -> int:
        """Steps of a piece: as many as leave 64 warps per multiprocessor, and no short last piece."""
        whole = ceil_div(columns, STEP)
        pieces = max(ceil_div(whole, MOST_STEPS), min(whole, ceil_div(64 * sms, lines)))
        return ceil_div(whole, pieces)


def _cut(columns: int, rows: int, steps: int) -> Params:
    return LineCut(
        columns, steps, kernel_params.FastDivisor.of(_pieces(columns, steps)), kernel_params.FastDivisor.of(rows)
    )


def _pieces(columns: int, steps: int) -> int:
    return ceil_div(columns, STEP * steps)


@dataclass(frozen=True)
class LineCandidate(_Lines):
    """fprop or dgrad."""

    @cached_property
    def kernel(self) -> KernelSpec:
        return finishing(self._instance(_PARAMS[self.dtype], "depthwise_line")).of_halves(self.dtype)

    def _steps(self, problem: Problem, sms: int) -> tuple[int, int]:
        """Steps of a piece, and pieces of all rows."""
        rows, columns = roles(problem).written_size
        lines = problem.batch * problem.out_channels * rows
        steps = self.steps_of(columns, lines, sms)
        return steps, lines * _pieces(columns, steps)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        steps, numbers = self._steps(problem, sms)
        blocks = ceil_div(numbers, WARPS)
        task = Task(self.kernel, (blocks, 1, 1), Work(blocks, blocks, blocks * steps, moved_bytes(problem)))
        yield task_with_epilogue(problem, task, prod(problem.y_shape))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        r = roles(problem)
        rows, columns = r.written_size
        steps, numbers = self._steps(problem, sms)
        p = LineParams(numbers=numbers, cut=_cut(columns, rows, steps), source_width=r.source_size[1])
        p.place("source", r.source_strides, r.source)
        p.place("written", r.written_strides, r.written)
        p.w_channel, p.w_column = problem.w_strides[0], problem.w_strides[3]
        p.first_column = -problem.padding[2]
        if problem.kind is Pass.DGRAD:  # taps are flipped: the last one meets the first output
            last = self.taps - 1
            p.first_column = problem.padding[2] - last
            p.w_first, p.w_column = last * p.w_column, -p.w_column
        p.channels, p.multiplier = problem.out_channels, r.outputs
        slots = kernel_params.slots(LineParams, source=r.source, w="w", written=r.written, bias=r.bias)
        (task,) = self.tasks(problem, sms, workspace)
        return Schedule((with_epilogue(problem, task.launch(bytes(p), slots)),), 0)

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        return (self.taps + problem.bias,)


@dataclass(frozen=True, slots=True)
class LineWgradCut:
    """Cut of a channel's rows into pieces, and of these into slices."""

    steps: int
    numbers: int
    per_slice: int
    slices: int
    columns_padded: int


@dataclass(frozen=True)
class LineWgradCandidate(_Lines):
    """wgrad: all taps at once."""

    @cached_property
    def kernel(self) -> KernelSpec:
        return self._instance(_WGRAD_PARAMS[self.dtype], "depthwise_line_wgrad", THREADS).of_halves(self.dtype)

    def cut(self, problem: Problem, sms: int, workspace: int) -> LineWgradCut:
        """Choose slices for about 32 blocks per multiprocessor, and partial sums that fit the workspace."""
        (rows, columns), channels = problem.out_size, problem.out_channels
        columns_padded = round_up(self.taps + problem.bias, 4)
        lines = problem.batch * rows
        steps = self.steps_of(columns, lines * channels, sms)
        numbers = lines * _pieces(columns, steps)
        most = max(1, min(workspace // (4 * channels * columns_padded), ceil_div(32 * sms, channels)))
        per_slice = round_up(ceil_div(numbers, most), WARPS)
        return LineWgradCut(steps, numbers, per_slice, ceil_div(numbers, per_slice), columns_padded)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        cut = self.cut(problem, sms, workspace)
        yield self._task(problem, cut)
        yield reduction_task(problem, cut.slices, cut.columns_padded)

    def _task(self, problem: Problem, cut: LineWgradCut) -> Task:
        channels = problem.out_channels
        rounds = ceil_div(cut.numbers, WARPS) * channels
        moved = moved_bytes(problem) + 4 * cut.slices * channels * cut.columns_padded
        work = Work(cut.slices * channels, rounds, rounds * cut.steps, moved)
        return Task(self.kernel, (cut.slices, channels, 1), work)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        cut = self.cut(problem, sms, workspace)
        (rows, columns), channels = problem.out_size, problem.out_channels
        p = LineWgradParams(width=problem.in_size[1], pad_left=problem.padding[2], channels=channels)
        p.columns_padded, p.bias = cut.columns_padded, problem.bias
        p.place("x", problem.x_strides, "x")
        p.place("dy", problem.y_strides, "the gradient of y")
        p.numbers, p.numbers_per_slice = cut.numbers, cut.per_slice
        p.cut, p.multiplier = _cut(columns, rows, cut.steps), problem.channels_per_group[1]
        slots = kernel_params.slots(LineWgradParams, x="x", dy="y", partial="workspace")
        first = self._task(problem, cut).launch(bytes(p), slots)
        second = reduction(problem, cut.slices, self.taps, cut.columns_padded)
        return Schedule((first, second), 4 * cut.slices * channels * cut.columns_padded)

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        """In a thread, across a warp, across warps, over slices."""
        cut = self.cut(problem, sms, workspace)
        return (2 * cut.steps * ceil_div(cut.per_slice, WARPS), 2, 2, 2, 2, 2, WARPS, cut.slices)


FORWARD = {dtype: tuple(LineCandidate(taps, dtype) for taps in TAPS) for dtype in DTYPES}
GRADIENTS = {dtype: tuple(LineWgradCandidate(taps, dtype) for taps in TAPS) for dtype in DTYPES}


def candidates(problem: Problem) -> Iterator[CudaCandidate]:
    """The candidate compiled for the kernel's width; none if the problem is not depthwise or has more rows of taps."""
    if problem.depthwise and problem.kernel[0] == 1:
        every = (GRADIENTS if problem.kind is Pass.WGRAD else FORWARD)[problem.dtype]
        yield from (one for one in every if one.taps == problem.kernel[1])


def all_kernels() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        yield from (candidate.kernel for candidate in (*FORWARD[dtype], *GRADIENTS[dtype]))
