"""Plans for fprop and dgrad of float32 volumes by one scaled FP16 product (kernels/scaled_fp16/halo.cuh).

Blocks, tiles and stores are those of a 2-D problem whose images are the slices of the result, and packed weights those
of ``flattened`` (cuda/planner/implicit_gemm/ndhwc.py). Volumes may have any strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod

from ....problem import Pass, Problem
from ....util.intmath import ceil_div, round_up
from ..implicit_gemm.fprop_dgrad import roles
from ..implicit_gemm.fprop_dgrad_nhwc import COPIED
from ..implicit_gemm.ndhwc import depth_of_gemm, flattened, of_slices, why_not_below
from ..kernel_params import declared, with_fields
from ..plan import KernelSpec, Launch, Task
from .halo import DEPTH, TILES, HaloCandidate
from .operand import w_of

RANK = 3
"""Axes of the problems."""


@lru_cache(maxsize=1024)
def _slices(problem: Problem) -> Problem:
    """The 2-D problem under one slice of the kernel, with the slices of the result as images."""
    aligned = problem.batch == 1 or not (problem.x_strides[0] | problem.y_strides[0]) % 4
    return replace(
        problem.across(0),
        batch=problem.batch * _result(problem)[0],
        x_strides=of_slices(problem.x_strides),
        y_strides=of_slices(problem.y_strides),
        vector_aligned=problem.vector_aligned and aligned,
    )


def _result(problem: Problem) -> tuple[int, int, int]:
    """Slices of a volume of the result, and the strides of volumes and slices."""
    forward = problem.kind is Pass.FPROP
    size, strides = (problem.out_size, problem.y_strides) if forward else (problem.in_size, problem.x_strides)
    return size[0], strides[0], strides[2]


@lru_cache(maxsize=1024)
def _inside(problem: Problem) -> float:
    """Slices of the kernel that read inside of the source, on average over the slices of the result."""
    depth, slices = depth_of_gemm(problem), _result(problem)[0]
    first = (depth["read_first_d"] + at * depth["read_step_d"] for at in range(slices))
    taps = range(problem.kernel[0])
    return sum(0 <= z + tap * depth["tap_step_d"] < depth["source_depth"] for z in first for tap in taps) / slices


class HaloVolumeCandidate(HaloCandidate):
    """fprop, or dgrad with stride 1, of float32 volumes."""

    struct = declared("scaled_fp16/halo", "ScaledHaloVolumeParams")
    prefix = "scaled_fp16_halo_volume"

    def refusal(self, problem: Problem) -> str | None:
        refused = why_not_below(problem) or super().refusal(_slices(problem))
        return refused or w_of(flattened(problem), 1).refusal

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        return super().sums(flattened(problem), sms, workspace)

    @staticmethod
    def _of_weights(problem: Problem) -> Problem:
        return flattened(problem)

    def _halo_task(self, problem: Problem) -> Task:
        """A tile is a halo of 32 channels, which each slice of the kernel reads."""
        slices, inside = _slices(problem), _inside(problem)
        task, r = super()._halo_task(slices), roles(slices)
        work, parts = task.work, ceil_div(r.channels, DEPTH)
        read = prod(problem.x_shape if problem.kind is Pass.FPROP else problem.y_shape)
        read -= slices.batch * problem.groups * r.channels * prod(r.source_size)
        packed = work.steps // work.blocks * DEPTH * round_up(r.outputs, self.tile.n) * problem.groups
        work = replace(
            work,
            tiles=max(work.blocks, int(work.blocks * parts * inside)),
            steps=int(work.steps * inside),
            dram_bytes=work.dram_bytes + 4 * read + 2 * packed * (problem.kernel[0] - 1),
            scattered_lines=int(work.scattered_lines * inside),
            scattered_sectors=int(work.scattered_sectors * inside),
        )
        return replace(task, work=work)

    def _halo(
        self, problem: Problem, task: Task, rows: int, packed: tuple[str, int], exponent: tuple[str, int]
    ) -> Launch:
        fields = depth_of_gemm(problem)
        del fields["rows_of_slice"]
        number, volume, depth = _result(problem)
        fields |= {"next_volume": volume - number * depth, "taps_d": problem.kernel[0]}
        return with_fields(super()._halo(_slices(problem), task, rows, packed, exponent), fields)


CANDIDATES = tuple(HaloVolumeCandidate(tile, COPIED) for tile in TILES)


def candidates(problem: Problem) -> Iterator[HaloVolumeCandidate]:
    """Every tile, refused or not; none for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from CANDIDATES


def all_kernels() -> Iterator[KernelSpec]:
    yield from (candidate.kernel for candidate in CANDIDATES)
