"""Every kernel, forced by name, and every pass of every family, verified as in :mod:`polyconv.tools.doctor.verify`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ....cuda.planner.planner import FAMILIES, family_name, plan_within
from ....problem import Problem
from ....selection import PlanError
from ..check import Answer, Examination, Needs, Part, not_here
from ..device_under_test import Subject
from ..kernel_coverage import Way, problems, selected
from ..verify import prove


def every_kernel(subject: Subject) -> Mapping[str, Part]:
    return {symbol: partial(_forced, subject, way) for symbol, way in selected(subject).items()}


def _forced(subject: Subject, way: Way) -> Answer:
    if why_not := way.why_not_on(subject.description):
        return not_here(why_not)
    return prove(subject, way.plan(subject.description))


def every_pass(subject: Subject) -> Mapping[str, Part]:
    found = {
        f"{name}: {family_name(family)}": partial(_planned, subject, problem, family)
        for name, problem in problems().items()
        for family in FAMILIES
        if any(one.refusal(problem) is None for one in family.candidates(problem))
    }
    return {name: found[name] for name in subject.some(list(found), 6)}


def _planned(subject: Subject, problem: Problem, family: object) -> Answer:
    try:
        plan = plan_within((family,), problem, subject.description)  # type: ignore[arg-type]
    except PlanError as error:
        return not_here(str(error)[:200])
    return prove(subject, plan)


EVERY_KERNEL = Examination(
    "every kernel",
    "right in every element, the same bits each time, on poisoned memory and between fences",
    every_kernel,
    Needs.TENSORS,
    quick=True,
)
EVERY_PASS = Examination(
    "every pass", "the same of each family's own choice, in all three passes", every_pass, Needs.TENSORS
)
