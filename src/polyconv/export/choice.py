"""Which kernels an exported file carries: the cheapest for the named sizes, and one that takes whatever else may come.

Sizes and strides are known when the file runs, not when it is written. So every pass gets a list: the way that the cost
model prefers for dense tensors of the named size, then the best direct one, then the best of the kernels that take any
strides, then, if that can refuse too, a general one on the same tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..plan import gather
from ..plan.candidates import CudaCandidate
from ..plan.cuda import DEFAULT_WORKSPACE, GENERAL
from ..plan.cuda import choose as cheapest
from ..plan.device import CudaDevice
from ..plan.gather import GatherCandidate
from ..plan.plan import KernelSpec
from ..plan.wgrad import WgradCandidate
from ..problem import Pass, Problem
from .within import Launcher, Within, summed


@dataclass(frozen=True)
class Choice:
    """What an exported file carries."""

    ways: dict[Pass, tuple[Launcher, ...]]
    """By pass, in order of preference."""
    kernels: tuple[KernelSpec, ...]
    """Every kernel that they launch, each once."""


def choose(problems: Iterable[Problem], device: CudaDevice) -> Choice:
    """The ways for the convolutions of one file, each given as its forward problem."""
    best: dict[Pass, list[Launcher]] = {kind: [] for kind in Pass}
    general: dict[Pass, list[Launcher]] = {kind: [] for kind in Pass}
    kernels: dict[KernelSpec, None] = {}
    for forward in problems:
        for kind in Pass:
            problem = replace(forward, kind=kind)
            chosen = _bounded(cheapest(problem, device).chosen, problem)
            any_tolerance = replace(problem, tolerance=0.0)
            any_strides = cheapest(any_tolerance, device, families=GENERAL).chosen
            others = [cheapest(any_tolerance, device).chosen, any_strides, *_general(any_strides)]
            best[kind].append(chosen)
            general[kind] += others
            for way in (chosen, *others):
                # The kernels of a way do not depend on the sizes, so those of this problem are all.
                schedule = way.schedule(problem, device.sms, DEFAULT_WORKSPACE)
                kernels.update(dict.fromkeys(launch.kernel for launch in schedule.launches))
    return Choice({kind: tuple(dict.fromkeys(best[kind] + general[kind])) for kind in Pass}, tuple(kernels))


def _bounded(way: CudaCandidate, problem: Problem) -> Launcher:
    if way.direct:
        return way
    return Within(way, problem.kernel, problem.stride, problem.dilation, summed(problem))


def _general(way: CudaCandidate) -> list[CudaCandidate]:
    """What takes over where a way refuses the strides or the sizes of a call."""
    if isinstance(way, GatherCandidate) and way.loader not in (gather.ROWS_BORDERED, gather.FOLDED):
        return [GatherCandidate(way.tile, gather.ROWS)]
    if isinstance(way, WgradCandidate):
        return [WgradCandidate(way.tile, False, way.bordered)]
    return []
