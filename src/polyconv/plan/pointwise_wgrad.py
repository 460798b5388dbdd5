"""Plans for the weight gradient of pointwise convolutions over dense pixels (kernels/pointwise_wgrad.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ..problem import Pass, Problem
from .candidates import CudaCandidate
from .gather import MOST_GROUPS, dense_pixels
from .layout import WgradParams
from .plan import KernelSpec
from .tiles import SMALL, SQUARE, TALL, WIDE
from .wgrad import PixelGemm, WgradCandidate

TILES = (SQUARE, WIDE, TALL, SMALL)
LEAST_PIXELS = 8
"""Of one image: a step of the sum must not pass over a whole one."""


@dataclass(frozen=True)
class PointwiseWgradCandidate(PixelGemm):
    """The weight gradient as a GEMM whose operands are rows of dense pixels."""

    @cached_property
    def kernel(self) -> KernelSpec:
        return KernelSpec.of(
            WgradParams,
            "pointwise_wgrad",
            self.tile,
            symbol=f"pointwise_wgrad_{self.tile.name}",
            threads=self.tile.threads,
            min_blocks=self.tile.min_blocks(weight=0),
            facts=self.tile.facts,
        )

    @cached_property
    def resident(self) -> int:
        """As of the general kernel, in whose place this one runs."""
        return WgradCandidate(self.tile, vector=True, bordered=False).resident

    def refusal(self, problem: Problem) -> str | None:
        if problem.kernel != (1, 1) or problem.stride != (1, 1) or any(problem.padding):
            return "not pointwise"
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        size = problem.in_size
        if not all(dense_pixels(strides, size, problem) for strides in (problem.x_strides, problem.y_strides)):
            return "pixels of x or of dy are not dense quads"
        if size[0] * size[1] < LEAST_PIXELS:
            return f"images of fewer than {LEAST_PIXELS} pixels"
        return None


CANDIDATES = tuple(map(PointwiseWgradCandidate, TILES))


def candidates(problem: Problem) -> Iterator[CudaCandidate]:
    """Every tile; only for the weight gradient of kernels of one tap."""
    if problem.kind is Pass.WGRAD and problem.kernel == (1, 1):
        yield from CANDIDATES


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    yield from (candidate.kernel for candidate in CANDIDATES)
