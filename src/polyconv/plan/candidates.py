"""Every way to solve a problem on a GPU, with its modelled cost or the reason why it cannot run.

The kernels' own modules (gather, wgrad, depthwise) know how to launch; here is only what it would cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ..problem import Problem
from . import depthwise, gather, wgrad
from .cost import LAUNCH_US, GemmWork, gemm_us, memory_us
from .device import CudaDevice
from .plan import Candidate
from .tiles import GATHER_TILES, PLANE_TILES, WGRAD_TAPS, WGRAD_TILES, GemmTile, PlaneTile

TAPS_PER_CYCLE = 12.0
"""Taps that a multiprocessor multiplies per cycle in a depthwise kernel: each needs a word of shared memory."""


def moved_bytes(problem: Problem) -> float:
    """What any kernel must read and write: every element of x and of y once."""
    return 4.0 * (prod(problem.x_shape) + prod(problem.y_shape))


def gather_candidates(problem: Problem, device: CudaDevice) -> Iterator[tuple[Candidate, GemmTile, gather.LoaderKind]]:
    """Every tile with every loader: its modelled cost, or the reason why it cannot run."""
    r = gather.roles(problem)
    too_many = f"more than {gather.MOST_GROUPS} groups" if problem.groups > gather.MOST_GROUPS else None
    pixels = problem.batch * sum(h.count * w.count for h in r.phases_h for w in r.phases_w)
    rows = [gather.round_up(h.taps * w.taps * r.channels, gather.DEPTH) for h in r.phases_h for w in r.phases_w]
    biggest = max(h.count * w.count for h in r.phases_h for w in r.phases_w) * problem.batch
    packed_us = LAUNCH_US + 4 * problem.groups * sum(rows) * r.outputs * 4 / (device.dram_gbs * 1e3)
    for loader in gather.LOADERS:
        reason = too_many or gather.refusal(loader, problem, r)
        for tile in GATHER_TILES:
            name = gather.kernel(tile, loader).symbol
            why = reason
            if loader is gather.TAPS_VECTOR and gather.DEPTH * tile.m // tile.threads < 4 and not why:
                why = "a thread gathers fewer than four channels"
            if why:
                yield Candidate(name, rejected=why), tile, loader
                continue
            resident = tile.min_blocks(loader.weight)
            tiles = -(-biggest // tile.m) * -(-r.outputs // tile.n) * problem.groups
            # Pixels are neighbours in memory unless channels are; the packed weights are read in whole lines.
            per_pixel = 2.0 if r.source_strides[1] == 1 else 8 * 1.3 / 32
            work = GemmWork(loader.gather_instructions, lines=tile.m * per_pixel + tile.n / 4)
            folds = 1.5 if loader is gather.FOLDED else 1.0
            steps = folds * sum(rows) / len(rows) / gather.DEPTH
            us = gemm_us(tile, work, tiles * len(rows), steps, resident, moved_bytes(problem), device)
            waste = tiles * tile.m * tile.n * len(rows) / (pixels * r.outputs * problem.groups)
            yield Candidate(name, us + packed_us, note=f"{waste:.2f}x the multiplications asked for"), tile, loader


def wgrad_candidates(
    problem: Problem, device: CudaDevice, workspace: int
) -> Iterator[tuple[Candidate, GemmTile, bool]]:
    """Every tile, with and without vector loads of dy: its modelled cost, or the reason why it cannot run."""
    dense = gather.dense_pixels(problem.y_strides, problem.out_size, problem)
    columns, k = wgrad.columns_of(problem) + problem.bias, problem.channels_per_group[1]
    for tile in WGRAD_TILES:
        for vector in (True, False):
            spec = wgrad.kernel(tile, vector, wgrad.bordered(problem))
            if problem.groups > gather.MOST_GROUPS:
                yield Candidate(spec.symbol, rejected=f"more than {gather.MOST_GROUPS} groups"), tile, vector
                continue
            if vector and not dense:
                yield Candidate(spec.symbol, rejected="pixels of dy are not dense quads"), tile, vector
                continue
            pixels_per_slice, slices = wgrad.slicing(problem, tile, spec.min_blocks, device.sms, workspace)
            blocks = -(-k // tile.m) * -(-columns // tile.n) * problem.groups * slices
            instructions = (6.0 if vector else 8.0) + 8.0 * wgrad.bordered(problem)
            work = GemmWork(instructions, lines=tile.m + tile.n / 2)
            us = gemm_us(tile, work, blocks, pixels_per_slice / 8, spec.min_blocks, moved_bytes(problem), device)
            us += LAUNCH_US + memory_us(8.0 * slices * problem.out_channels * columns, device)
            yield Candidate(spec.symbol, us, note=f"{slices} slices of {pixels_per_slice} pixels"), tile, vector


def depthwise_candidates(problem: Problem, device: CudaDevice) -> Iterator[tuple[Candidate, PlaneTile]]:
    """Every tile for fprop or dgrad: its modelled cost, or the reason why it cannot run."""
    r = gather.roles(problem)
    for tile in PLANE_TILES:
        name = depthwise.kernel(tile).symbol
        reason = depthwise.refusal(problem, r, tile)
        if reason:
            yield Candidate(name, rejected=reason), tile
            continue
        height, width = depthwise.halo(r.phases_h, tile.height), depthwise.halo(r.phases_w, tile.width)
        blocks = (
            depthwise.tiles_of(r, tile) * len(r.phases_h) * len(r.phases_w) * problem.batch * problem.groups * r.outputs
        )
        us = _plane_us(problem, device, blocks, tile, height * width * r.channels, depthwise.taps_of(r))
        yield Candidate(name, us), tile


def depthwise_wgrad_candidates(problem: Problem, device: CudaDevice) -> Iterator[tuple[Candidate, PlaneTile, int]]:
    """Every tile and chunk of taps: its modelled cost, or the reason why it cannot run."""
    area = problem.kernel[0] * problem.kernel[1]
    for tile in PLANE_TILES:
        reason = depthwise.wgrad_refusal(problem, tile)
        for taps in WGRAD_TAPS:
            name = depthwise.wgrad_kernel(tile, taps).symbol
            if reason:
                yield Candidate(name, rejected=reason), tile, taps
                continue
            height, width = depthwise.wgrad_halo(problem, tile)
            chunks = -(-area // taps)
            blocks = problem.batch * depthwise.wgrad_tiles(problem, tile) * problem.out_channels
            us = chunks * _plane_us(problem, device, blocks, tile, height * width, taps)
            yield Candidate(name, us), tile, taps


def _plane_us(problem: Problem, device: CudaDevice, blocks: int, tile: PlaneTile, halo: int, taps: int) -> float:
    cycles = blocks * (tile.positions * taps / TAPS_PER_CYCLE + halo / 8 + 200) / device.sms
    # A tile's halo is read by its neighbours too, mostly from L2: count a tenth of it as memory traffic.
    again = 1 + 0.1 * (halo / tile.positions - 1)
    return max(cycles / device.clock_mhz, memory_us(moved_bytes(problem) * again, device)) + LAUNCH_US
