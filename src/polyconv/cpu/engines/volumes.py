"""3-D convolutions as sums of 2-D problems (:mod:`polyconv.lowering.volume_sum`), each by its best engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from ...backend import Run
from ...lowering.volume import Plan2d, VolumePlan, planned_parts, scattered_bytes
from ...lowering.volume_sum import NAME as FORM
from ...lowering.volume_sum import VolumeSum, volume_sum
from ...problem import Pass, Problem
from ..device import CpuDevice
from ..plan import CpuCandidate
from ..weight_cache import TransformedWeights

NAME = "volumes"

ADDED_CYCLES = {Pass.FPROP: 10.0, Pass.DGRAD: 20.0, Pass.WGRAD: 20.0}
"""Cycles per vector of an addend: a forward kernel reads it once more; a gradient is written, read and added."""

LINE_BYTES = 64
SCATTERED_CYCLES = 0.4
"""Cycles per byte of cache lines of which one element is used, as in slices across the width."""

DOUBT = 1.1
"""Required advantage over ATen's estimate, since few of ATen's 3-D convolutions were measured."""


class SlicePlan(Plan2d, Protocol):
    """A plan for the 2-D problem of a slice."""

    @property
    def chosen(self) -> CpuCandidate: ...
    def prepared(self, weights: TransformedWeights | None) -> Run: ...


class VolumeCandidate(CpuCandidate):
    """A sum of slices, with the plans of its 2-D problems."""

    __slots__ = ("plan", "volume_sum")

    def __init__(self, volume_sum: VolumeSum, plan: VolumePlan[SlicePlan], cycles: float) -> None:
        direct = all(part.chosen.direct for part in plan.plans.values())
        super().__init__(NAME, FORM, direct=direct, cycles=cycles, error=lambda: plan.predicted_error)
        self.volume_sum = volume_sum
        self.plan = plan


def candidates(
    problem: Problem, device: CpuDevice, plan_2d: Callable[[Problem], SlicePlan]
) -> Iterator[VolumeCandidate]:
    """The single candidate. It bypasses the weight cache, which holds a weight's transform for one problem only."""
    found = volume_sum(problem)
    plan = planned_parts(found, plan_2d)
    added = ADDED_CYCLES[problem.kind] * sum(found.addends) / device.lanes
    scattered = SCATTERED_CYCLES * sum(plan.times(each) * scattered_bytes(each, LINE_BYTES) for each in plan.plans)
    yield VolumeCandidate(found, plan, DOUBT * (plan.parts_cost + added + scattered))


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    assert isinstance(chosen, VolumeCandidate)
    return chosen.volume_sum.adapt({part: plan.prepared(None) for part, plan in chosen.plan.plans.items()})
