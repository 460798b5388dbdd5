"""Selection of a candidate for a problem, with a reason for every rejected one; shared by all devices.

Candidates that refuse the problem are rejected first, then those whose predicted error exceeds the tolerance. Of the
others the one with the least cost runs, or the preferred one. The planner supplies the functions for refusal, error and
cost; evaluation stops at the first that rejects a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from .problem import Problem

TRIALS = 3
"""Number of candidates that are timed, in the cost model's order."""
REACH = 3.0
"""Assumed error of the cost model: candidates that cost more than this many times the least cost are not timed."""


class PlanError(RuntimeError):
    """No kernel of polyconv can run the problem; the message says why."""


class Weighable(Protocol):
    """A kernel of an engine or family, or a chain of kernels, of one variant."""

    @property
    def name(self) -> str:
        """Name in explanations, preferences and tuning files."""

    @property
    def direct(self) -> bool:
        """Whether it computes by direct summation, which any tolerance allows."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Cost and predicted error of one candidate, or the reason why it cannot be used."""

    name: str
    cost: float | None = None
    """Modelled cost in the planner's unit, never measured; None if it cannot run or exceeds the tolerance."""
    error: float | None = None
    """Largest predicted error of any element, relative to the output's scale; None if it cannot run."""
    rejected: str | None = None
    """Why this candidate does not run; None for the chosen one."""


W = TypeVar("W", bound=Weighable)


@dataclass(frozen=True, slots=True)
class Selection(Generic[W]):
    """The chosen candidate, and the evaluation of all."""

    chosen: W
    weighed: Candidate
    """Cost and error of the chosen one."""
    able: tuple[W, ...]
    """All that could run."""
    candidates: tuple[Candidate, ...]
    """All candidates in the order offered, each but the chosen one with the reason of its rejection."""
    preference: str
    """Outcome of the preference: its source, or why the preferred candidate does not run; empty without one."""


def select(
    offered: Iterable[W],
    problem: Problem,
    *,
    refusal: Callable[[W], str | None],
    error: Callable[[W], float],
    cost: Callable[[W], float | str],
    prefer: Preference | None = None,
) -> Selection[W]:
    """Choose the candidate of least cost, or the preferred one, among those that can run and keep the tolerance.

    ``cost`` returns the cost on the device, or text saying why the device cannot run it. Ties go to the first. Raises
    :class:`PlanError` if no candidate remains.
    """

    def weigh(one: W) -> Candidate:
        if (why_not := refusal(one)) is not None:
            return Candidate(one.name, rejected=why_not)
        expected = error(one)
        if not one.direct and expected > problem.tolerance:
            words = f"its predicted error {expected:.1e} exceeds the tolerance {problem.tolerance:.1e}"
            return Candidate(one.name, error=expected, rejected=words)
        found = cost(one)
        return Candidate(one.name, rejected=found) if isinstance(found, str) else Candidate(one.name, found, expected)

    pairs = [(one, weigh(one)) for one in offered]
    able = [(one, weighed) for one, weighed in pairs if weighed.rejected is None]
    if not able:
        reasons = "; ".join(f"{weighed.name}: {weighed.rejected}" for _, weighed in pairs)
        raise PlanError(f"no kernel can run {problem}: {reasons}")
    cheapest = min(able, key=lambda pair: pair[1].cost or 0.0)
    named = (pair for pair in able if prefer is not None and pair[1].name == prefer.name)
    chosen, best = next(named, cheapest)
    return Selection(
        chosen,
        best,
        tuple(one for one, _ in able),
        tuple(
            weighed if weighed is best or weighed.rejected else replace(weighed, rejected=_longer(weighed, best))
            for _, weighed in pairs
        ),
        "" if prefer is None else _outcome(prefer, best, cheapest[1], [weighed for _, weighed in pairs]),
    )


def _longer(one: Candidate, other: Candidate) -> str:
    return f"estimated to take {(one.cost or 0.0) / (other.cost or 1.0):.2f} times as long"


def _outcome(prefer: Preference, best: Candidate, cheapest: Candidate, every: Sequence[Candidate]) -> str:
    """Text of a plan on its preference, with the cost model's estimate."""
    if best.name != prefer.name:
        return prefer.not_followed(next((c.rejected for c in every if c.name == prefer.name), None) or UNKNOWN)
    if best is cheapest:
        return f"{prefer.source}, and the least estimated time"
    return f"{prefer.source}; {_longer(best, cheapest)} as {cheapest.name}"


def by_cost(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates that can run and keep the tolerance, the least cost first."""
    return sorted((c for c in candidates if c.cost is not None), key=lambda c: c.cost or 0.0)


def worth_timing(candidates: Iterable[Candidate], most: int, kind: Callable[[str], str], always: str = "") -> list[str]:
    """Names of the candidates worth timing, the least cost first: ``most``, and the best of each kind.

    A cost model errs least between candidates of one kind, hence the latter. Candidates beyond :data:`REACH` times the
    least cost are left out. The best of the kind ``always`` is included at any cost, and not counted.
    """
    able = by_cost(candidates)
    firsts = {kind(c.name): c for c in reversed(able)}
    others = [c for c in able if kind(c.name) != always and (c.cost or 0.0) <= REACH * (able[0].cost or 0.0)]
    chosen = [c for place, c in enumerate(others) if place < most or firsts[kind(c.name)] is c]
    if always in firsts:
        chosen.append(firsts[always])
    return [c.name for c in by_cost(chosen)]


def why_not(candidates: Sequence[Candidate], *, verbose: bool) -> list[str]:
    """Lines with the reasons of rejection: of the three next best and the nearest miss, or of all if ``verbose``."""
    able = [c for c in by_cost(candidates) if c.rejected]
    missed = sorted((c for c in candidates if c.cost is None and c.error is not None), key=lambda c: c.error or 0.0)
    refused = [c for c in candidates if c.error is None]
    shown = [*able, *missed, *refused] if verbose else [*able[:3], *missed[:1]]
    lines = [f"  not {c.name}: {c.rejected}" for c in shown]
    hidden = len(candidates) - 1 - len(shown)
    return [*lines, *([f"  nor {hidden} other candidates (verbose names them)"] if hidden > 0 else [])]


UNKNOWN = "no candidate of that name exists for this problem here"


class Preference(NamedTuple):
    """A candidate that runs if it can and keeps the tolerance; else the cost model decides, and the plan says so."""

    name: str
    source: str = "chosen by the caller"
    """Origin, as text after "it was": ``chosen by the tuning file``, ``agreed with the other ranks``."""

    def not_followed(self, why: str) -> str:
        """Text of a plan that runs another candidate."""
        return f"not {self.name}, although {self.source}: {why}"
