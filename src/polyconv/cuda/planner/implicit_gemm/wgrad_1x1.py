"""Plans for wgrad of pointwise convolutions over dense pixels (kernels/implicit_gemm/wgrad_1x1.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....problem import Pass, Problem
from ....util.cached import cached_property
from ..candidate import CudaCandidate
from ..plan import KernelSpec
from .fprop_dgrad import MOST_GROUPS, dense_pixels
from .tiles import SMALL, SQUARE, TALL, WIDE
from .wgrad import PixelGemm, WgradCandidate, WgradParams

TILES = (SQUARE, WIDE, TALL, SMALL)
LEAST_PIXELS = 8
"""Fewest pixels per image: a step of the sum crosses at most one image boundary."""


@dataclass(frozen=True)
class Wgrad1x1Candidate(PixelGemm):
    """wgrad as a GEMM whose operands are rows of dense pixels."""

    @cached_property
    def kernel(self) -> KernelSpec:
        return KernelSpec.of(
            WgradParams,
            "implicit_gemm/wgrad_1x1",
            self.tile,
            symbol=f"implicit_gemm_wgrad_1x1_{self.tile.name}",
            threads=self.tile.threads,
            min_blocks=self.tile.min_blocks(weight=0),
            facts=self.tile.facts,
        )

    @cached_property
    def resident(self) -> int:
        """That of the general kernel, which this one replaces."""
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


CANDIDATES = tuple(map(Wgrad1x1Candidate, TILES))


def candidates(problem: Problem) -> Iterator[CudaCandidate]:
    """Every tile; only for the weight gradient of 1x1 kernels."""
    if problem.kind is Pass.WGRAD and problem.kernel == (1, 1):
        yield from CANDIDATES


def all_kernels() -> Iterator[KernelSpec]:
    yield from (candidate.kernel for candidate in CANDIDATES)
