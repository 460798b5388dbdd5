"""Every kernel, forced by name, and every pass of every family, verified as in :mod:`polyconv.tools.doctor.verify`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from ....backend import backend_for
from ....cpu.planner import plan_cpu
from ....cuda.planner.plan import Plan
from ....problem import Problem
from ..check import Part, Result, not_here, passed
from ..device_under_test import DeviceUnderTest, GpuUnderTest
from ..kernel_coverage import Way, family_plans, problems, selected
from ..verify import verify, verify_plan

LARGER_ON_CPU = 4
"""Factor on height and width on the CPU, where the planner prefers PyTorch's kernels for smaller images."""


def every_kernel(subject: GpuUnderTest) -> Mapping[str, Part]:
    return {symbol: partial(_forced, subject, way) for symbol, way in selected(subject).items()}


def _forced(subject: GpuUnderTest, way: Way) -> Result:
    if why_not := way.why_not_on(subject.description):
        return not_here(why_not)
    return verify_plan(subject, way.plan(subject.description))


def every_pass(subject: DeviceUnderTest) -> Mapping[str, Part]:
    """Small problems on every family that takes them or, on the CPU, on the engine that the planner chooses."""
    if not isinstance(subject, GpuUnderTest):
        return {name: partial(_on_cpu, subject, problem) for name, problem in _cpu_problems()}
    plans: list[Plan] = []
    found: dict[str, Part] = {"compiling": partial(_compiled, subject, plans)}
    for case, problem in problems().items():
        for family, plan in family_plans(problem, subject.description):
            plans.append(plan)
            found[f"{case}: {family}"] = partial(_on_gpu, subject, family, plan)
    return found


def _compiled(subject: GpuUnderTest, plans: list[Plan]) -> Result:
    """Compile missing kernels on all cores, instead of one by one in the parts that follow."""
    kernels = list(dict.fromkeys(kernel for plan in plans for kernel in plan.kernels))
    subject.cache.get_many(kernels, subject.description.arch)
    return passed(f"{len(kernels)} kernels", kernels=len(kernels))


def _on_gpu(subject: GpuUnderTest, family: str, plan: Plan) -> Result:
    return _in_family(family, verify_plan(subject, plan))


def _cpu_problems() -> Iterator[tuple[str, Problem]]:
    """Each case with the default tolerance, with tolerance 0 (direct summation only), and in float64."""
    for case, problem in problems(LARGER_ON_CPU).items():
        yield case, problem
        yield f"{case}, tolerance 0", replace(problem, tolerance=0.0)
        yield f"{case}, float64", replace(problem, dtype="float64")


def _on_cpu(subject: DeviceUnderTest, problem: Problem) -> Result:
    plan = plan_cpu(problem)
    found = verify(subject, problem, backend_for(subject.device))
    return _in_family(plan.chosen.engine, found, plan=plan.name)


def _in_family(family: str, result: Result, **figures: str) -> Result:
    return replace(result, row=family, figures={"family": family, **result.figures, **figures})
