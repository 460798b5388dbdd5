"""Measurement of one pass that has run, and a search for the tolerance that keeps the limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import floor, log10, nextafter

import torch

from ...autotune import preferences
from ...backend import Plan
from ...cpu.engines import aten
from ...dispatch.prepare import Ran
from ...numerics.known_weights import concentration
from ...numerics.reference import Tensors
from ...problem import Problem
from .figures import OUTPUTS, Figures, Yardstick

OURS, TORCH = "polyconv", "PyTorch"


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest acceptable errors; None: no limit."""

    error: float | None = None
    local_error: float | None = None

    @property
    def named(self) -> bool:
        return self.error is not None or self.local_error is not None

    def kept(self, figures: Figures) -> bool:
        return (self.error is None or figures.error <= self.error) and (
            self.local_error is None or figures.local_error <= self.local_error
        )


@dataclass(frozen=True, slots=True)
class Remedy:
    """The largest tolerance found that keeps the limits, and its plan."""

    tolerance: float | None
    """0 allows direct summation only; None: not even that keeps the limits."""
    plan: str
    error: float
    local_error: float

    def __str__(self) -> str:
        figures = f"{self.error:.1e}, relative to its neighbourhood {self.local_error:.1e}"
        if self.tolerance is None:
            return f"no tolerance keeps the limit: direct summation itself ({self.plan}) is at {figures}"
        return f"tolerance={self.tolerance:g} keeps the limit: {self.plan} is at {figures}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one pass that ran."""

    problem: Problem
    plan: str
    predicted: float
    concentration: float
    """Predicted error for these weights divided by that for even weights."""
    ours: Figures
    torch: Figures
    remedy: Remedy | None
    """None if the limits are kept."""


def measure(ran: Ran, limits: Limits) -> Measured:
    """Compare a pass that has just run, and PyTorch's float32 convolution, with float64."""
    problem, tensors = ran.problem, ran.tensors
    device = next(iter(tensors.values())).device
    # These operations are not part of the model: no autograd, and no autocast that lowers their precision.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        w = tensors.get("w")
        plan = preferences.plan(ran.backend, problem, inference=ran.inference, w=w)
        theirs = _with_new_outputs(problem, tensors)
        aten.run(problem, theirs)
        yardstick = Yardstick(problem, tensors)
        figures = yardstick.measure({OURS: tensors, TORCH: theirs})
        del theirs
        mine = figures[OURS]
        remedy = None if limits.kept(mine) else _remedy(ran, plan, mine, yardstick, limits)
        uneven = 1.0 if w is None else concentration(problem, plan, w)
    return Measured(problem, plan.name, plan.predicted_error, uneven, mine, figures[TORCH], remedy)


def _remedy(ran: Ran, plan: Plan, figures: Figures, yardstick: Yardstick, limits: Limits) -> Remedy:
    """Run the plans of smaller tolerances on the same operands, from the largest on, until the limits are kept."""
    # Rank consensus concerns the tolerance in force: plans for others are neither taken from other ranks nor shared.
    with preferences.Forced({}, alone=True):
        for below, stricter in _stricter(ran, plan):
            outputs = _with_new_outputs(ran.problem, ran.tensors)
            asked = replace(ran.problem, tolerance=below)
            ran.backend.prepare(preferences.plan(ran.backend, asked, inference=ran.inference))(outputs)
            plan, figures = stricter, yardstick.measure({OURS: outputs})[OURS]
            if limits.kept(figures):
                return Remedy(_rounded(below, plan), plan.name, figures.error, figures.local_error)
    return Remedy(None, plan.name, figures.error, figures.local_error)


def _stricter(ran: Ran, plan: Plan) -> Iterator[tuple[float, Plan]]:
    """Plans of decreasing tolerances, each with the largest tolerance that excludes the plans before it."""
    direct = preferences.plan(ran.backend, replace(ran.problem, tolerance=0.0), inference=ran.inference)
    tolerance = ran.problem.tolerance
    while plan.choice != direct.choice:
        # A negative tolerance stands for PyTorch's error, which the planner has kept.
        kept = plan.predicted_error if tolerance < 0 else min(tolerance, plan.predicted_error)
        tolerance = nextafter(kept, 0.0)
        asked = replace(ran.problem, tolerance=tolerance)
        plan = preferences.plan(ran.backend, asked, inference=ran.inference, w=ran.tensors.get("w"))
        if plan.predicted_error > tolerance:  # only direct summation may exceed the tolerance
            plan = direct
        tolerance = tolerance if plan.choice != direct.choice else 0.0
        yield tolerance, plan


def _rounded(below: float, plan: Plan) -> float:
    """The tolerance rounded down to as few digits (up to three) as select the same plan."""
    if not below:
        return 0.0
    for digits in range(3):
        unit = 10.0 ** (floor(log10(below)) - digits)
        number = float(f"{floor(below / unit) * unit:.{digits}e}")
        if plan.predicted_error <= number <= below:
            return number
    return below


def _with_new_outputs(problem: Problem, tensors: Tensors) -> dict[str, torch.Tensor]:
    outputs = {name: torch.empty_like(tensors[name]) for name in OUTPUTS[problem.kind] if name in tensors}
    return {**tensors, **outputs}
