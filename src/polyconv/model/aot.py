"""Kernels that a program will need, for compilation ahead of time.

GPUs of one architecture differ in multiprocessors, clocks and what their drivers report, and so do their plans. So
plans are made for every known GPU of the architecture, and their close candidates and the choices of tuning files in
force are included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from .. import settings
from ..cuda.planner import DEVICES, CudaDevice, KernelSpec, Plan, all_kernels, plan_cuda
from ..cuda.planner.device import why_too_old
from ..cuda.planner.planner import candidates
from ..cuda.planner.volumes import CudaVolumePlan, plan_volume
from ..problem import Problem
from ..selection import PlanError, Preference

CLOSE = 1.3
"""Largest modelled cost of an included candidate, relative to that of the chosen one."""


class WarmupError(ValueError):
    """A request that names no kernel; the message says what does."""


@dataclass
class Wanted:
    """Kernels to compile for one architecture, in the order of first use."""

    arch: str
    kernels: dict[KernelSpec, None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Problem -> why no kernel runs it."""


def wanted_by(problems: Iterable[Problem], arch: str) -> Wanted:
    """Kernels that plans for these problems may use on any GPU of the architecture."""
    from ..tuning_key import problem_key  # here, because it imports torch

    devices, workspace, measured = devices_of(arch), settings.current().workspace_bytes, _measured(arch)
    wanted = Wanted(arch)
    for asked in problems:
        for device in devices:
            try:
                lowered = _problems_2d(asked, device, workspace, measured.get(problem_key(asked), ()))
                for problem in dict.fromkeys(lowered):
                    plan = plan_cuda(problem, device, workspace)
                    wanted.kernels.update(dict.fromkeys(plan.kernels))
                    wanted.kernels.update(dict.fromkeys(_close_kernels(plan, device, workspace)))
                    for choice in measured.get(problem_key(problem), ()):
                        plan = plan_cuda(problem, device, workspace, _measured_choice(choice))
                        wanted.kernels.update(dict.fromkeys(plan.kernels))
            except PlanError as error:
                wanted.skipped[str(asked)] = str(error)
                break
    return wanted


def _problems_2d(problem: Problem, device: CudaDevice, workspace: int, measured: Iterable[str]) -> Iterator[Problem]:
    """2-D problems that a volume may be lowered to; any other problem itself."""
    if problem.rank != 3:
        yield problem
        return
    plan = plan_volume(problem, device, workspace)
    for way in (*_close(plan), *measured):
        yield from plan_volume(problem, device, workspace, _measured_choice(way)).parts.problems


def _measured_choice(name: str) -> Preference:
    return Preference(name, "chosen by a tuning file")


def wanted_by_name(names: Sequence[str], arch: str) -> Wanted:
    """Kernels by symbol."""
    known = {spec.symbol: spec for spec in all_kernels()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise WarmupError(
            f"no kernel of this version of polyconv is called {', '.join(unknown)}; polyconv inspect --all-kernels "
            "lists them. A message that names another version's kernel is answered by that version"
        )
    return Wanted(arch, dict.fromkeys(known[name] for name in names))


def every_kernel(arch: str) -> Wanted:
    """Every kernel that a plan for an architecture can use."""
    return Wanted(arch, dict.fromkeys(all_kernels(arch)))


def devices_of(arch: str) -> list[CudaDevice]:
    """Described GPUs of an architecture, for planning without the hardware."""
    found = [device for device in DEVICES.values() if device.arch == arch]
    if too_old := why_too_old(arch):
        raise WarmupError(too_old)
    if not found:
        known = ", ".join(dict.fromkeys(device.arch for device in DEVICES.values()))
        raise WarmupError(
            f"no GPU of {arch} is described here, so it is not known what would run on one (there are {known}); "
            "--all-kernels compiles all, for any architecture"
        )
    return found


def _measured(arch: str) -> dict[str, list[str]]:
    """Key of a problem -> choices of tuning files for GPUs of the architecture."""
    from ..autotune import tuning_lookup

    choices: dict[str, list[str]] = {}
    for path in tuning_lookup.files():
        for section in tuning_lookup.contents(path).sections:
            if section.environment.get("arch") == arch:
                for key, entry in section.entries.items():
                    choices.setdefault(key, []).append(str(entry.get("choice")))
    return choices


def _close(plan: Plan | CudaVolumePlan) -> set[str]:
    """Names of candidates that a slightly different GPU may choose."""
    return {c.name for c in plan.candidates if c.cost is not None and c.cost <= CLOSE * plan.cost_us}


def _close_kernels(plan: Plan, device: CudaDevice, workspace: int) -> Iterable[KernelSpec]:
    close = _close(plan)
    for candidate in candidates(plan.problem):
        if candidate.name in close and candidate.refusal(plan.problem) is None:
            yield from (launch.kernel for launch in candidate.schedule(plan.problem, device.sms, workspace).launches)
