"""The ways that sum the products of the definition: implicit GEMMs, and channel by channel for depthwise problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..accuracy import direct_error
from ..problem import Pass, Problem
from . import depthwise, gather, wgrad
from .gather import LoaderKind
from .plan import KernelSpec, Schedule, Task
from .tiles import GATHER_TILES, PLANE_TILES, WGRAD_TAPS, WGRAD_TILES, GemmTile, PlaneTile
from .ways import Way


def all_kernels() -> Iterator[KernelSpec]:
    """Every kernel instance that a direct way can launch."""
    yield from gather.all_kernels()
    yield from wgrad.all_kernels()
    yield from depthwise.all_kernels()


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
        return gather.refusal(self.tile, self.loader, problem, gather.roles(problem))

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        return gather.tasks(problem, self.tile, self.loader)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return gather.launches(problem, self.tile, self.loader)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return direct_error(problem, gather.sums(problem, self.loader))


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
        return self._kernel.symbol

    @property
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

    def cut(self, problem: Problem, sms: int, workspace: int) -> wgrad.WgradCut:
        return wgrad.cut(problem, self.tile, self._kernel.min_blocks, sms, workspace)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        return wgrad.tasks(problem, self._kernel, self.cut(problem, sms, workspace))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return wgrad.launches(problem, self._kernel, self.cut(problem, sms, workspace))

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return direct_error(problem, wgrad.sums(problem, self.cut(problem, sms, workspace)))


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

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        yield depthwise.task(problem, self.tile, sms)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return depthwise.launches(problem, self.tile, sms)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return direct_error(problem, depthwise.sums(problem))


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

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        return depthwise.wgrad_tasks(problem, depthwise.wgrad_cut(problem, self.tile, self.taps, sms, workspace))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return depthwise.wgrad_launches(problem, depthwise.wgrad_cut(problem, self.tile, self.taps, sms, workspace))

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return direct_error(problem, depthwise.wgrad_cut(problem, self.tile, self.taps, sms, workspace).sums)


FORWARD: tuple[Way, ...] = (
    *(GatherWay(tile, loader) for loader in gather.LOADERS for tile in GATHER_TILES),
    *map(DepthwiseWay, PLANE_TILES),
)
"""Of the forward pass and the input gradient."""
GRADIENTS: dict[bool, tuple[Way, ...]] = {
    bordered: (
        *(WgradWay(tile, vector, bordered) for tile in WGRAD_TILES for vector in (True, False)),
        *(DepthwiseWgradWay(plane, taps) for plane in PLANE_TILES for taps in WGRAD_TAPS),
    )
    for bordered in (False, True)
}
"""Of the weight gradient, without and with a border of image values."""


def ways(problem: Problem) -> Iterator[Way]:
    """Every direct way to compute the problem's pass, whether it takes this problem or not."""
    yield from GRADIENTS[wgrad.bordered(problem)] if problem.kind is Pass.WGRAD else FORWARD
