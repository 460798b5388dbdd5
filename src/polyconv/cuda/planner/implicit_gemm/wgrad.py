"""Plans for wgrad as a split-K implicit GEMM over pixels (kernels/implicit_gemm/wgrad.cuh), and its reduction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ....problem import PaddingMode, Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..candidate import DirectCandidate
from ..cost import LINE, moved_bytes
from ..kernel_params import DIVIDEND_LIMIT, declared, int32
from ..plan import KernelSpec, Launch, Schedule, Task, Work
from .fprop_dgrad import BORDER_FACTS, BORDERS, MOST_GROUPS, dense_pixels
from .tiles import ELEMENTS, SMALL, SQUARE, TALL, TINY, WIDE, BlockTile

WgradParams = declared("implicit_gemm/wgrad", "WgradParams")
SplitKReduceParams = declared("implicit_gemm/split_k_reduce", "SplitKReduceParams")


MOST_PIXELS_PER_SLICE = 16384
"""Longest sum in one accumulator: limits the rounding error of sums over millions of pixels."""
MOST_SLICES = 65535
"""Limit of grid.z, which counts slices."""


REDUCE = KernelSpec.of(SplitKReduceParams, "implicit_gemm/split_k_reduce", threads=256)
REDUCES = {"float32": REDUCE} | {
    dtype: KernelSpec.of(
        SplitKReduceParams,
        "implicit_gemm/wgrad_mma",
        element,
        function="implicit_gemm_split_k_reduce_rounded",
        symbol=REDUCE.symbol,
        threads=REDUCE.threads,
    ).of_halves(dtype)
    for dtype, element in ELEMENTS.items()
}
"""Split-K reductions by dtype of dw."""


def lines_of(elements: int, step: int) -> float:
    """Lines that some elements touch, ``step`` bytes apart, on average."""
    return 1 + (elements - 1) * min(LINE, step) / LINE


def bordered(problem: Problem) -> bool:
    return problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding)


def columns_of(problem: Problem) -> int:
    """Columns of one group's dw: channels times kernel area."""
    return problem.channels_per_group[0] * problem.kernel[0] * problem.kernel[1]


@dataclass(frozen=True, slots=True)
class WgradCut:
    """Tiles of dw and split-K slices of pixels."""

    k_tiles: int
    column_tiles: int
    columns_padded: int
    pixels_per_slice: int
    images: int
    """Images per launch: flattened pixels must stay below 2^31. Each launch has slices of its own."""

    def parts(self, problem: Problem) -> Iterator[tuple[int, int, int]]:
        """First image, pixels and slices of each launch."""
        out_h, out_w = problem.out_size
        for first_image in range(0, problem.batch, self.images):
            pixels = min(self.images, problem.batch - first_image) * out_h * out_w
            yield first_image, pixels, ceil_div(pixels, self.pixels_per_slice)

    def slices(self, problem: Problem) -> int:
        """Slices of all launches."""
        return sum(slices for _, _, slices in self.parts(problem))


def reduction_task(problem: Problem, slices: int, columns_padded: int) -> Task:
    """Task that adds the slices' partial sums."""
    elements = int32(problem.out_channels * columns_padded, "the number of weights")
    kernel = REDUCES[problem.dtype]
    blocks = ceil_div(elements, kernel.threads)
    return Task(kernel, (blocks, 1, 1), Work(blocks, blocks, blocks * slices, 4 * (slices + 1) * elements))


def reduction(
    problem: Problem, slices: int, columns: int, columns_padded: int, *, channels_adjacent: bool = False
) -> Launch:
    """Launch of :func:`reduction_task`; the partial sums start at the beginning of the workspace. Columns are (channel,
    row, column) or, if ``channels_adjacent``, (row, column, channel)."""
    p = SplitKReduceParams(slices=slices, columns=columns, elements=problem.out_channels * columns_padded)
    p.columns_padded = columns_padded
    channels, width = problem.channels_per_group[0], problem.kernel[1]
    if channels_adjacent:
        p.dw_k, p.dw_column, p.dw_channel, p.dw_row = problem.w_strides
        p.kernel_area, p.kernel_width = width * channels, channels
    else:
        p.dw_k, p.dw_channel, p.dw_row, p.dw_column = problem.w_strides
        p.kernel_area, p.kernel_width = problem.kernel[0] * width, width
    slots = kernel_params.slots(SplitKReduceParams, partial="workspace", dw="dw", db="db" if problem.bias else None)
    return reduction_task(problem, slices, columns_padded).launch(bytes(p), slots)


@dataclass(frozen=True)
class PixelGemm(DirectCandidate):
    """wgrad as a split-K GEMM over pixels; subclasses differ in how the kernel reads them."""

    tile: BlockTile
    channels_adjacent: ClassVar[bool] = False
    """Whether columns are (row, column, channel), not (channel, row, column)."""

    @property
    def resident(self) -> int:
        """Blocks per multiprocessor for which slices are made."""
        return self.kernel.min_blocks

    def filling(self, sms: int, tiles: int) -> int:
        """Number of slices with which the given tiles fill a device."""
        return ceil_div(2 * sms * self.resident, tiles)

    def cut(self, problem: Problem, sms: int, workspace: int) -> WgradCut:
        """Enough slices to fill the device evenly and to keep each sum short, few enough for the workspace."""
        out_h, out_w = problem.out_size
        pixels = problem.batch * out_h * out_w
        columns = columns_of(problem) + problem.bias
        columns_padded = round_up(columns, 4)
        k_tiles, column_tiles = ceil_div(problem.channels_per_group[1], self.tile.m), ceil_div(columns, self.tile.n)
        filling = self.filling(sms, k_tiles * column_tiles * problem.groups)
        wanted = max(ceil_div(pixels, MOST_PIXELS_PER_SLICE), filling)
        most = min(max(1, workspace // (4 * problem.out_channels * columns_padded)), max(1, pixels // 64), MOST_SLICES)
        pixels_per_slice = round_up(ceil_div(pixels, min(wanted, most)), self.tile.depth)
        int32(out_h * out_w + pixels_per_slice, "the number of pixels of one image of y")
        images = min(problem.batch, max(1, (DIVIDEND_LIMIT - 1 - pixels_per_slice) // (out_h * out_w)))
        return WgradCut(k_tiles, column_tiles, columns_padded, pixels_per_slice, images)

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        """Pixels of a slice in sequence, then slices in sequence."""
        cut = self.cut(problem, sms, workspace)
        return cut.pixels_per_slice, cut.slices(problem)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        cut = self.cut(problem, sms, workspace)
        for _, pixels, slices in cut.parts(problem):
            yield self._task(problem, cut, pixels, slices)
        yield reduction_task(problem, cut.slices(problem), cut.columns_padded)

    def _task(self, problem: Problem, cut: WgradCut, pixels: int, slices: int) -> Task:
        grid = (cut.k_tiles * cut.column_tiles, problem.groups, slices)
        blocks = grid[0] * grid[1] * slices
        part = pixels / (problem.batch * problem.out_size[0] * problem.out_size[1])
        moved = int(part * moved_bytes(problem)) + 4 * slices * problem.out_channels * cut.columns_padded
        return Task(
            self.kernel, grid, Work(blocks, blocks, ceil_div(pixels, self.tile.depth) * grid[0] * grid[1], moved)
        )

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        cut = self.cut(problem, sms, workspace)
        channels, k = problem.channels_per_group
        columns, each = columns_of(problem), problem.element_bytes
        out_h, out_w = problem.out_size
        p = WgradParams(height=problem.in_size[0], width=problem.in_size[1], k=k, channels=channels)
        p.groups, p.columns, p.bias = problem.groups, int32(columns, "channels times kernel area"), problem.bias
        p.place("x", problem.x_strides, "x")
        p.place("dy", problem.y_strides, "the gradient of y")
        p.border = BORDERS[problem.padding_mode] if bordered(problem) else 0
        p.stride_h, p.stride_w = problem.stride
        p.dilation_h, p.dilation_w = problem.dilation
        p.pad_top, p.pad_left = problem.padding[0], problem.padding[2]
        p.k_tiles, p.out_height, p.out_width = cut.k_tiles, out_h, out_w
        p.kernel_area, p.kernel_width = problem.kernel[0] * problem.kernel[1], problem.kernel[1]
        p.columns_padded, p.pixels_per_slice = cut.columns_padded, cut.pixels_per_slice
        found = []
        scratch = 0
        for first_image, pixels, slices in cut.parts(problem):
            p.pixels = pixels
            slots = kernel_params.slots(
                WgradParams,
                x=("x", each * first_image * problem.x_strides[0]),
                dy=("y", each * first_image * problem.y_strides[0]),
                partial=("workspace", scratch),
            )
            found.append(self._task(problem, cut, pixels, slices).launch(bytes(p), slots))
            scratch += 4 * slices * problem.out_channels * cut.columns_padded
        slices, adjacent = cut.slices(problem), self.channels_adjacent
        found.append(reduction(problem, slices, columns, cut.columns_padded, channels_adjacent=adjacent))
        return Schedule(tuple(found), scratch)


@dataclass(frozen=True)
class WgradCandidate(PixelGemm):
    """wgrad as an implicit GEMM."""

    vector: bool
    """Whether four pixels of dy are loaded at once."""
    bordered: bool

    @cached_property
    def kernel(self) -> KernelSpec:
        tile, lean = self.tile, self.tile.threads == 256 and self.vector and not self.bordered
        return KernelSpec.of(
            WgradParams,
            "implicit_gemm/wgrad",
            tile,
            self.vector,
            self.bordered,
            symbol=f"implicit_gemm_wgrad_{tile.name}" + "_vector" * self.vector + "_bordered" * self.bordered,
            threads=tile.threads,
            min_blocks=tile.min_blocks(weight=0 if lean else 1),
            facts={**tile.facts, **BORDER_FACTS},
            efficiency=0.85,  # simulated
        )

    def _task(self, problem: Problem, cut: WgradCut, pixels: int, slices: int) -> Task:
        """With the extra lines of loads of elements that are not adjacent."""
        task = super()._task(problem, cut, pixels, slices)
        k, columns = cut.column_tiles * problem.channels_per_group[1], cut.k_tiles * columns_of(problem)
        lines = columns * self._scattered_x(problem) + (0.0 if self.vector else k * self._scattered_dy(problem))
        loads = ceil_div(pixels, self.tile.depth) * self.tile.depth * problem.groups / 32  # of a row of either operand
        return replace(task, work=replace(task.work, scattered_lines=int(loads * lines)))

    def _scattered_dy(self, problem: Problem) -> float:
        """Extra lines of a load of ``depth`` pixels of some channels of dy."""
        each, (_, channel, _, column) = problem.element_bytes, problem.y_strides
        rows = 32 // self.tile.depth
        apart = lines_of(self.tile.depth, each * column) * (1 if each * channel < LINE else rows)
        return max(0.0, apart - rows * lines_of(self.tile.depth, each))

    def _scattered_x(self, problem: Problem) -> float:
        """Extra lines of a load of ``depth`` pixels of some columns of x. Columns are the taps of a kernel row, then
        other rows or channels; neighbouring taps share pixels."""
        each, (_, channel, _, column) = problem.element_bytes, problem.x_strides
        stride, dilation = problem.stride[1], problem.dilation[1]
        taps = min(32 // self.tile.depth, problem.kernel[1])
        pixels = self.tile.depth + (taps - 1) * min(self.tile.depth, ceil_div(dilation, stride))
        rows = 32 // self.tile.depth / taps
        together = problem.kernel == (1, 1) and each * channel < LINE
        apart = lines_of(pixels, each * stride * column) * (1 if together else rows)
        return max(0.0, apart - rows * lines_of(pixels, each))

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if self.bordered is not bordered(problem):
            return f"cannot read a {problem.padding_mode} border"
        if self.vector and not dense_pixels(problem.y_strides, problem.out_size, problem):
            return "pixels of dy are not dense quads"
        return None


WGRAD_TILES = (SQUARE, WIDE, TALL, SMALL, TINY)
"""Output channels by columns: 128x128, 64x128, 128x64, 64x64, 64x32."""
CANDIDATES = {
    border: tuple(WgradCandidate(tile, vector, border) for tile in WGRAD_TILES for vector in (True, False))
    for border in (False, True)
}
"""By whether the border is made of image values."""


def candidates(problem: Problem) -> Iterator[WgradCandidate]:
    """Every tile for the problem's border; only for the weight gradient."""
    if problem.kind is Pass.WGRAD:
        yield from CANDIDATES[bordered(problem)]


def all_kernels() -> Iterator[KernelSpec]:
    yield REDUCE
    yield from (candidate.kernel for border in CANDIDATES.values() for candidate in border)
