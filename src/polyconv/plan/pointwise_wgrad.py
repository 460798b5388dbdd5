"""Plans for the weight gradient of pointwise convolutions over dense pixels (kernels/pointwise_wgrad.cuh)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..accuracy import direct_error
from ..problem import Pass, Problem
from . import gather, wgrad
from .candidates import CudaCandidate
from .layout import WgradParams
from .plan import KernelSpec, Schedule, Task
from .tiles import SMALL, SQUARE, TALL, WIDE, GemmTile

TILES = (SQUARE, WIDE, TALL, SMALL)
LEAST_PIXELS = 8
"""Of one image: a step of the sum must not pass over a whole one."""


@dataclass(frozen=True)
class PointwiseWgradCandidate:
    """The weight gradient as a GEMM whose operands are rows of dense pixels."""

    tile: GemmTile
    direct = True

    @property
    def name(self) -> str:
        return self.kernel.symbol

    @cached_property
    def kernel(self) -> KernelSpec:
        return KernelSpec(
            stem="pointwise_wgrad",
            symbol=f"pointwise_wgrad_{self.tile.name}",
            body=f"polyconv::pointwise_wgrad<{self.tile.cpp}>(params);",
            params="polyconv::WgradParams",
            params_bytes=ctypes.sizeof(WgradParams),
            threads=self.tile.threads,
            min_blocks=self.tile.min_blocks(weight=0),
        )

    def refusal(self, problem: Problem) -> str | None:
        if problem.kernel != (1, 1) or problem.stride != (1, 1) or any(problem.padding):
            return "not pointwise"
        if problem.groups > gather.MOST_GROUPS:
            return f"more than {gather.MOST_GROUPS} groups"
        size = problem.in_size
        if not all(gather.dense_pixels(strides, size, problem) for strides in (problem.x_strides, problem.y_strides)):
            return "pixels of x or of dy are not dense quads"
        if size[0] * size[1] < LEAST_PIXELS:
            return f"images of fewer than {LEAST_PIXELS} pixels"
        return None

    def cut(self, problem: Problem, sms: int, workspace: int) -> wgrad.WgradCut:
        """As for the general kernel, in whose place this one runs."""
        resident = wgrad.kernel(self.tile, True, False).min_blocks
        return wgrad.cut(problem, self.tile, resident, sms, workspace)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        return wgrad.tasks(problem, self.kernel, self.cut(problem, sms, workspace))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return wgrad.launches(problem, self.kernel, self.cut(problem, sms, workspace))

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return direct_error(problem, wgrad.sums(problem, self.cut(problem, sms, workspace)))


CANDIDATES = tuple(map(PointwiseWgradCandidate, TILES))


def candidates(problem: Problem) -> Iterator[CudaCandidate]:
    """Every tile; only for the weight gradient of kernels of one tap."""
    if problem.kind is Pass.WGRAD and problem.kernel == (1, 1):
        yield from CANDIDATES


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    yield from (way.kernel for way in CANDIDATES)
