"""The ways to compute a pass, with everything but the tensors settled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..plan import depthwise, gather, wgrad
from ..plan.cuda import DEFAULT_WORKSPACE
from ..plan.gather import LoaderKind
from ..plan.plan import Schedule
from ..plan.tiles import GemmTile, PlaneTile
from ..problem import Problem


class Way(Protocol):
    """One kernel with its template arguments."""

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot compute this problem, or None."""

    def schedule(self, problem: Problem, sms: int) -> Schedule:
        """The launches, for a device of ``sms`` multiprocessors."""


@dataclass(frozen=True)
class GatherWay:
    """fprop or dgrad as an implicit GEMM."""

    tile: GemmTile
    loader: LoaderKind

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > gather.MOST_GROUPS:
            return f"more than {gather.MOST_GROUPS} groups"
        return gather.refusal(self.loader, problem, gather.roles(problem))

    def schedule(self, problem: Problem, sms: int) -> Schedule:
        return gather.launches(problem, self.tile, self.loader)


@dataclass(frozen=True)
class WgradWay:
    """wgrad as an implicit GEMM."""

    tile: GemmTile
    vector: bool
    """Four pixels of dy in one load."""
    bordered: bool

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > gather.MOST_GROUPS:
            return f"more than {gather.MOST_GROUPS} groups"
        if self.bordered is not wgrad.bordered(problem):
            return f"cannot read a {problem.padding_mode} border"
        if self.vector and not gather.dense_pixels(problem.y_strides, problem.out_size, problem):
            return "pixels of dy are not dense quads"
        return None

    def schedule(self, problem: Problem, sms: int) -> Schedule:
        return wgrad.launches(problem, self.tile, self.vector, sms, DEFAULT_WORKSPACE)


@dataclass(frozen=True)
class DepthwiseWay:
    """fprop or dgrad, channel by channel."""

    tile: PlaneTile

    def refusal(self, problem: Problem) -> str | None:
        return depthwise.refusal(problem, gather.roles(problem), self.tile)

    def schedule(self, problem: Problem, sms: int) -> Schedule:
        return depthwise.launches(problem, self.tile, sms)


@dataclass(frozen=True)
class DepthwiseWgradWay:
    """wgrad, channel by channel."""

    tile: PlaneTile
    taps: int
    """Taps that a block sums at once."""

    def refusal(self, problem: Problem) -> str | None:
        return depthwise.wgrad_refusal(problem, self.tile)

    def schedule(self, problem: Problem, sms: int) -> Schedule:
        return depthwise.wgrad_launches(problem, self.tile, self.taps, sms, DEFAULT_WORKSPACE)
