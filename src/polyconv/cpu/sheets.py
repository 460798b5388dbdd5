"""Three axes as pictures (:mod:`polyconv.sheets`): each problem of pictures by whatever engine is best for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..problem import Pass, Problem
from ..readiness import Run
from ..sheets import NAME as FORM
from ..sheets import Cut, cut
from ..summing import summed
from ..volumes import VolumePlan, planned_parts, scattered_bytes
from .candidates import CpuCandidate
from .device import CpuDevice
from .weights import TransformedWeights

if TYPE_CHECKING:
    from .planner import CpuPlan

NAME = "sheets"

ADDED_CYCLES = {Pass.FPROP: 10.0, Pass.DGRAD: 20.0, Pass.WGRAD: 20.0}
"""Cycles per vector that is added to others: a kernel reads it once more, or it is written, read and added."""

LINE_BYTES = 64
SCATTERED_CYCLES = 0.4
"""Per byte of cache lines of which one element is used: a tensor whose width is cut across has no two side by side."""

DOUBT = 1.1
"""By how much the estimate has to be ahead: of PyTorch's convolutions over three axes only a few were measured."""


class SheetCandidate(CpuCandidate):
    """With the plans of the pictures."""

    __slots__ = ("cut", "plan")

    def __init__(self, cut: Cut, plan: VolumePlan[CpuPlan], cycles: float) -> None:
        direct = all(part.chosen.direct for part in plan.plans.values())
        super().__init__(NAME, FORM, direct=direct, cycles=cycles, error=lambda: plan.predicted_error)
        self.cut = cut
        self.plan = plan


def candidates(
    problem: Problem, device: CpuDevice, plan_picture: Callable[[Problem], CpuPlan]
) -> Iterator[SheetCandidate]:
    """The one way. Weights are transformed anew at each call: what is kept of a weight is kept for one problem."""
    found = cut(problem)
    plan = planned_parts(found, plan_picture)
    added = ADDED_CYCLES[problem.kind] * sum(found.addends) / device.lanes
    scattered = SCATTERED_CYCLES * sum(plan.times(each) * scattered_bytes(each, LINE_BYTES) for each in plan.plans)
    yield SheetCandidate(found, plan, DOUBT * (plan.pictures_cost + added + scattered))


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    assert isinstance(chosen, SheetCandidate)
    return summed(chosen.cut, {picture: plan.prepared(None) for picture, plan in chosen.plan.plans.items()})
