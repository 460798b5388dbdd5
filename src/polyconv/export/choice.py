"""Which kernels an exported file carries: the cheapest for the named sizes, and one that takes whatever else may come.

Sizes and strides are known when the file runs, not when it is written. So every pass gets a list: the way that the cost
model prefers for dense tensors of the named size, then the best direct one, then, if that can refuse too, a general one
on the same tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..plan import gather
from ..plan.cuda import DEFAULT_WORKSPACE
from ..plan.cuda import choose as cheapest
from ..plan.device import CudaDevice
from ..plan.direct import DepthwiseWay, DepthwiseWgradWay, GatherWay, WgradWay
from ..plan.plan import KernelSpec
from ..plan.ways import Way
from ..problem import PaddingMode, Pass, Problem

Ways = dict[Pass, tuple[Way, ...]]


def choose(problems: Iterable[Problem], device: CudaDevice) -> Ways:
    """The ways for the convolutions of one file, each given as its forward problem."""
    best: dict[Pass, list[Way]] = {kind: [] for kind in Pass}
    general: dict[Pass, list[Way]] = {kind: [] for kind in Pass}
    for forward in problems:
        for kind in Pass:
            problem = replace(forward, kind=kind)
            best[kind].append(cheapest(problem, device)[0])
            direct = cheapest(replace(problem, tolerance=0.0), device)[0]
            general[kind] += [direct, *_general(direct)]
    return {kind: tuple(dict.fromkeys(best[kind] + general[kind])) for kind in Pass}


def _general(way: Way) -> list[Way]:
    """What takes over where a way refuses the strides or the sizes of a call."""
    if isinstance(way, GatherWay) and way.loader not in (gather.ROWS_BORDERED, gather.FOLDED):
        return [GatherWay(way.tile, gather.ROWS)]
    if isinstance(way, WgradWay):
        return [WgradWay(way.tile, False, way.bordered)]
    return []


def kernels_of(ways: Ways) -> tuple[KernelSpec, ...]:
    """Every kernel that the ways can launch, each once."""
    found: list[KernelSpec] = []
    for kind, each in ways.items():
        for way in each:
            found += _kernels(way, kind)
    return tuple(dict.fromkeys(found))


def _kernels(way: Way, kind: Pass) -> Iterable[KernelSpec]:
    """Asked of the schedule of a small problem that the way takes: the kernels do not depend on the size."""
    return dict.fromkeys(launch.kernel for launch in way.schedule(_sample(way, kind), 1, DEFAULT_WORKSPACE).launches)


def _sample(way: Way, kind: Pass) -> Problem:
    depthwise = isinstance(way, (DepthwiseWay, DepthwiseWgradWay))
    bordered = isinstance(way, GatherWay) and way.loader in (gather.ROWS_BORDERED, gather.FOLDED)
    bordered = bordered or (isinstance(way, WgradWay) and way.bordered)
    mode = PaddingMode.REFLECT if bordered else PaddingMode.ZEROS
    padding = (1, 1, 1, 1) if bordered else (0, 0, 0, 0)
    groups, w_shape = (8, (8, 1, 1, 1)) if depthwise else (1, (8, 8, 1, 1))
    return Problem.make(kind, (1, 8, 8, 8), w_shape, groups=groups, padding=padding, padding_mode=mode)
