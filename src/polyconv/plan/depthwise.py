"""Plans for depthwise convolutions: all three passes (kernels/depthwise.cuh, kernels/depthwise_wgrad.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from ..algebra.lattice import Phase
from ..problem import Extents, PaddingMode, Pass, Problem
from ..rounding import ceil_div, round_up
from . import layout
from .candidates import CudaCandidate, DirectCandidate
from .epilogue import kernel_with_epilogue, task_with_epilogue, with_epilogue
from .gather import BORDERS, Roles, roles
from .layout import DepthwiseParams, DepthwiseWgradParams, HaloShape, int32
from .plan import KernelSpec, Schedule, Task, Work
from .tiles import CARRY, PLANE_TILES, WGRAD_TAPS, PlaneTile
from .traffic import moved_bytes
from .wgrad import bordered, reduction, reduction_task

MOST_SHARED = 48 * 1024
"""Shared memory per block, without opting in to more."""
MOST_CHANNELS = 65535
"""Channels are the grid's y dimension."""


def _per_block(jobs: int, blocks: int, sms: int) -> int:
    """Jobs that one block walks over: as many as still leave eight blocks per multiprocessor."""
    return max(1, min(jobs, jobs * blocks // (8 * sms)))


@dataclass(frozen=True)
class _PlaneCandidate(DirectCandidate):
    """A kernel whose blocks hold the source of a tile of positions in shared memory, channel by channel."""

    tile: PlaneTile
    static_shared = 0
    """Bytes of shared memory that the kernel declares itself."""

    def halo(self, problem: Problem) -> Extents:
        """Height and width of the source of a tile."""
        raise NotImplementedError

    def shared(self, problem: Problem) -> int:
        """Bytes of shared memory that are sized at launch."""
        raise NotImplementedError

    def refusal(self, problem: Problem) -> str | None:
        if not problem.depthwise:
            return f"{problem.in_channels} input channels in {problem.groups} groups are not depthwise"
        if problem.out_channels > MOST_CHANNELS:
            return f"more than {MOST_CHANNELS} channels"
        (height, width), carried = self.halo(problem), CARRY * self.tile.threads
        if height * width > carried:
            return f"a source tile of {height}x{width} does not fit {carried} carried elements"
        shared = self.shared(problem)
        return f"needs {shared} bytes of shared memory" if shared > MOST_SHARED - self.static_shared else None


@dataclass(frozen=True)
class DepthwiseCandidate(_PlaneCandidate):
    """fprop or dgrad, channel by channel."""

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = self.tile
        blocks = 3 if tile.threads == 256 else 8
        symbol = f"depthwise_{tile.name}"
        return KernelSpec.of(DepthwiseParams, "depthwise", tile, symbol=symbol, threads=tile.threads, min_blocks=blocks)

    def refusal(self, problem: Problem) -> str | None:
        r = roles(problem)
        if problem.depthwise and problem.kind is Pass.DGRAD and r.border is not PaddingMode.ZEROS:
            return f"the gradient of a {r.border} border is gathered by the GEMM"
        if problem.depthwise and max(len(r.phases_h), len(r.phases_w)) > layout.MAX_PHASES:
            return f"a stride of {problem.stride} has more than {layout.MAX_PHASES} phases"
        return super().refusal(problem)

    def halo(self, problem: Problem) -> Extents:
        r = roles(problem)
        return _halo(r.phases_h, self.tile.height), _halo(r.phases_w, self.tile.width)

    def shared(self, problem: Problem) -> int:
        return 4 * (2 * HaloShape.of(*self.halo(problem)).elements + max(_taps(roles(problem)), 1))

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        return (_taps(roles(problem)) + problem.bias,)

    def _tiles(self, r: Roles) -> int:
        """Tiles of the largest phase of one plane."""
        rows, columns = max(h.count for h in r.phases_h), max(w.count for w in r.phases_w)
        return ceil_div(rows, self.tile.height) * ceil_div(columns, self.tile.width)

    def _images_per_block(self, problem: Problem, r: Roles, sms: int) -> int:
        phases = len(r.phases_h) * len(r.phases_w)
        return _per_block(problem.batch, self._tiles(r) * problem.groups * r.outputs * phases, sms)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        r = roles(problem)
        height, width = self.halo(problem)
        tiles, channels = self._tiles(r), problem.groups * r.outputs
        phases = len(r.phases_h) * len(r.phases_w)
        jobs = int32(tiles * ceil_div(problem.batch, self._images_per_block(problem, r, sms)), "the number of tiles")
        taps = sum(h.taps for h in r.phases_h) * sum(w.taps for w in r.phases_w) * r.channels
        walked = tiles * problem.batch * channels
        rounds = ceil_div(height * width, self.tile.threads) * r.channels  # of loading a tile's source
        work = Work(jobs * channels * phases, walked * phases * rounds, walked * taps, moved_bytes(problem))
        task = Task(self.kernel, (jobs, channels, phases), work, dynamic_shared=self.shared(problem))
        yield task_with_epilogue(problem, task, prod(problem.y_shape))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The one launch; no workspace."""
        r = roles(problem)
        p = DepthwiseParams(batch=problem.batch, sources=r.channels, border=BORDERS[r.border])
        layout.set_phases(p, r.phases_h, r.phases_w)
        p.place("source", r.source_strides, r.source)
        p.place("written", r.written_strides, r.written)
        p.source_height, p.source_width = r.source_size
        # fprop: one weight row per written channel. dgrad: the written channel's outputs are neighbours in w.
        per_output = problem.w_strides[0]
        p.w_written = per_output if problem.kind is Pass.FPROP else per_output * r.channels
        p.w_source = per_output
        p.w_row, p.w_column = problem.w_strides[2:]
        p.halo = HaloShape.of(*self.halo(problem))
        p.multiplier = r.outputs
        p.tiles = self._tiles(r)
        p.tiles_w = ceil_div(max(w.count for w in r.phases_w), self.tile.width)
        p.images_per_block = self._images_per_block(problem, r, sms)
        slots = layout.slots(DepthwiseParams, source=r.source, w="w", written=r.written, bias=r.bias)
        (task,) = self.tasks(problem, sms, workspace)
        return Schedule((with_epilogue(problem, task.launch(bytes(p), slots)),), 0)


def _halo(phases: tuple[Phase, ...], positions: int) -> int:
    """Extent of the source that ``positions`` neighbouring positions of the largest phase read."""
    return max((positions - 1) * p.read_step + max(p.taps - 1, 0) * abs(p.tap_step) + 1 for p in phases)


def _taps(r: Roles) -> int:
    """Multiplications per written element in the largest phase."""
    return max(h.taps for h in r.phases_h) * max(w.taps for w in r.phases_w) * r.channels


@dataclass(frozen=True, slots=True)
class DepthwiseCut:
    """How the weight gradient is cut into chunks of taps, tiles of positions and slices of these."""

    chunks: int
    jobs: int
    jobs_per_slice: int
    slices: int
    columns_padded: int


@dataclass(frozen=True)
class DepthwiseWgradCandidate(_PlaneCandidate):
    """wgrad, channel by channel."""

    taps: int
    """Taps that a block sums at once."""
    static_shared = 1024

    @cached_property
    def kernel(self) -> KernelSpec:
        tile, taps = self.tile, self.taps
        blocks = 2 if tile.threads == 256 else 8
        symbol = f"depthwise_wgrad_{tile.name}_{taps}taps"
        return KernelSpec.of(
            DepthwiseWgradParams, "depthwise_wgrad", tile, taps, symbol=symbol, threads=tile.threads, min_blocks=blocks
        )

    def halo(self, problem: Problem) -> Extents:
        (r, s), (sh, sw), (dh, dw) = problem.kernel, problem.stride, problem.dilation
        return (self.tile.height - 1) * sh + (r - 1) * dh + 1, (self.tile.width - 1) * sw + (s - 1) * dw + 1

    def shared(self, problem: Problem) -> int:
        return 4 * 2 * (HaloShape.of(*self.halo(problem)).elements + self.tile.positions)

    def _tiles(self, problem: Problem) -> int:
        rows, columns = problem.out_size
        return ceil_div(rows, self.tile.height) * ceil_div(columns, self.tile.width)

    def cut(self, problem: Problem, sms: int, workspace: int) -> DepthwiseCut:
        """As few slices as fill the device, and fit the workspace."""
        area = problem.kernel[0] * problem.kernel[1]
        columns_padded = round_up(area + problem.bias, 4)
        jobs = int32(problem.batch * self._tiles(problem), "the number of tiles of y")
        chunks = ceil_div(area, self.taps)
        most = max(1, workspace // (4 * problem.out_channels * columns_padded))
        per_slice = max(_per_block(jobs, problem.out_channels * chunks, sms), ceil_div(jobs, most))
        return DepthwiseCut(chunks, jobs, per_slice, ceil_div(jobs, per_slice), columns_padded)

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        """In a thread, across a warp, across warps, over slices."""
        cut = self.cut(problem, sms, workspace)
        in_thread = ceil_div(cut.jobs_per_slice * self.tile.positions, self.tile.threads)
        return (in_thread, 2, 2, 2, 2, 2, self.tile.threads // 32, cut.slices)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        cut = self.cut(problem, sms, workspace)
        yield self._task(problem, cut)
        yield reduction_task(problem, cut.slices, cut.columns_padded)

    def _task(self, problem: Problem, cut: DepthwiseCut) -> Task:
        height, width = self.halo(problem)
        walked = cut.jobs * problem.out_channels * cut.chunks
        work = Work(
            cut.slices * problem.out_channels * cut.chunks,
            walked * ceil_div(height * width, self.tile.threads),
            walked * self.taps,
            moved_bytes(problem) + 4 * cut.slices * problem.out_channels * cut.columns_padded,
        )
        grid = (cut.slices, problem.out_channels, cut.chunks)
        return Task(self.kernel, grid, work, dynamic_shared=self.shared(problem))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The partial sums, then their reduction."""
        cut = self.cut(problem, sms, workspace)
        area = problem.kernel[0] * problem.kernel[1]
        p = DepthwiseWgradParams(height=problem.in_size[0], width=problem.in_size[1])
        p.out_height, p.out_width = problem.out_size
        p.channels, p.taps, p.columns_padded, p.bias = problem.out_channels, area, cut.columns_padded, problem.bias
        p.border = BORDERS[problem.padding_mode] if bordered(problem) else 0
        p.place("x", problem.x_strides, "x")
        p.place("dy", problem.y_strides, "the gradient of y")
        p.stride_h, p.stride_w = problem.stride
        p.dilation_h, p.dilation_w = problem.dilation
        p.pad_top, p.pad_left = problem.padding[0], problem.padding[2]
        p.halo = HaloShape.of(*self.halo(problem))
        p.multiplier = problem.channels_per_group[1]
        p.kernel_width = problem.kernel[1]
        p.tiles = self._tiles(problem)
        p.tiles_w = ceil_div(problem.out_size[1], self.tile.width)
        p.jobs, p.jobs_per_slice = cut.jobs, cut.jobs_per_slice
        slots = layout.slots(DepthwiseWgradParams, x="x", dy="y", partial="workspace")
        first = self._task(problem, cut).launch(bytes(p), slots)
        second = reduction(problem, cut.slices, area, cut.columns_padded)
        return Schedule((first, second), 4 * cut.slices * problem.out_channels * cut.columns_padded)


FORWARD = tuple(map(DepthwiseCandidate, PLANE_TILES))
GRADIENTS = tuple(DepthwiseWgradCandidate(tile, taps) for tile in PLANE_TILES for taps in WGRAD_TAPS)


def candidates(problem: Problem) -> Iterator[CudaCandidate]:
    """Every tile, whether it takes this problem or not."""
    yield from GRADIENTS if problem.kind is Pass.WGRAD else FORWARD


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    for forward in FORWARD:
        yield forward.kernel
        yield kernel_with_epilogue(forward.kernel)
    yield from (gradient.kernel for gradient in GRADIENTS)
