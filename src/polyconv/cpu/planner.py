"""The CPU planner: every way to run a problem, the predicted error and cost of each, and the choice with its reasons.

Deterministic: the choice follows from the problem, its tolerance, the processor's description and, where there is one,
the preference. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..plan.errors import PlanError
from ..preference import UNKNOWN, Preference
from ..problem import Pass, Problem
from . import aten, channel_lanes, depthwise, native, plain, tile_lanes
from .borders import has_border, padded
from .candidates import Candidate, Engine
from .device import CpuDevice, this_machine

CALL_CYCLES = 2000.0
"""What any call costs, so that no work at all is not free."""

ENGINES = (tile_lanes, channel_lanes, depthwise, plain, aten)


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """What runs, and what does not and why."""

    problem: Problem
    ran: Problem
    """What the kernels are asked for: the problem, but for the input gradient of a border that of the padded image."""
    device: CpuDevice
    chosen: Candidate
    reason: str
    rejected: tuple[tuple[Candidate, str], ...]

    @property
    def folded(self) -> bool:
        """Whether the gradient of the padded image is computed first, and its border then added to the pixels."""
        return self.ran is not self.problem

    @property
    def choice(self) -> str:
        """The chosen candidate's name, by which it can be preferred."""
        return str(self.chosen)

    @property
    def name(self) -> str:
        return f"{self.chosen}, border folded" if self.folded else str(self.chosen)

    @property
    def predicted_error(self) -> float:
        """The largest error of any output element to be expected, relative to the output's scale."""
        return self.chosen.error

    def explain(self, *, verbose: bool = False) -> str:
        """The plan in words: what runs, and why others do not: the three next best, or all (verbose)."""
        lines = [
            str(self.problem),
            f"  runs {self.name} on {self.device.instruction_set}: {self.reason}; "
            f"predicted error {self.predicted_error:.1e}",
        ]
        able = sorted((pair for pair in self.rejected if not pair[0].refusal), key=lambda pair: pair[0].cycles)
        unable = [pair for pair in self.rejected if pair[0].refusal]
        shown = [*able, *unable] if verbose else able[:3]
        lines += [f"  not {candidate}: {why}" for candidate, why in shown]
        hidden = len(self.rejected) - len(shown)
        if hidden:
            lines.append(f"  nor {hidden} other candidates (verbose names them)")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def plan_cpu(
    problem: Problem,
    device: CpuDevice | None = None,
    *,
    kept_weights: bool = False,
    prefer: Preference | None = None,
) -> CpuPlan:
    """The plan for a problem on this processor, or on one that is described.

    With ``kept_weights`` the transformed weights of earlier calls are used, as they are in inference: then a transform
    that would not pay for one call may be the better choice. What is preferred runs if it can and keeps the tolerance.
    """
    if other_axes := problem.why_not_pictures():
        raise PlanError(other_axes)
    device = device or _here()
    ran = _ran(problem)
    within, rejected = _weighed(problem, ran, device)
    cost = _cost(kept_weights)
    chosen = min(within, key=cost)
    reason = _reason(problem, chosen, within, cost)
    if prefer is not None:
        named = next((candidate for candidate in within if str(candidate) == prefer.name), None)
        if named is not None:
            chosen, reason = named, _preferred(prefer, named, chosen, cost)
        else:
            why = next((why for candidate, why in rejected if str(candidate) == prefer.name), UNKNOWN)
            reason += f" ({prefer.not_followed(why)})"
    for other in within:
        if other is not chosen:
            rejected.append((other, f"estimated to take {cost(other) / cost(chosen):.2f} times as long"))
    return CpuPlan(problem, ran, device, chosen, reason, tuple(rejected))


def contenders(problem: Problem, device: CpuDevice | None = None, *, kept_weights: bool = False) -> tuple[str, ...]:
    """Names of the candidates that may run: they can, and keep the tolerance. The least estimated time comes first.

    PyTorch's own convolution is one of them.
    """
    within, _ = _weighed(problem, _ran(problem), device or _here())
    return tuple(str(candidate) for candidate in sorted(within, key=_cost(kept_weights)))


def _here() -> CpuDevice:
    return this_machine(native.instruction_set() if native.is_available() else "sse4")


def _ran(problem: Problem) -> Problem:
    return padded(problem) if problem.kind is Pass.DGRAD and has_border(problem) else problem


def _weighed(problem: Problem, ran: Problem, device: CpuDevice) -> tuple[list[Candidate], list[tuple[Candidate, str]]]:
    """The candidates that may run, and the others with the reason."""
    within: list[Candidate] = []
    rejected: list[tuple[Candidate, str]] = []
    for candidate in _candidates(ran, device):
        if candidate.refusal is not None:
            rejected.append((candidate, candidate.refusal))
        elif not candidate.direct and candidate.error > problem.tolerance:
            words = f"its predicted error {candidate.error:.1e} exceeds the tolerance {problem.tolerance:.1e}"
            rejected.append((candidate, words))
        else:
            within.append(candidate)
    return within, rejected


def _cost(kept_weights: bool) -> Callable[[Candidate], float]:
    return lambda candidate: CALL_CYCLES + candidate.cycles - (candidate.weight_cycles if kept_weights else 0.0)


def _candidates(problem: Problem, device: CpuDevice) -> Iterator[Candidate]:
    if not native.is_available() or problem.dtype not in ("float32", "float64"):
        yield from aten.candidates(problem, device)
    elif problem.dtype == "float64":
        yield from plain.candidates(problem, device)
    else:
        for engine in ENGINES:
            yield from engine.candidates(problem, device)


def _reason(problem: Problem, chosen: Candidate, within: list[Candidate], cost: Callable[[Candidate], float]) -> str:
    """Why the chosen one, in a few words."""
    if len(within) == 1:
        alone = chosen.engine is Engine.ATEN
        return aten.why_alone(problem) if alone else f"{problem.dtype} is for checking, not for speed"
    direct = [c for c in within if c.direct and c is not chosen and c.engine is not Engine.PLAIN]
    if not direct:
        return "the least estimated time"
    ratio = min(map(cost, direct)) / cost(chosen)
    what = "the next direct one" if chosen.direct else "direct summation"
    return f"estimated {ratio:.1f} times as fast as {what}"


def _preferred(prefer: Preference, chosen: Candidate, cheapest: Candidate, cost: Callable[[Candidate], float]) -> str:
    """Why the preferred one, and what the model thinks of it."""
    if chosen is cheapest:
        return f"{prefer.source}, and the least estimated time"
    return f"{prefer.source}; estimated to take {cost(chosen) / cost(cheapest):.2f} times as long as {cheapest}"
