"""Plans for depthwise convolutions of 16-bit tensors with large kernels on tensor cores, from sm_80 on: float
multiplications alone would take up to three times the memory's time there (kernels/depthwise/band.cuh, band_wgrad.cuh).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from ....numerics.prediction import half_error
from ....problem import HALF_DTYPES, Extents, PaddingMode, Pair, Pass, Problem, Strides
from ....util.cached import cached_property
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..candidate import CudaCandidate, DirectCandidate
from ..cost import moved_bytes
from ..epilogue import finishing, task_with_epilogue, with_epilogue
from ..implicit_gemm.fprop_dgrad import roles
from ..implicit_gemm.fprop_dgrad_nhwc import CHUNK, GENERATIONS, why_not_in_chunks
from ..implicit_gemm.wgrad import reduction, reduction_task
from ..kernel_params import Params, declared, half_structs, int32
from ..plan import KernelSpec, Schedule, Task, Work
from .halo import MOST_CHANNELS, element

BandParams = declared("depthwise/band", "BandParams")
BandWgradParams = declared("depthwise/band_wgrad", "BandWgradParams")
BandWgradNhwcParams = declared("depthwise/band_wgrad_nhwc", "BandWgradNhwcParams")
_PARAMS = half_structs(BandParams)
_WGRAD_PARAMS = half_structs(BandWgradParams)
_WGRAD_NHWC_PARAMS = half_structs(BandWgradNhwcParams)

DTYPES = HALF_DTYPES
CHANNELS = 16
"""Channels of a block where they are adjacent (``kBandChannels``)."""
TILES = {
    **{(taps, taps): ((7, 1), (3, 1), (7, CHANNELS), (3, CHANNELS)) for taps in (5, 7)},
    (3, 3): ((7, CHANNELS), (3, CHANNELS)),
}
"""By compiled kernel size: products side by side, and channels of a block."""
STEP = 8
"""Rows of dy between two barriers of the weight gradient with adjacent channels."""


@dataclass(frozen=True)
class _Bands(DirectCandidate):
    """A kernel compiled for one kernel size, with stride 1."""

    taps: Pair
    tiles_n: int
    """Products of eight columns side by side in a tile."""
    channels: int
    """Channels of a block: 1, or several adjacent ones."""
    dtype: str

    def refusal(self, problem: Problem) -> str | None:
        if not problem.depthwise:
            return f"{problem.in_channels} input channels in {problem.groups} groups are not depthwise"
        if problem.kernel != self.taps or problem.stride != (1, 1) or problem.dilation != (1, 1):
            return f"made for a kernel of {self.taps[0]}x{self.taps[1]} with stride 1"
        if problem.tolerance == 0:
            return "an infinity makes NaN of the outputs beside its own, which tolerance=0 rules out"
        if problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding):
            return f"a {problem.padding_mode} border"
        several = problem.channels_per_group[1] > 1
        if several and (problem.kind is Pass.DGRAD or self.channels > 1):
            return "several outputs per channel"
        if problem.out_channels > MOST_CHANNELS:
            return f"more than {MOST_CHANNELS} channels"
        return self._why_not_in_memory(problem)

    def _why_not_in_memory(self, problem: Problem) -> str | None:
        """Why x and y cannot be read and written as they lie in memory, or None."""
        if self.channels > 1:
            if problem.in_channels % CHUNK:
                return f"channels are not multiples of {CHUNK}"
            return why_not_in_chunks(problem, grouped=False)
        if any(strides[3] != 1 for strides in (problem.x_strides, problem.y_strides)):
            return "columns are not neighbours in memory"
        return None

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return half_error(problem, self.sums(problem, sms, workspace))


@dataclass(frozen=True)
class BandCandidate(_Bands):
    """fprop or dgrad."""

    @property
    def tile(self) -> Extents:
        """Rows and columns of a tile of positions."""
        return (32 if self.channels == 1 else 16), 8 * self.tiles_n

    @property
    def _memory(self) -> str:
        """Type of a block's shared memory where channels are adjacent."""
        return f"polyconv::BandNhwc<{self.taps[0]}, {self.taps[1]}, {self.tiles_n}>"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: source tiles or sums, then band matrices of 22 words per kernel row."""
        if self.channels == 1:
            return 0
        rows, columns = self.tile
        tile, sums = 2 * (rows + self.taps[0] - 1) * (columns + 16), 4 * (rows * columns + 2)
        return self.channels * (max(tile, sums) + 4 * 22 * self.taps[0])

    @cached_property
    def kernel(self) -> KernelSpec:
        (h, w), several = self.taps, self.channels > 1
        function = "depthwise_band" + "_nhwc" * several
        threads = 128 if not several or self.tiles_n == 3 else 256 if h == 7 else 512
        facts = {f"sizeof({self._memory})": self.shared_bytes, "polyconv::kBandChannels": CHANNELS}
        kernel = KernelSpec.of(
            _PARAMS[self.dtype],
            "depthwise/band",
            *(h, w, self.tiles_n, *(threads,) * several, *element(self.dtype)),
            function=function,
            symbol=f"{function}_{h}x{w}_{8 * self.tiles_n}",
            threads=threads,
            min_blocks=512 // threads if several else 6,
            facts=facts if several else None,
            generations=GENERATIONS,
        )
        return finishing(kernel).of_halves(self.dtype)

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        return (prod(self.taps) + problem.bias,)

    def _tiles(self, problem: Problem) -> Extents:
        (height, width), (rows, columns) = self.tile, roles(problem).written_size
        return ceil_div(rows, height), ceil_div(columns, width)

    def _images_per_block(self, problem: Problem, sms: int) -> int:
        """As many as leave 16 blocks per multiprocessor: each block makes the band matrices of its channels."""
        blocks = prod(self._tiles(problem)) * ceil_div(problem.out_channels, self.channels)
        return max(1, min(problem.batch, problem.batch * blocks // (16 * sms)))

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        tiles, channels = prod(self._tiles(problem)), ceil_div(problem.out_channels, self.channels)
        chunks = ceil_div(problem.batch, self._images_per_block(problem, sms))
        blocks, every = tiles * chunks * channels, tiles * problem.batch * channels
        grid = int32(tiles * chunks, "the number of tiles"), channels, 1
        work = Work(blocks, blocks, every, moved_bytes(problem))
        task = Task(self.kernel, grid, work, dynamic_shared=self.shared_bytes)
        yield task_with_epilogue(problem, task, prod(problem.y_shape))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        r = roles(problem)
        p = BandParams(batch=problem.batch, images_per_block=self._images_per_block(problem, sms))
        p.place("source", r.source_strides, r.source)
        p.place("written", r.written_strides, r.written)
        p.source_height, p.source_width = r.source_size
        p.rows, p.columns = r.written_size
        p.channels, p.multiplier = problem.out_channels, r.outputs
        p.w_channel, p.w_row, p.w_column = problem.w_strides[0], problem.w_strides[2], problem.w_strides[3]
        top, _, left, _ = problem.padding
        p.first_row, p.first_column = -top, -left
        if problem.kind is Pass.DGRAD:  # taps are flipped: the last one meets the first output
            last_h, last_w = self.taps[0] - 1, self.taps[1] - 1
            p.first_row, p.first_column = top - last_h, left - last_w
            p.w_first = last_h * p.w_row + last_w * p.w_column
            p.w_row, p.w_column = -p.w_row, -p.w_column
        if self.channels == 1:
            p.pairs_read = _in_pairs(problem, r.source_strides, r.source_size)
            p.pairs_written = _in_pairs(problem, r.written_strides, r.written_size)
            p.shift = p.first_column % 2 if p.pairs_read else 0
        tiles_h, tiles_w = self._tiles(problem)
        p.tiles, p.tiles_w = tiles_h * tiles_w, tiles_w
        slots = kernel_params.slots(BandParams, source=r.source, w="w", written=r.written, bias=r.bias)
        (task,) = self.tasks(problem, sms, workspace)
        return Schedule((with_epilogue(problem, task.launch(bytes(p), slots)),), 0)


@dataclass(frozen=True, slots=True)
class BandCut:
    """Cut of the weight gradient into jobs, each a run of rows of dy in a tile of columns, and slices of jobs."""

    tiles_w: int
    tiles: int
    """Jobs of an image."""
    steps: int
    """Steps of a job, of eight rows each."""
    jobs: int
    jobs_per_slice: int
    slices: int
    columns_padded: int


@dataclass(frozen=True)
class BandWgradCandidate(_Bands):
    """wgrad: all taps in four accumulators per lane."""

    params: ClassVar[type[Params]] = BandWgradParams
    blocks_per_sm: ClassVar[int] = 16

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return 0

    @cached_property
    def kernel(self) -> KernelSpec:
        h, w = self.taps
        return KernelSpec.of(
            _WGRAD_PARAMS[self.dtype],
            "depthwise/band_wgrad",
            *(h, w, *element(self.dtype)),
            symbol=f"depthwise_band_wgrad_{h}x{w}",
            threads=128,
            min_blocks=8,
            generations=GENERATIONS,
        ).of_halves(self.dtype)

    def cut(self, problem: Problem, sms: int, workspace: int) -> BandCut:
        """Choose slices for about :attr:`blocks_per_sm`, and partial sums that fit the workspace."""
        (rows, columns), channels = problem.out_size, problem.out_channels
        columns_padded = round_up(prod(self.taps) + problem.bias, 4)
        tiles_w = ceil_div(columns, 8 * self.tiles_n)
        wanted = ceil_div(self.blocks_per_sm * sms, ceil_div(channels, self.channels))
        steps = self._steps(ceil_div(rows, STEP), ceil_div(wanted, problem.batch * tiles_w))
        tiles = tiles_w * ceil_div(rows, STEP * steps)
        jobs = int32(problem.batch * tiles, "the number of tiles of y")
        each = ceil_div(jobs, max(1, min(workspace // (4 * channels * columns_padded), wanted)))
        return BandCut(tiles_w, tiles, steps, jobs, each, ceil_div(jobs, each), columns_padded)

    def _steps(self, every: int, runs: int) -> int:
        """Steps of a job, of all those of an image's rows, if that many runs of rows would fill the GPU."""
        return 4

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        """In an accumulator, over accumulators and rows of dy, over warps, over slices."""
        cut = self.cut(problem, sms, workspace)
        return (cut.jobs_per_slice * 128, 2, 2, 4, cut.slices)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        cut = self.cut(problem, sms, workspace)
        yield self._task(problem, cut)
        yield reduction_task(problem, cut.slices, cut.columns_padded)

    def _task(self, problem: Problem, cut: BandCut) -> Task:
        channels = ceil_div(problem.out_channels, self.channels)
        moved = moved_bytes(problem) + 4 * cut.slices * problem.out_channels * cut.columns_padded
        work = Work(cut.slices * channels, *self._tiles_and_steps(cut, channels), moved)
        return Task(self.kernel, (cut.slices, channels, 1), work, dynamic_shared=self.shared_bytes)

    def _tiles_and_steps(self, cut: BandCut, channels: int) -> tuple[int, int]:
        """In the kernel's profile: blocks and jobs."""
        return cut.slices * channels, cut.jobs * channels

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        cut = self.cut(problem, sms, workspace)
        p = self.params(channels=problem.out_channels, columns_padded=cut.columns_padded, bias=problem.bias)
        p.height, p.width = problem.in_size
        p.rows, p.columns = problem.out_size
        p.place("x", problem.x_strides, "x")
        p.place("dy", problem.y_strides, "the gradient of y")
        p.pad_top, p.pad_left = problem.padding[0], problem.padding[2]
        p.jobs, p.jobs_per_slice = cut.jobs, cut.jobs_per_slice
        p.tiles, p.tiles_w = cut.tiles, cut.tiles_w
        self._fill(p, problem, cut)
        slots = kernel_params.slots(self.params, x="x", dy="y", partial="workspace")
        first = self._task(problem, cut).launch(bytes(p), slots)
        second = reduction(problem, cut.slices, prod(self.taps), cut.columns_padded)
        return Schedule((first, second), 4 * cut.slices * problem.out_channels * cut.columns_padded)

    def _fill(self, p: Any, problem: Problem, cut: BandCut) -> None:
        """Fill in the parameters of this kernel alone."""
        p.pairs_x = _in_pairs(problem, problem.x_strides, problem.in_size)
        p.pairs_dy = _in_pairs(problem, problem.y_strides, problem.out_size)
        p.shift = p.pad_left % 2 if p.pairs_x else 0
        p.multiplier = problem.channels_per_group[1]


@dataclass(frozen=True)
class BandWgradNhwcCandidate(BandWgradCandidate):
    """wgrad with adjacent channels: all taps of a channel in eight accumulators per lane of one warp."""

    params: ClassVar[type[Params]] = BandWgradNhwcParams
    blocks_per_sm: ClassVar[int] = 4

    @property
    def _memory(self) -> str:
        return f"polyconv::BandWgradNhwc<{self.tiles_n}>"

    @property
    def shared_bytes(self) -> int:
        """Per channel: a ring of 16 rows of x, and two copies of eight rows of dy."""
        pairs = 4 * self.tiles_n + 4
        x, copy = 2 * STEP * (pairs + 4), pairs + 4
        dy = STEP * (2 * copy + (4 if copy % 32 < 7 else 0))
        return 4 * self.channels * sum((words + 7) // 16 * 16 + 8 for words in (x, dy))

    @cached_property
    def kernel(self) -> KernelSpec:
        h, w = self.taps
        return KernelSpec.of(
            _WGRAD_NHWC_PARAMS[self.dtype],
            "depthwise/band_wgrad_nhwc",
            *(h, w, self.tiles_n, *element(self.dtype)),
            symbol=f"depthwise_band_wgrad_nhwc_{h}x{w}_{8 * self.tiles_n}",
            threads=256,
            min_blocks=2,
            facts={
                f"sizeof({self._memory})": self.shared_bytes,
                f"{self._memory}::kStep": STEP,
                "polyconv::kBandChannels": CHANNELS,
            },
            generations=GENERATIONS,
        ).of_halves(self.dtype)

    def _steps(self, every: int, runs: int) -> int:
        """At least four if the image has them: a job reads eight rows of x before its first step."""
        return ceil_div(every, min(ceil_div(every, 4), runs))

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        """In an accumulator, over accumulators and rows of dy, over slices."""
        cut = self.cut(problem, sms, workspace)
        products = STEP // 2 * (self.tiles_n + 1) // 4
        return (cut.jobs_per_slice * cut.steps * products * 16, 2, 2, cut.slices)

    def _tiles_and_steps(self, cut: BandCut, channels: int) -> tuple[int, int]:
        return cut.jobs * channels, cut.jobs * channels * cut.steps

    def _fill(self, p: Any, problem: Problem, cut: BandCut) -> None:
        p.steps = cut.steps


def _in_pairs(problem: Problem, strides: Strides, size: Extents) -> bool:
    """Whether every pair of columns is aligned to four bytes."""
    return problem.vector_aligned and not any(number % 2 for number in (*strides[:3], size[1]))


CANDIDATES = {
    dtype: tuple(BandCandidate(taps, *tile, dtype) for taps, tiles in TILES.items() for tile in tiles)
    for dtype in DTYPES
}
GRADIENTS = {
    dtype: tuple(
        kind((n, n), tiles_n, channels, dtype)
        for n in (5, 7)
        for kind, tiles_n, channels in (
            (BandWgradCandidate, 7, 1),
            (BandWgradNhwcCandidate, 7, CHANNELS),
            (BandWgradNhwcCandidate, 3, CHANNELS),
        )
    )
    for dtype in DTYPES
}


def candidates(problem: Problem) -> Iterator[CudaCandidate]:
    """Candidates compiled for the problem's kernel size; none if it is not depthwise."""
    if problem.depthwise:
        every = (GRADIENTS if problem.kind is Pass.WGRAD else CANDIDATES)[problem.dtype]
        yield from (one for one in every if one.taps == problem.kernel)


def all_kernels() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        yield from (candidate.kernel for candidate in (*CANDIDATES[dtype], *GRADIENTS[dtype]))
