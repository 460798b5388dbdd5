"""Every kernel, forced by name, and every pass of every family, verified as in :mod:`polyconv.tools.doctor.verify`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ....backend import backend_for
from ....cpu.planner import plan_cpu
from ....cuda.planner.device import CudaDevice
from ....cuda.planner.plan import Plan
from ....cuda.planner.planner import FAMILIES, family_name, plan_within
from ....problem import Problem
from ....selection import PlanError
from ..check import Check, Needs, Part, Result, not_here, passed
from ..device_under_test import DeviceUnderTest, GpuUnderTest
from ..kernel_coverage import Way, problems, selected
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
    plans = {(case, family): plan for case, family, plan in _plans(subject.description)}
    found: dict[str, Part] = {"compiling": partial(_compiled, subject, plans.values())}
    for (case, family), plan in plans.items():
        found[f"{case}: {family}"] = partial(_on_gpu, subject, family, plan)
    return found


def _plans(device: CudaDevice) -> Iterator[tuple[str, str, Plan]]:
    for case, problem in problems().items():
        for family in FAMILIES:
            try:
                yield case, family_name(family), plan_within((family,), problem, device)
            except PlanError:
                continue  # not supported by the family, or not within the tolerance


def _compiled(subject: GpuUnderTest, plans: Iterable[Plan]) -> Result:
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


EVERY_KERNEL = Check(
    "every kernel",
    "right in every element, the same bits each time, on poisoned memory and between red zones",
    every_kernel,
    Needs.TENSORS,
)
EVERY_PASS = Check(
    "every pass", "the same of each family's own choice, in all three passes", every_pass, Needs.TENSORS, limit=600.0
)
