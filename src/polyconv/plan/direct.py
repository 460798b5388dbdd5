"""The ways that sum the products of the definition: implicit GEMMs, and channel by channel for depthwise problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ..problem import Pass, Problem
from . import depthwise, gather, wgrad
from .cost import LAUNCH_US, GemmWork, gemm_us, memory_us
from .device import CudaDevice
from .gather import LoaderKind
from .plan import KernelSpec, Schedule
from .tiles import GATHER_TILES, PLANE_TILES, WGRAD_TAPS, WGRAD_TILES, GemmTile, PlaneTile
from .ways import Way

TAPS_PER_CYCLE = 12.0
"""Taps that a multiprocessor multiplies per cycle in a depthwise kernel: each needs a word of shared memory."""


def ways(problem: Problem) -> Iterator[Way]:
    """Every direct way to compute the problem's pass, whether it takes this problem or not."""
    if problem.kind is Pass.WGRAD:
        for tile in WGRAD_TILES:
            for vector in (True, False):
                yield WgradWay(tile, vector, wgrad.bordered(problem))
        for plane in PLANE_TILES:
            for taps in WGRAD_TAPS:
                yield DepthwiseWgradWay(plane, taps)
        return
    for loader in gather.LOADERS:
        for tile in GATHER_TILES:
            yield GatherWay(tile, loader)
    for plane in PLANE_TILES:
        yield DepthwiseWay(plane)


def all_kernels() -> Iterator[KernelSpec]:
    """Every kernel instance that a direct way can launch."""
    yield from gather.all_kernels()
    yield from wgrad.all_kernels()
    yield from depthwise.all_kernels()


def moved_bytes(problem: Problem) -> float:
    """What any kernel must read and write: every element of x and of y once."""
    return 4.0 * (prod(problem.x_shape) + prod(problem.y_shape))


def _direct_error(problem: Problem, schedule: Schedule) -> float:
    from .accuracy import error_of

    sums = tuple(max(1, length) for length in schedule.sums)  # a phase without taps sums nothing
    return error_of(problem, None, prod(sums), sums)


@dataclass(frozen=True)
class GatherWay:
    """fprop or dgrad as an implicit GEMM."""

    tile: GemmTile
    loader: LoaderKind
    direct = True

    @property
    def name(self) -> str:
        return gather.kernel(self.tile, self.loader).symbol

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > gather.MOST_GROUPS:
            return f"more than {gather.MOST_GROUPS} groups"
        if self.loader is gather.TAPS_VECTOR and gather.DEPTH * self.tile.m // self.tile.threads < 4:
            return "a thread gathers fewer than four channels"
        return gather.refusal(self.loader, problem, gather.roles(problem))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return gather.launches(problem, self.tile, self.loader)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return _direct_error(problem, self.schedule(problem, sms, workspace))

    def cost_us(self, problem: Problem, device: CudaDevice, workspace: int) -> float:
        r, tile, loader = gather.roles(problem), self.tile, self.loader
        rows = [gather.round_up(h.taps * w.taps * r.channels, gather.DEPTH) for h in r.phases_h for w in r.phases_w]
        biggest = max(h.count * w.count for h in r.phases_h for w in r.phases_w) * problem.batch
        packed_us = LAUNCH_US + 4 * problem.groups * sum(rows) * r.outputs * 4 / (device.dram_gbs * 1e3)
        resident = tile.min_blocks(loader.weight)
        tiles = -(-biggest // tile.m) * -(-r.outputs // tile.n) * problem.groups
        # Pixels are neighbours in memory unless channels are; the packed weights are read in whole lines.
        per_pixel = 2.0 if r.source_strides[1] == 1 else 8 * 1.3 / 32
        work = GemmWork(loader.gather_instructions, lines=tile.m * per_pixel + tile.n / 4)
        folds = 1.5 if loader is gather.FOLDED else 1.0
        steps = folds * sum(rows) / len(rows) / gather.DEPTH
        return packed_us + gemm_us(tile, work, tiles * len(rows), steps, resident, moved_bytes(problem), device)


@dataclass(frozen=True)
class WgradWay:
    """wgrad as an implicit GEMM."""

    tile: GemmTile
    vector: bool
    """Four pixels of dy in one load."""
    bordered: bool
    direct = True

    @property
    def name(self) -> str:
        return self._kernel().symbol

    def _kernel(self) -> KernelSpec:
        return wgrad.kernel(self.tile, self.vector, self.bordered)

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > gather.MOST_GROUPS:
            return f"more than {gather.MOST_GROUPS} groups"
        if self.bordered is not wgrad.bordered(problem):
            return f"cannot read a {problem.padding_mode} border"
        if self.vector and not gather.dense_pixels(problem.y_strides, problem.out_size, problem):
            return "pixels of dy are not dense quads"
        return None

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return wgrad.launches(problem, self.tile, self.vector, sms, workspace)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return _direct_error(problem, self.schedule(problem, sms, workspace))

    def cost_us(self, problem: Problem, device: CudaDevice, workspace: int) -> float:
        tile, spec = self.tile, self._kernel()
        columns, k = wgrad.columns_of(problem) + problem.bias, problem.channels_per_group[1]
        pixels_per_slice, slices = wgrad.slicing(problem, tile, spec.min_blocks, device.sms, workspace)
        blocks = -(-k // tile.m) * -(-columns // tile.n) * problem.groups * slices
        instructions = (6.0 if self.vector else 8.0) + 8.0 * self.bordered
        work = GemmWork(instructions, lines=tile.m + tile.n / 2)
        us = gemm_us(tile, work, blocks, pixels_per_slice / 8, spec.min_blocks, moved_bytes(problem), device)
        return us + LAUNCH_US + memory_us(8.0 * slices * problem.out_channels * columns, device)


@dataclass(frozen=True)
class DepthwiseWay:
    """fprop or dgrad, channel by channel."""

    tile: PlaneTile
    direct = True

    @property
    def name(self) -> str:
        return depthwise.kernel(self.tile).symbol

    def refusal(self, problem: Problem) -> str | None:
        return depthwise.refusal(problem, gather.roles(problem), self.tile)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return depthwise.launches(problem, self.tile, sms)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return _direct_error(problem, self.schedule(problem, sms, workspace))

    def cost_us(self, problem: Problem, device: CudaDevice, workspace: int) -> float:
        r, tile = gather.roles(problem), self.tile
        height, width = depthwise.halo(r.phases_h, tile.height), depthwise.halo(r.phases_w, tile.width)
        phases = len(r.phases_h) * len(r.phases_w)
        blocks = depthwise.tiles_of(r, tile) * phases * problem.batch * problem.groups * r.outputs
        return _plane_us(problem, device, blocks, tile, height * width * r.channels, depthwise.taps_of(r))


@dataclass(frozen=True)
class DepthwiseWgradWay:
    """wgrad, channel by channel."""

    tile: PlaneTile
    taps: int
    """Taps that a block sums at once."""
    direct = True

    @property
    def name(self) -> str:
        return depthwise.wgrad_kernel(self.tile, self.taps).symbol

    def refusal(self, problem: Problem) -> str | None:
        return depthwise.wgrad_refusal(problem, self.tile)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return depthwise.wgrad_launches(problem, self.tile, self.taps, sms, workspace)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return _direct_error(problem, self.schedule(problem, sms, workspace))

    def cost_us(self, problem: Problem, device: CudaDevice, workspace: int) -> float:
        height, width = depthwise.wgrad_halo(problem, self.tile)
        chunks = -(-problem.kernel[0] * problem.kernel[1] // self.taps)
        blocks = problem.batch * depthwise.wgrad_tiles(problem, self.tile) * problem.out_channels
        return chunks * _plane_us(problem, device, blocks, self.tile, height * width, self.taps)


def _plane_us(problem: Problem, device: CudaDevice, blocks: int, tile: PlaneTile, halo: int, taps: int) -> float:
    cycles = blocks * (tile.positions * taps / TAPS_PER_CYCLE + halo / 8 + 200) / device.sms
    # A tile's halo is read by its neighbours too, mostly from L2: count a tenth of it as memory traffic.
    again = 1 + 0.1 * (halo / tile.positions - 1)
    return max(cycles / device.clock_mhz, memory_us(moved_bytes(problem) * again, device)) + LAUNCH_US
