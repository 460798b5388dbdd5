"""Plans for wgrad of float32 tensors by one scaled FP16 product, with both operands read in place
(kernels/scaled_fp16/halo_wgrad.cuh).

One split-K GEMM whose blocks scale x and dy by themselves, and the reduction of float32's weight gradients. Compared
with cuda/planner/scaled_fp16/wgrad.py x and dy are moved once, but read from the L2 by every tile of dw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile

from ....problem import Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import ceil_div, round_up
from ..cost import LINE, SECTOR, moved_bytes
from ..implicit_gemm.fprop_dgrad import MOST_GROUPS, dense_channels
from ..implicit_gemm.fprop_dgrad_nhwc import GENERATIONS
from ..implicit_gemm.tiles import MatrixTile
from ..implicit_gemm.wgrad import (
    MOST_PIXELS_PER_SLICE,
    MOST_SLICES,
    PixelGemm,
    WgradCut,
    bordered,
    columns_of,
)
from ..kernel_params import DIVIDEND_LIMIT, declared, with_fields
from ..plan import KernelSpec, Launch, Schedule, Task, Work
from .halo import PITCH, Rectangle, rectangles
from .operand import scaled_error

ScaledHaloWgradParams = declared("scaled_fp16/halo_wgrad", "ScaledHaloWgradParams")

TILE = MatrixTile(2, 2, 2, 9)
"""64 k by 32 channels under nine taps."""
CHANNELS, TAPS, MATRIX, LANES = 32, TILE.units_n, 16, 32
MOST_PIXELS = 128
"""Of a rectangle."""
MOST_SHARED = 80_000
"""Shared memory of a block [bytes] where two blocks fit an A100's multiprocessor."""


@lru_cache(maxsize=4096)
def rectangle(problem: Problem) -> Rectangle:
    """The rectangle of a weight gradient that is modelled to take the least time."""
    forward = replace(problem, kind=Pass.FPROP)

    def cost(one: Rectangle) -> float:
        """Cycles: of tensor cores and shared memory per 16 pixels, issue slots per load, lines and sectors."""
        lines, sectors = _read(problem, one, CHANNELS, TILE.m)
        return _number(problem, one) * (
            464 * ceil_div(one.pixels, MATRIX) + 80 * _loads(problem, one) + lines + 0.65 * sectors
        )

    large = (one for one in rectangles(forward, MOST_PIXELS) if _shared(one) <= MOST_SHARED)
    return min(list(large) or rectangles(forward, MOST_PIXELS // 4), key=cost)


def _number(problem: Problem, one: Rectangle) -> int:
    """Rectangles of all images."""
    height, width = problem.out_size
    return problem.batch * ceil_div(height, one.height) * ceil_div(width, one.width)


def _vectors(problem: Problem) -> tuple[bool, bool]:
    """Whether channels of x, and of dy, are adjacent and aligned quads."""
    channels, k = problem.channels_per_group
    return dense_channels(problem.x_strides, channels, problem), dense_channels(problem.y_strides, k, problem)


def _at_once(vector: bool, width: int) -> int:
    """Pixels of a window of this width that a warp reads at once: whole rows touch fewer lines."""
    return LANES if vector or width > LANES else LANES // width * width


def _loads(problem: Problem, one: Rectangle) -> int:
    """Loads of 32 channels of a rectangle by a warp."""
    x, dy = _vectors(problem)
    of_dy = TILE.m // CHANNELS * ceil_div(one.pixels, _at_once(dy, one.width))
    return ceil_div(one.halo, _at_once(x, one.halo_width)) + of_dy


def _shared(one: Rectangle) -> int:
    return PITCH * (one.halo + TILE.m // CHANNELS * round_up(one.pixels, MATRIX))


@dataclass(frozen=True, slots=True)
class RectangleCut(WgradCut):
    """Slices of whole rectangles."""

    rectangles: int
    rectangles_per_slice: int

    def parts(self, problem: Problem) -> Iterator[tuple[int, int, int]]:
        pixels = problem.batch * problem.out_size[0] * problem.out_size[1]
        yield 0, pixels, ceil_div(self.rectangles, self.rectangles_per_slice)


@dataclass(frozen=True)
class HaloWgradCandidate(PixelGemm):
    """wgrad of float32 tensors."""

    tile: MatrixTile
    direct = False
    channels_adjacent = True

    @cached_property
    def kernel(self) -> KernelSpec:
        found = KernelSpec.of(
            ScaledHaloWgradParams,
            "scaled_fp16/halo_wgrad",
            self.tile,
            symbol=f"scaled_fp16_halo_wgrad_{self.tile.name}",
            threads=self.tile.threads,
            min_blocks=2,
            facts={
                **self.tile.facts,
                "polyconv::kMatrix": MATRIX,
                "polyconv::kWindowChannels": CHANNELS,
                "polyconv::kWindowPitch": PITCH,
            },
            generations=GENERATIONS,
        )
        return replace(found, dtype="float16")

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if bordered(problem):
            return f"cannot read a {problem.padding_mode} border"
        if problem.channels_per_group[0] % 2:
            return "an odd number of channels per group"
        one = rectangle(problem)
        if _number(problem, one) * one.pixels >= DIVIDEND_LIMIT:
            return "too many pixels for one launch"
        return None

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return scaled_error(problem, self.sums(problem, sms, workspace))

    def cut(self, problem: Problem, sms: int, workspace: int) -> RectangleCut:
        """One wave of blocks, if the workspace allows."""
        one, (channels, k) = rectangle(problem), problem.channels_per_group
        number = _number(problem, one)
        k_tiles = ceil_div(k, self.tile.m)
        column_tiles = ceil_div(channels, CHANNELS) * ceil_div(problem.kernel[0] * problem.kernel[1], TAPS)
        columns_padded = round_up(columns_of(problem) + problem.bias, 4)
        slots, tiles = sms * self.resident, k_tiles * column_tiles * problem.groups
        filling = slots // tiles if tiles <= slots else self.filling(sms, tiles)
        wanted = max(filling, ceil_div(number * one.pixels, MOST_PIXELS_PER_SLICE))
        most = min(max(1, workspace // (4 * problem.out_channels * columns_padded)), MOST_SLICES)
        each = ceil_div(number, min(wanted, most))
        pixels = each * round_up(one.pixels, MATRIX)
        return RectangleCut(k_tiles, column_tiles, columns_padded, pixels, problem.batch, number, each)

    def _task(self, problem: Problem, cut: WgradCut, pixels: int, slices: int) -> Task:
        """A tile is a load of 32 pixels of 32 channels by a warp, a step 16 pixels. The first rectangle of a block is
        read twice."""
        one, number = rectangle(problem), _number(problem, rectangle(problem))
        tiles = cut.k_tiles * cut.column_tiles * problem.groups
        blocks, fills = tiles * slices, tiles * (number + slices)
        sums = self._sums_bytes(problem, cut, slices)
        channels, k = problem.channels_per_group
        of_block = channels / ceil_div(channels, CHANNELS), k / cut.k_tiles
        lines, sectors = (int(fills * each) for each in _read(problem, one, *of_block))
        steps = tiles * number * ceil_div(one.pixels, MATRIX)
        work = Work(blocks, fills * _loads(problem, one), steps, moved_bytes(problem) + sums, lines, sectors)
        work = replace(work, passed_bytes=sums, slab_bytes=sums)
        grid = (cut.k_tiles * cut.column_tiles, problem.groups, slices)
        return Task(self.kernel, grid, work, dynamic_shared=_shared(one))

    @staticmethod
    def _sums_bytes(problem: Problem, cut: WgradCut, slices: int) -> int:
        """Bytes that are passed to the reduction: all blocks write them at once, at their end."""
        return 4 * slices * problem.out_channels * cut.columns_padded

    def _reduction_work(self, problem: Problem, cut: WgradCut, work: Work) -> Work:
        sums = self._sums_bytes(problem, cut, cut.slices(problem))
        return replace(work, passed_bytes=sums, slab_bytes=sums)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        cut = self.cut(problem, sms, workspace)
        multiply, reduce = super().tasks(problem, sms, workspace)
        yield multiply
        yield replace(reduce, work=self._reduction_work(problem, cut, reduce.work))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        found, cut = super().schedule(problem, sms, workspace), self.cut(problem, sms, workspace)
        multiply, reduce = found.launches
        reduce = replace(reduce, work=self._reduction_work(problem, cut, reduce.work))
        return replace(found, launches=(self._with_rectangles(problem, cut, multiply), reduce))

    def _with_rectangles(self, problem: Problem, cut: RectangleCut, launch: Launch) -> Launch:
        one, (x, dy) = rectangle(problem), _vectors(problem)
        fields = {
            "channel_tiles": ceil_div(problem.channels_per_group[0], CHANNELS),
            "tiles_h": ceil_div(problem.out_size[0], one.height),
            "tiles_w": ceil_div(problem.out_size[1], one.width),
            "tile_width": one.width,
            "halo_width": one.halo_width,
            "tile_height": one.height,
            "halo_height": one.halo_height,
            "rectangles": cut.rectangles,
            "rectangles_per_slice": cut.rectangles_per_slice,
            "taps": problem.kernel[0] * problem.kernel[1],
            "x_vector": int(x),
            "dy_vector": int(dy),
            "x_at_once": _at_once(x, one.halo_width),
            "dy_at_once": _at_once(dy, one.width),
        }
        return with_fields(launch, fields)


def _read(problem: Problem, one: Rectangle, channels: float, k: float) -> tuple[float, float]:
    """Lines and sectors that a block reads for a rectangle, given the channels of x and of dy in its tile."""
    found = [0.0, 0.0]
    size, halo = (one.height, one.width), (one.halo_height, one.halo_width)
    x, dy = (problem.x_strides, problem.in_size, halo), (problem.y_strides, problem.out_size, size)
    of_both = zip((channels, k), _vectors(problem), (x, dy), strict=True)
    for number, vector, (strides, extents, window) in of_both:
        pixels = window[0] * window[1]
        share = number
        for axis in (0, 1):
            step, before = size[axis], 0
            if window is halo:
                step, before = step * problem.stride[axis], problem.padding[2 * axis]
            share *= _inside(ceil_div(problem.out_size[axis], size[axis]), step, before, window[axis], extents[axis])
        if vector:
            found[0] += share * 8 * pixels / LINE
            found[1] += share * 4 * pixels / SECTOR
            continue
        segments = window[0]
        if window[1] > LANES:  # a load reads parts of several rows
            segments += ceil_div(pixels, LANES) - 1
        for i, unit in enumerate((LINE, SECTOR)):
            found[i] += share * (segments + (pixels - segments) * min(1.0, 4 * strides[3] / unit))
    return found[0], found[1]


def _inside(tiles: int, step: int, before: int, reach: int, extent: int) -> float:
    """Share of the positions of an axis that lie inside of the image."""
    starts = range(-before, tiles * step - before, step)
    outside = sum(min(reach, -at) for at in takewhile(lambda at: at < 0, starts))
    outside += sum(
        min(reach, at + reach - extent) for at in takewhile(lambda at: at + reach > extent, reversed(starts))
    )
    return max(0.0, 1 - outside / (tiles * reach))


CANDIDATES = (HaloWgradCandidate(TILE),)


def candidates(problem: Problem) -> Iterator[HaloWgradCandidate]:
    """Only for the weight gradient."""
    if problem.kind is Pass.WGRAD:
        yield from CANDIDATES


def all_kernels() -> Iterator[KernelSpec]:
    yield from (candidate.kernel for candidate in CANDIDATES)
