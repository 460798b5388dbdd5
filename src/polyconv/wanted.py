"""Which kernels a program will want, so that they can be compiled before it runs.

A plan is made for a GPU's figures, and GPUs of one architecture differ: in multiprocessors, in clocks, and in what
their drivers report. So plans are made for every GPU of the architecture that is known, and candidates that come close
to the chosen one count as well. So do the choices of tuning files that are in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from . import settings
from .plan import DEVICES, CudaDevice, KernelSpec, Plan, PlanError, all_kernels, plan_cuda
from .plan.cuda import candidates
from .plan.device import why_too_old
from .plan.volumes import CudaVolumePlan, plan_volume
from .preference import Preference
from .problem import Problem
from .volumes import pictures_of

CLOSE = 1.3
"""A candidate counts if it is modelled to take at most so many times as long as the chosen one."""


class WarmupError(ValueError):
    """What was asked for names no kernel; the message says what does."""


@dataclass
class Wanted:
    """Kernels for one architecture, in the order in which they were first wanted."""

    arch: str
    kernels: dict[KernelSpec, None] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Problem -> why no kernel runs it."""


def wanted_by(problems: Iterable[Problem], arch: str) -> Wanted:
    """The kernels that plans for these problems may name on any GPU of the architecture."""
    from .tuning import problem_key  # here, because it imports torch

    devices, workspace, measured = devices_of(arch), settings.current().workspace_bytes, _measured(arch)
    wanted = Wanted(arch)
    for asked in problems:
        for device in devices:
            try:
                pictures = _pictures(asked, device, workspace, measured.get(problem_key(asked), ()))
                for problem in dict.fromkeys(pictures):
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


def _pictures(problem: Problem, device: CudaDevice, workspace: int, measured: Iterable[str]) -> Iterator[Problem]:
    """What kernels may be asked for in the place of a problem: itself, if it has two axes."""
    if problem.rank != 3:
        yield problem
        return
    plan = plan_volume(problem, device, workspace)
    for way in (*_close(plan), *measured):
        yield from pictures_of(plan_volume(problem, device, workspace, _measured_choice(way)).parts)


def _measured_choice(name: str) -> Preference:
    return Preference(name, "chosen by a tuning file")


def wanted_by_name(names: Sequence[str], arch: str) -> Wanted:
    """Kernels by their symbols."""
    known = {spec.symbol: spec for spec in all_kernels()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise WarmupError(
            f"no kernel of this version of polyconv is called {', '.join(unknown)}; polyconv inspect --all-kernels "
            "lists them. A message that names another version's kernel is answered by that version"
        )
    return Wanted(arch, dict.fromkeys(known[name] for name in names))


def every_kernel(arch: str) -> Wanted:
    """Every kernel that any plan for an architecture can name."""
    return Wanted(arch, dict.fromkeys(all_kernels(arch)))


def devices_of(arch: str) -> list[CudaDevice]:
    """The GPUs of an architecture that plans can be made for without one."""
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
    """Problem -> what tuning files let run on GPUs of the architecture."""
    from .tuning import lookup

    choices: dict[str, list[str]] = {}
    for path in lookup.files():
        for section in lookup.contents(path).sections:
            if section.environment.get("arch") == arch:
                for key, entry in section.entries.items():
                    choices.setdefault(key, []).append(str(entry.get("choice")))
    return choices


def _close(plan: Plan | CudaVolumePlan) -> set[str]:
    """Candidates that may be chosen on a GPU that differs a little."""
    return {c.name for c in plan.candidates if c.cost is not None and c.cost <= CLOSE * plan.cost_us}


def _close_kernels(plan: Plan, device: CudaDevice, workspace: int) -> Iterable[KernelSpec]:
    close = _close(plan)
    for candidate in candidates(plan.problem):
        if candidate.name in close and candidate.refusal(plan.problem) is None:
            yield from (launch.kernel for launch in candidate.schedule(plan.problem, device.sms, workspace).launches)
