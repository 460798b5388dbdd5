"""The CPU planner: every candidate for a problem with its predicted error and cost, and the choice with its reasons.

Deterministic: the choice follows from the problem, its tolerance, the processor's description and, where there is one,
the preference. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import ModuleType

from ..preference import Preference
from ..problem import Pass, Problem
from ..select import Candidate, PlanError, Selection, select, why_not
from . import aten, channel_lanes, depthwise, native, plain, tile_lanes
from .borders import has_border, padded
from .candidates import CpuCandidate
from .device import CpuDevice, this_machine

CALL_CYCLES = 2000.0
"""What any call costs, so that no work at all is not free."""

CHECK_CYCLES, CHECK_BYTES = 8e3, 8.0
"""What it costs to find out whether a weight is still the one whose transform was kept: a call, bytes per cycle."""

MOST_FOR_THE_CHECK = 0.02
"""Share of a call that may go into that. A weight that would take more is transformed anew at each call."""

ENGINES: tuple[ModuleType, ...] = (tile_lanes, channel_lanes, depthwise, plain, aten)
"""Modules with a ``NAME``, ``candidates(problem, device)`` and ``prepare(chosen, problem, weights)``, where ``weights``
keeps transformed ones from call to call, or is None."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """What runs, and what does not and why."""

    problem: Problem
    ran: Problem
    """What the kernels are asked for: the problem, but for the input gradient of a border that of the padded image."""
    device: CpuDevice
    chosen: CpuCandidate
    reason: str
    candidates: tuple[Candidate, ...]
    """All of them; their costs are cycles of one core."""
    keeps_weights: bool = False
    """Whether transformed weights stay from call to call."""
    preference: str = ""
    """What became of a choice from outside; empty where there was none."""

    @property
    def folded(self) -> bool:
        """Whether the gradient of the padded image is computed first, and its border then added to the pixels."""
        return self.ran is not self.problem

    @property
    def choice(self) -> str:
        """The chosen candidate's name, by which it can be preferred."""
        return self.chosen.name

    @property
    def engine(self) -> ModuleType:
        """Who computes."""
        return next(engine for engine in ENGINES if self.chosen.engine == engine.NAME)

    @property
    def name(self) -> str:
        return f"{self.choice}, border folded" if self.folded else self.choice

    @property
    def predicted_error(self) -> float:
        """The largest error of any output element to be expected, relative to the output's scale."""
        return self.chosen.error

    def explain(self, *, verbose: bool = False) -> str:
        """The plan in words: what runs, and why others do not: the next best, or all (verbose)."""
        runs = f"  runs {self.name} on {self.device.instruction_set}: {self.reason}"
        error = f"predicted error {self.predicted_error:.1e}"
        return "\n".join([str(self.problem), f"{runs}; {error}", *why_not(self.candidates, verbose=verbose)])


@lru_cache(maxsize=4096)
def plan_cpu(
    problem: Problem,
    device: CpuDevice | None = None,
    *,
    kept_weights: bool = False,
    prefer: Preference | None = None,
) -> CpuPlan:
    """The plan for a problem on this processor, or on one that is described.

    With ``kept_weights`` the transformed weights of earlier calls may be used, as they are in inference: then a
    transform that would not pay for one call may be the better choice. They are used where finding out whether they are
    still right costs little beside the call, or nothing, because the weight is frozen. What is preferred runs if it can
    and keeps the tolerance.
    """
    if other_axes := problem.why_not_pictures():
        raise PlanError(other_axes)
    device = device or _here()
    ran = padded(problem) if problem.kind is Pass.DGRAD and has_border(problem) else problem

    check = 0.0 if problem.frozen else CHECK_CYCLES + 4.0 * prod(problem.w_shape) / CHECK_BYTES

    def keeps(candidate: CpuCandidate) -> bool:
        without = candidate.cycles - candidate.weight_cycles
        return kept_weights and candidate.weight_cycles > 0.0 and check <= MOST_FOR_THE_CHECK * without

    def cost(candidate: CpuCandidate) -> float:
        saved = candidate.weight_cycles - check if keeps(candidate) else 0.0
        return CALL_CYCLES + candidate.cycles - saved

    found = select(
        offered(ran, device),
        problem,
        refusal=lambda candidate: candidate.refusal,
        error=lambda candidate: candidate.error,
        cost=cost,
        prefer=prefer,
    )
    reason = found.preference
    if prefer is None or found.chosen.name != prefer.name:
        reason = _reason(problem, found, cost) + (f" ({reason})" if reason else "")
    return CpuPlan(problem, ran, device, found.chosen, reason, found.candidates, keeps(found.chosen), found.preference)


def _here() -> CpuDevice:
    return this_machine(native.instruction_set() if native.is_available() else "sse4")


def offered(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """Every candidate of every engine that has kernels for the problem's dtype."""
    if not native.is_available() or problem.dtype not in ("float32", "float64"):
        yield from aten.candidates(problem, device)
    elif problem.dtype == "float64":
        yield from plain.candidates(problem, device)
    else:
        for engine in ENGINES:
            yield from engine.candidates(problem, device)


def _reason(problem: Problem, found: Selection[CpuCandidate], cost: Callable[[CpuCandidate], float]) -> str:
    """Why the chosen one, in a few words."""
    chosen = found.chosen
    if len(found.able) == 1:
        alone = chosen.engine == aten.NAME
        return aten.why_alone(problem) if alone else f"{problem.dtype} is for checking, not for speed"
    direct = [c for c in found.able if c.direct and c is not chosen and c.engine != plain.NAME]
    if not direct:
        return "the least estimated time"
    ratio = min(map(cost, direct)) / cost(chosen)
    what = "the next direct one" if chosen.direct else "direct summation"
    return f"estimated {ratio:.1f} times as fast as {what}"
