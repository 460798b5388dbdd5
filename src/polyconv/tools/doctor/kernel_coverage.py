"""Small convolutions that together launch every kernel of every family."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ...cuda.planner.candidate import CudaCandidate
from ...cuda.planner.cost import tasks_us, why_not_on
from ...cuda.planner.depthwise import line, strip
from ...cuda.planner.device import CudaDevice
from ...cuda.planner.plan import KernelSpec, Plan, Task
from ...cuda.planner.planner import DEFAULT_WORKSPACE, FAMILIES, all_kernels, candidates, family_name, plan_within
from ...problem import HALF_DTYPES, Extents, Pass, Problem, Shape, Sides, channels_last_strides
from ...selection import PlanError
from .device_under_test import GpuUnderTest


@dataclass(frozen=True, slots=True)
class Case:
    """A convolution with a bias."""

    x: Shape
    w: Shape
    padding: Sides = (0, 0, 0, 0)
    stride: Extents = (1, 1)
    dilation: Extents = (1, 1)
    groups: int = 1
    padding_mode: str = "zeros"
    channels_last: bool = False
    activation: str = "none"
    residual: bool = False

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Only the forward pass has an epilogue; gradients would repeat those of the plain convolution."""
        return (Pass.FPROP,) if self.residual or self.activation != "none" else tuple(Pass)

    def problem(self, kind: Pass, larger: int = 1) -> Problem:
        """One pass, with the input's extents multiplied by ``larger``. The input gradient has no bias."""
        n, c, *size = self.x
        arguments: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("padding", "stride", "dilation", "groups", "padding_mode", "activation", "residual")
        }
        problem = Problem.make(
            kind, (n, c, *(extent * larger for extent in size)), self.w, bias=kind is not Pass.DGRAD, **arguments
        )
        if not self.channels_last:
            return problem
        strides = channels_last_strides
        return replace(problem, x_strides=strides(problem.x_shape), y_strides=strides(problem.y_shape))


CASES = {
    "3x3": Case((1, 16, 12, 14), (32, 16, 3, 3), padding=(1, 1, 1, 1)),
    "5x9": Case((1, 8, 14, 22), (16, 8, 5, 9)),
    "5x9, dilated": Case((1, 8, 17, 33), (16, 8, 5, 9), padding=(2, 2, 4, 4), dilation=(2, 3)),
    "3x3, strided": Case((2, 8, 13, 15), (16, 8, 3, 3), padding=(1, 1, 1, 1), stride=(2, 2)),
    "1x1": Case((1, 32, 8, 12), (32, 32, 1, 1)),
    "3x3, groups": Case((1, 12, 9, 11), (8, 6, 3, 3), padding=(1, 1, 1, 1), groups=2),
    "3x3, depthwise": Case((2, 8, 14, 17), (8, 1, 3, 3), padding=(1, 1, 1, 1), groups=8),
    "5x3, depthwise, dilated": Case((1, 6, 15, 12), (12, 1, 5, 3), padding=(2, 3, 1, 0), dilation=(2, 1), groups=6),
    "3x4, reflected border": Case((1, 5, 8, 9), (6, 5, 3, 4), padding=(2, 1, 3, 2), padding_mode="reflect"),
    "3x3, channels last": Case((1, 16, 11, 10), (16, 16, 3, 3), padding=(1, 1, 1, 1), channels_last=True),
    "3x3, residual and relu": Case((1, 16, 9, 12), (16, 16, 3, 3), (1, 1, 1, 1), activation="relu", residual=True),
    "3x3, depthwise, silu": Case((1, 8, 10, 13), (8, 1, 3, 3), (1, 1, 1, 1), groups=8, activation="silu"),
}


def problems(larger: int = 1) -> dict[str, Problem]:
    return {f"{name}, {kind}": case.problem(kind, larger) for name, case in CASES.items() for kind in case.passes}


def family_plans(problem: Problem, device: CudaDevice) -> Iterator[tuple[str, Plan]]:
    """Best plan of each family that supports a problem within its tolerance."""
    for family in FAMILIES:
        with contextlib.suppress(PlanError):
            yield family_name(family), plan_within((family,), problem, device)


_ONES = (1, 1, 1)
VOLUME = "3x3x3, channels last", Case((2, 16, 4, 6, 5), (24, 16, 3, 3, 3), 2 * _ONES, _ONES, _ONES, channels_last=True)

QUICKLY = 2
"""Ways per family in a quick run."""
TAPS_H, TAPS_W = (1, 3, 5, 9, 13), (3, 5, 9, 13)
"""Taps per axis for which a fast weight gradient exists."""


@dataclass(frozen=True, slots=True)
class Way:
    """A small problem with one candidate forced, whether or not the planner would choose it."""

    name: str
    problem: Problem
    candidate: CudaCandidate
    tasks: tuple[Task, ...]

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        return tuple(dict.fromkeys(task.kernel for task in self.tasks))

    @property
    def family(self) -> str:
        """Name of the candidate's planner module."""
        return type(self.candidate).__module__.rpartition(".")[2]

    def why_not_on(self, device: CudaDevice) -> str:
        """Reason why a device cannot run it; empty if it can."""
        return why_not_on(self.tasks, device) or ""

    def plan(self, device: CudaDevice) -> Plan:
        schedule = self.candidate.schedule(self.problem, device.sms, DEFAULT_WORKSPACE)
        return Plan(
            self.problem,
            device.name,
            self.candidate.name,
            schedule.launches,
            schedule.workspace_bytes,
            self.candidate.error(self.problem, device.sms, DEFAULT_WORKSPACE),
            tasks_us(self.tasks, device),
            (),
        )


def ways(device: CudaDevice) -> dict[str, Way]:
    """For every kernel that the device runs, by symbol, the first way found that launches it."""
    wanted = {kernel.symbol for kernel in all_kernels(device.arch)}
    found: dict[str, Way] = {}
    for name, problem in all_problems():
        for candidate in candidates(problem, FAMILIES):
            if candidate.refusal(problem) is None:
                way = Way(name, problem, candidate, tuple(candidate.tasks(problem, device.sms, DEFAULT_WORKSPACE)))
                if all(kernel.runs_on(device.arch) for kernel in way.kernels):
                    for kernel in way.kernels:
                        found.setdefault(kernel.symbol, way)
        if found.keys() == wanted:
            break
    return found


def fewest(found: dict[str, Way]) -> dict[str, Way]:
    """Subset of the ways that still launches all kernels, chosen greedily."""
    covered: set[str] = set()
    kept: dict[str, Way] = {}
    # Kernels that many ways launch are covered by other ways: start with ways recorded for a single kernel.
    for symbol, way in sorted(found.items(), key=lambda item: sum(item[1] is other for other in found.values())):
        if symbol not in covered:
            kept[symbol] = way
            covered |= {kernel.symbol for kernel in way.kernels}
    return dict(sorted(kept.items()))


def selected(subject: GpuUnderTest) -> dict[str, Way]:
    """Ways that launch every kernel or, in a quick run, :data:`QUICKLY` of each family."""
    families: dict[str, list[str]] = {}
    found = fewest(ways(subject.description))
    for symbol, way in found.items():
        families.setdefault(way.family, []).append(symbol)
    return {symbol: found[symbol] for members in families.values() for symbol in subject.some(members, QUICKLY)}


def all_problems() -> Iterator[tuple[str, Problem]]:
    """Self-test problems, then those that the remaining kernels need, then problems in half precision."""
    for name, case in (*CASES.items(), *_more(), VOLUME):
        for kind in case.passes:
            yield f"{name}, {kind}", case.problem(kind)
    for dtype, (name, case) in product(HALF_DTYPES, (*CASES.items(), *_depthwise(), *_lines(), VOLUME)):
        for kind in case.passes:
            yield f"{name}, {kind}, {dtype}", replace(case.problem(kind), dtype=dtype)


def _lines() -> Iterator[tuple[str, Case]]:
    for taps in line.TAPS:
        yield f"1x{taps}, depthwise, causal", Case((1, 3, 2, 70), (3, 1, 1, taps), (0, 0, taps - 1, 0), groups=3)


def _depthwise() -> Iterator[tuple[str, Case]]:
    for (lanes, stride), kernels in strip.KERNELS.items():
        for taps in kernels:
            last = lanes == strip.CHANNELS
            case = Case(
                (1, 32 if last else 3, 14, 17),
                (32 if last else 3, 1, *taps),
                padding=_same(*taps),
                stride=(stride, stride),
                groups=32 if last else 3,
                channels_last=last,
            )
            yield f"{taps[0]}x{taps[1]}, depthwise, stride {stride}" + ", channels last" * last, case


def _more() -> Iterator[tuple[str, Case]]:
    for name, case in _depthwise():
        yield name, case
        yield f"{name}, relu", replace(case, activation="relu")
    for name in ("1x1", "5x9", "3x4, reflected border", "3x3, channels last"):
        yield f"{name}, relu", replace(CASES[name], activation="relu")
    yield "3x3, replicated border", Case((1, 8, 8, 12), (8, 8, 3, 3), _same(3, 3), padding_mode="replicate")
    for h, w in product(TAPS_H, TAPS_W):
        yield f"{h}x{w}, same", Case((1, 16, h + 6, w + 9), (32, 16, h, w), padding=_same(h, w))
    for h, w in product((1, 5, 9), (5, 9)):
        yield f"{h}x{w}, stride 2", Case((1, 8, h + 9, w + 13), (32, 8, h, w), padding=_same(h, w), stride=(2, 2))


def _same(h: int, w: int) -> Sides:
    return (h // 2, h // 2, w // 2, w // 2)
