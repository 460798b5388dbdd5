"""For every kernel a small convolution that it takes part in, and the way of computing it that launches it.

The planner would choose few of them for anything so small; so they are not chosen but forced, by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..plan import strips
from ..plan.candidates import CudaCandidate
from ..plan.cost import tasks_us, why_not_on
from ..plan.cuda import DEFAULT_WORKSPACE, FAMILIES, all_kernels, candidates
from ..plan.device import CudaDevice
from ..plan.plan import KernelSpec, Plan, Task
from ..problem import HALF_DTYPES, Problem, Sides
from .cases import CASES, Case
from .subject import Subject

QUICKLY = 2
"""Ways of each family that there is time for where it has to be quick."""
TAPS_H, TAPS_W = (1, 3, 5, 9, 13), (3, 5, 9, 13)
"""Of the kernels that a fast weight gradient exists for, along each axis."""


@dataclass(frozen=True, slots=True)
class Way:
    """A small problem, and one candidate for it, whether or not the planner would choose it."""

    name: str
    problem: Problem
    candidate: CudaCandidate
    tasks: tuple[Task, ...]

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        return tuple(dict.fromkeys(task.kernel for task in self.tasks))

    @property
    def family(self) -> str:
        """The module of the planner that it is of."""
        return type(self.candidate).__module__.rpartition(".")[2]

    def why_not_on(self, device: CudaDevice) -> str:
        """Why a device cannot run it; empty if it can."""
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
    """For every kernel that the device runs, by its symbol, a way that launches it: the first that was found."""
    wanted = {kernel.symbol for kernel in all_kernels(device.arch)}
    found: dict[str, Way] = {}
    for name, problem in problems():
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
    """Ways that launch all these kernels, without those whose kernels others launch, too."""
    covered: set[str] = set()
    kept: dict[str, Way] = {}
    # A kernel that many ways launch comes along: begin with those whose way is theirs alone.
    for symbol, way in sorted(found.items(), key=lambda item: sum(item[1] is other for other in found.values())):
        if symbol not in covered:
            kept[symbol] = way
            covered |= {kernel.symbol for kernel in way.kernels}
    return dict(sorted(kept.items()))


def selected(subject: Subject) -> dict[str, Way]:
    """Ways that launch every kernel; if it has to be quick, some of each family."""
    families: dict[str, list[str]] = {}
    found = fewest(ways(subject.description))
    for symbol, way in found.items():
        families.setdefault(way.family, []).append(symbol)
    return {symbol: found[symbol] for members in families.values() for symbol in subject.some(members, QUICKLY)}


def problems() -> Iterator[tuple[str, Problem]]:
    """The self-test's, then those that the other kernels need, then the self-test's in half precision."""
    for name, case in (*CASES.items(), *_more()):
        for kind in case.passes:
            yield f"{name}, {kind}", case.problem(kind)
    for dtype, (name, case) in product(HALF_DTYPES, CASES.items()):
        for kind in case.passes:
            yield f"{name}, {kind}, {dtype}", replace(case.problem(kind), dtype=dtype)


def _more() -> Iterator[tuple[str, Case]]:
    for (lanes, stride), kernels in strips.KERNELS.items():
        for taps in kernels:
            last = lanes == strips.CHANNELS
            case = Case(
                (1, 32 if last else 3, 14, 17),
                (32 if last else 3, 1, *taps),
                padding=_same(*taps),
                stride=(stride, stride),
                groups=32 if last else 3,
                channels_last=last,
            )
            name = f"{taps[0]}x{taps[1]}, depthwise, stride {stride}" + ", channels last" * last
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
