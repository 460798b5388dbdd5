"""Plans for depthwise convolutions: all three passes (kernels/depthwise.cuh, kernels/depthwise_wgrad.cuh)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from ..accuracy import direct_error
from ..algebra.lattice import Phase
from ..problem import PaddingMode, Pass, Problem
from ..rounding import ceil_div, round_up
from . import layout
from .candidates import CudaCandidate
from .epilogue import kernel_with_epilogue, task_with_epilogue, with_epilogue
from .gather import BORDERS, Roles, pixel_strides, roles
from .layout import AxisPhase, DepthwiseParams, DepthwiseWgradParams, FastDivisor, HaloShape, int32
from .plan import KernelSpec, Schedule, Task, Work
from .tiles import CARRY, PLANE_TILES, WGRAD_TAPS, PlaneTile
from .traffic import moved_bytes
from .wgrad import bordered, reduction, reduction_task

MOST_SHARED = 48 * 1024
"""Shared memory per block, without opting in to more."""
MOST_CHANNELS = 65535
"""Channels are the grid's y dimension."""


@lru_cache(maxsize=1024)
def kernel(tile: PlaneTile) -> KernelSpec:
    return KernelSpec(
        stem="depthwise",
        symbol=f"depthwise_{tile.name}",
        body=f"polyconv::depthwise<{tile.cpp}>(params);",
        params="polyconv::DepthwiseParams",
        params_bytes=ctypes.sizeof(DepthwiseParams),
        threads=tile.threads,
        min_blocks=3 if tile.threads == 256 else 8,
    )


@lru_cache(maxsize=1024)
def wgrad_kernel(tile: PlaneTile, taps: int) -> KernelSpec:
    return KernelSpec(
        stem="depthwise_wgrad",
        symbol=f"depthwise_wgrad_{tile.name}_{taps}taps",
        body=f"polyconv::depthwise_wgrad<{tile.cpp}, {taps}>(params);",
        params="polyconv::DepthwiseWgradParams",
        params_bytes=ctypes.sizeof(DepthwiseWgradParams),
        threads=tile.threads,
        min_blocks=2 if tile.threads == 256 else 8,
    )


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    for tile in PLANE_TILES:
        yield kernel(tile)
        yield kernel_with_epilogue(kernel(tile))
        for taps in WGRAD_TAPS:
            yield wgrad_kernel(tile, taps)


def halo(phases: tuple[Phase, ...], positions: int) -> int:
    """Extent of the source that ``positions`` neighbouring positions of the largest phase read."""
    return max((positions - 1) * p.read_step + max(p.taps - 1, 0) * abs(p.tap_step) + 1 for p in phases)


def refusal(problem: Problem, r: Roles, tile: PlaneTile) -> str | None:
    """Why the kernel of fprop and dgrad cannot run on this tile, or None."""
    if not problem.depthwise:
        return f"{problem.in_channels} input channels in {problem.groups} groups are not depthwise"
    if problem.kind is Pass.DGRAD and r.border is not PaddingMode.ZEROS:
        return f"the gradient of a {r.border} border is gathered by the GEMM"
    if max(problem.in_channels, problem.out_channels) > MOST_CHANNELS:
        return f"more than {MOST_CHANNELS} channels"
    if max(len(r.phases_h), len(r.phases_w)) > layout.MAX_PHASES:
        return f"a stride of {problem.stride} has more than {layout.MAX_PHASES} phases"
    height, width = halo(r.phases_h, tile.height), halo(r.phases_w, tile.width)
    if height * width > CARRY * tile.threads:
        return f"a source tile of {height}x{width} does not fit {CARRY * tile.threads} carried elements"
    shared = _shared(r, height, width)
    return f"needs {shared} bytes of shared memory" if shared > MOST_SHARED else None


def _shared(r: Roles, height: int, width: int) -> int:
    return 4 * (2 * HaloShape.of(height, width).elements + max(taps_of(r), 1))


def taps_of(r: Roles) -> int:
    """Multiplications per written element in the largest phase."""
    return max(h.taps for h in r.phases_h) * max(w.taps for w in r.phases_w) * r.channels


def tiles_of(r: Roles, tile: PlaneTile) -> int:
    """Tiles of the largest phase of one plane."""
    rows, columns = max(h.count for h in r.phases_h), max(w.count for w in r.phases_w)
    return ceil_div(rows, tile.height) * ceil_div(columns, tile.width)


def sums(problem: Problem) -> tuple[int, ...]:
    """How one element of the result is summed: so many products in sequence."""
    return (taps_of(roles(problem)) + problem.bias,)


def _images_per_block(problem: Problem, r: Roles, tile: PlaneTile, sms: int) -> int:
    phases = len(r.phases_h) * len(r.phases_w)
    return _per_block(problem.batch, tiles_of(r, tile) * problem.groups * r.outputs * phases, sms)


def task(problem: Problem, tile: PlaneTile, sms: int) -> Task:
    """What fprop or dgrad launches, in counts."""
    r = roles(problem)
    height, width = halo(r.phases_h, tile.height), halo(r.phases_w, tile.width)
    tiles, channels = tiles_of(r, tile), problem.groups * r.outputs
    phases = len(r.phases_h) * len(r.phases_w)
    jobs = int32(tiles * ceil_div(problem.batch, _images_per_block(problem, r, tile, sms)), "the number of tiles")
    taps = sum(h.taps for h in r.phases_h) * sum(w.taps for w in r.phases_w) * r.channels
    walked = tiles * problem.batch * channels
    rounds = ceil_div(height * width, tile.threads) * r.channels  # of loading a tile's source
    work = Work(jobs * channels * phases, walked * phases * rounds, walked * taps, moved_bytes(problem))
    launched = Task(kernel(tile), (jobs, channels, phases), work)
    return task_with_epilogue(problem, launched, prod(problem.y_shape))


def launches(problem: Problem, tile: PlaneTile, sms: int) -> Schedule:
    """The one launch of fprop or dgrad; no workspace."""
    r = roles(problem)
    height, width = halo(r.phases_h, tile.height), halo(r.phases_w, tile.width)
    p = DepthwiseParams(batch=problem.batch, sources=r.channels, border=BORDERS[r.border])
    p.source_batch, p.source_channel = r.source_strides[:2]
    p.written_batch, p.written_channel = r.written_strides[:2]
    p.source_row, p.source_column = pixel_strides(r.source_strides, r.source)
    p.written_row, p.written_column = pixel_strides(r.written_strides, r.written)
    p.source_height, p.source_width = r.source_size
    # fprop: one weight row per written channel. dgrad: the written channel's outputs are neighbours in w.
    per_output = problem.w_strides[0]
    p.w_written = per_output if problem.kind is Pass.FPROP else per_output * r.channels
    p.w_source = per_output
    p.w_row, p.w_column = problem.w_strides[2:]
    p.halo = HaloShape.of(height, width)
    p.phases_w = len(r.phases_w)
    p.tap_step_h, p.tap_step_w = r.phases_h[0].tap_step, r.phases_w[0].tap_step
    p.multiplier = FastDivisor.of(r.outputs)
    p.tiles = FastDivisor.of(tiles_of(r, tile))
    p.tiles_w = FastDivisor.of(ceil_div(max(w.count for w in r.phases_w), tile.width))
    for i, phase in enumerate(r.phases_h):
        p.phase_h[i] = AxisPhase.of(phase)
    for i, phase in enumerate(r.phases_w):
        p.phase_w[i] = AxisPhase.of(phase)
    p.images_per_block = _images_per_block(problem, r, tile, sms)
    where = {"source": r.source, "w": "w", "written": r.written}
    if problem.kind is Pass.FPROP and problem.bias:
        where["bias"] = "bias"
    slots = layout.slots(DepthwiseParams, **where)
    launch = task(problem, tile, sms).launch(bytes(p), slots, _shared(r, height, width))
    return Schedule((with_epilogue(problem, launch),), 0)


def _per_block(jobs: int, blocks: int, sms: int) -> int:
    """Jobs that one block walks over: as many as still leave eight blocks per multiprocessor."""
    return max(1, min(jobs, jobs * blocks // (8 * sms)))


# ---- Weight gradient


def wgrad_refusal(problem: Problem, tile: PlaneTile) -> str | None:
    """Why the weight gradient's kernel cannot run on this tile, or None."""
    if not problem.depthwise:
        return f"{problem.in_channels} input channels in {problem.groups} groups are not depthwise"
    if problem.out_channels > MOST_CHANNELS:
        return f"more than {MOST_CHANNELS} channels"
    height, width = wgrad_halo(problem, tile)
    if height * width > CARRY * tile.threads:
        return f"a source tile of {height}x{width} does not fit {CARRY * tile.threads} carried elements"
    shared = _wgrad_shared(tile, height, width)
    return f"needs {shared} bytes of shared memory" if shared > MOST_SHARED - 1024 else None


def wgrad_halo(problem: Problem, tile: PlaneTile) -> tuple[int, int]:
    (r, s), (sh, sw), (dh, dw) = problem.kernel, problem.stride, problem.dilation
    return (tile.height - 1) * sh + (r - 1) * dh + 1, (tile.width - 1) * sw + (s - 1) * dw + 1


def _wgrad_shared(tile: PlaneTile, height: int, width: int) -> int:
    return 4 * 2 * (HaloShape.of(height, width).elements + tile.positions)


def wgrad_tiles(problem: Problem, tile: PlaneTile) -> int:
    return ceil_div(problem.out_size[0], tile.height) * ceil_div(problem.out_size[1], tile.width)


@dataclass(frozen=True, slots=True)
class DepthwiseCut:
    """How the weight gradient is cut into chunks of taps, tiles of positions and slices of these."""

    tile: PlaneTile
    taps: int
    chunks: int
    jobs: int
    jobs_per_slice: int
    slices: int
    columns_padded: int

    @property
    def sums(self) -> tuple[int, ...]:
        """How one weight is summed: in a thread, across a warp, across warps, over slices."""
        in_thread = ceil_div(self.jobs_per_slice * self.tile.positions, self.tile.threads)
        return (in_thread, 2, 2, 2, 2, 2, self.tile.threads // 32, self.slices)


def wgrad_cut(problem: Problem, tile: PlaneTile, taps: int, sms: int, workspace: int) -> DepthwiseCut:
    """As few slices as fill the device, and fit the workspace."""
    area = problem.kernel[0] * problem.kernel[1]
    columns_padded = round_up(area + problem.bias, 4)
    jobs = int32(problem.batch * wgrad_tiles(problem, tile), "the number of tiles of y")
    chunks = ceil_div(area, taps)
    most = max(1, workspace // (4 * problem.out_channels * columns_padded))
    per_slice = max(_per_block(jobs, problem.out_channels * chunks, sms), ceil_div(jobs, most))
    return DepthwiseCut(tile, taps, chunks, jobs, per_slice, ceil_div(jobs, per_slice), columns_padded)


def _wgrad_task(problem: Problem, cut: DepthwiseCut) -> Task:
    height, width = wgrad_halo(problem, cut.tile)
    walked = cut.jobs * problem.out_channels * cut.chunks
    work = Work(
        cut.slices * problem.out_channels * cut.chunks,
        walked * ceil_div(height * width, cut.tile.threads),
        walked * cut.taps,
        moved_bytes(problem) + 4 * cut.slices * problem.out_channels * cut.columns_padded,
    )
    return Task(wgrad_kernel(cut.tile, cut.taps), (cut.slices, problem.out_channels, cut.chunks), work)


def wgrad_tasks(problem: Problem, cut: DepthwiseCut) -> Iterator[Task]:
    """What the two stages of the weight gradient launch, in counts."""
    yield _wgrad_task(problem, cut)
    yield reduction_task(problem, cut.slices, cut.columns_padded)


def wgrad_launches(problem: Problem, cut: DepthwiseCut) -> Schedule:
    """The two stages of the weight gradient."""
    tile, area = cut.tile, problem.kernel[0] * problem.kernel[1]
    height, width = wgrad_halo(problem, tile)
    p = DepthwiseWgradParams(height=problem.in_size[0], width=problem.in_size[1])
    p.out_height, p.out_width = problem.out_size
    p.channels, p.taps, p.columns_padded, p.bias = problem.out_channels, area, cut.columns_padded, problem.bias
    p.border = BORDERS[problem.padding_mode] if bordered(problem) else 0
    p.x_batch, p.x_channel = problem.x_strides[:2]
    p.dy_batch, p.dy_channel = problem.y_strides[:2]
    p.x_row, p.x_column = pixel_strides(problem.x_strides, "x")
    p.dy_row, p.dy_column = pixel_strides(problem.y_strides, "the gradient of y")
    p.stride_h, p.stride_w = problem.stride
    p.dilation_h, p.dilation_w = problem.dilation
    p.pad_top, p.pad_left = problem.padding[0], problem.padding[2]
    p.halo = HaloShape.of(height, width)
    p.multiplier = FastDivisor.of(problem.channels_per_group[1])
    p.kernel_width = FastDivisor.of(problem.kernel[1])
    p.tiles = FastDivisor.of(wgrad_tiles(problem, tile))
    p.tiles_w = FastDivisor.of(ceil_div(problem.out_size[1], tile.width))
    p.jobs, p.jobs_per_slice = cut.jobs, cut.jobs_per_slice
    slots = layout.slots(DepthwiseWgradParams, x="x", dy="y", partial="workspace")
    first = _wgrad_task(problem, cut).launch(bytes(p), slots, _wgrad_shared(tile, height, width))
    second = reduction(problem, cut.slices, area, cut.columns_padded)
    return Schedule((first, second), 4 * cut.slices * problem.out_channels * cut.columns_padded)


@dataclass(frozen=True)
class DepthwiseCandidate:
    """fprop or dgrad, channel by channel."""

    tile: PlaneTile
    direct = True

    @property
    def name(self) -> str:
        return kernel(self.tile).symbol

    def refusal(self, problem: Problem) -> str | None:
        return refusal(problem, roles(problem), self.tile)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        yield task(problem, self.tile, sms)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return launches(problem, self.tile, sms)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return direct_error(problem, sums(problem))


@dataclass(frozen=True)
class DepthwiseWgradCandidate:
    """wgrad, channel by channel."""

    tile: PlaneTile
    taps: int
    """Taps that a block sums at once."""
    direct = True

    @property
    def name(self) -> str:
        return wgrad_kernel(self.tile, self.taps).symbol

    def refusal(self, problem: Problem) -> str | None:
        return wgrad_refusal(problem, self.tile)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        return wgrad_tasks(problem, wgrad_cut(problem, self.tile, self.taps, sms, workspace))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return wgrad_launches(problem, wgrad_cut(problem, self.tile, self.taps, sms, workspace))

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return direct_error(problem, wgrad_cut(problem, self.tile, self.taps, sms, workspace).sums)


FORWARD = tuple(map(DepthwiseCandidate, PLANE_TILES))
GRADIENTS = tuple(DepthwiseWgradCandidate(tile, taps) for tile in PLANE_TILES for taps in WGRAD_TAPS)


def candidates(problem: Problem) -> Iterator[CudaCandidate]:
    """Every tile, whether it takes this problem or not."""
    yield from GRADIENTS if problem.kind is Pass.WGRAD else FORWARD
