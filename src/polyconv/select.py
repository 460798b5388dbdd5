"""From what could run a problem to what does run, and why nothing else does: the same on every device.

Candidates that refuse the problem are out, then those that would stray further than its tolerance. Of the others the
one of least cost runs, or the one that is preferred from outside. Nothing here knows a device: a planner says how its
candidates are asked, and each is asked no more than it takes to rule it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from .preference import UNKNOWN, Preference
from .problem import Problem

REACH = 3.0
"""How far off a model of costs is taken to be: a candidate that costs so many times as much is not measured."""


class PlanError(RuntimeError):
    """No kernel of polyconv can solve this problem; the message says why."""


class Weighable(Protocol):
    """What is weighed: a kernel of an engine or a family, or a chain of them, with its variant settled."""

    @property
    def name(self) -> str:
        """By which it is explained, preferred and kept in tuning files."""

    @property
    def direct(self) -> bool:
        """Whether it sums the products of the definition: allowed whatever the tolerance."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to solve a problem, weighed: what it would cost, or why it cannot be used."""

    name: str
    cost: float | None = None
    """Modelled, in the planner's unit, never measured; ``None`` if it cannot run or strays too far."""
    error: float | None = None
    """The largest error of any element to be expected, relative to the output's scale; ``None`` if it cannot run."""
    rejected: str | None = None
    """Why this candidate does not run; ``None`` for the chosen one."""


W = TypeVar("W", bound=Weighable)


@dataclass(frozen=True, slots=True)
class Selection(Generic[W]):
    """What runs, and why."""

    chosen: W
    weighed: Candidate
    """What the chosen one costs, and how far it strays."""
    able: tuple[W, ...]
    """All that could run."""
    candidates: tuple[Candidate, ...]
    """All, in the order in which they were offered, with the reason why they do not run."""
    preference: str
    """What became of the preference: who chose what runs, or why the preferred candidate does not run."""


def select(
    offered: Iterable[W],
    problem: Problem,
    *,
    refusal: Callable[[W], str | None],
    error: Callable[[W], float],
    cost: Callable[[W], float | str],
    prefer: Preference | None = None,
) -> Selection[W]:
    """The candidate of least cost among those that take the problem and keep its tolerance, or the preferred of them.

    ``cost`` says what one costs on the device, or why the device cannot run it. Of equal ones the first. Raises
    :class:`PlanError` if there is none.
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
    """What a plan says of a preference, and what the model thinks of it."""
    if best.name != prefer.name:
        return prefer.not_followed(next((c.rejected for c in every if c.name == prefer.name), None) or UNKNOWN)
    if best is cheapest:
        return f"{prefer.source}, and the least estimated time"
    return f"{prefer.source}; {_longer(best, cheapest)} as {cheapest.name}"


def by_cost(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that may run: they can, and keep the tolerance. The least cost comes first."""
    return sorted((c for c in candidates if c.cost is not None), key=lambda c: c.cost or 0.0)


def worth_timing(candidates: Iterable[Candidate], most: int, kind: Callable[[str], str], always: str = "") -> list[str]:
    """Names of those that a measurement should decide between, the least cost first: ``most``, and the best of a kind.

    A model of costs errs least between candidates of one kind, so each kind has its best there. Who would take
    :data:`REACH` times as long as the best is not worth the time. The best of the kind ``always`` is there whatever
    it costs, and is not counted.
    """
    able = by_cost(candidates)
    firsts = {kind(c.name): c for c in reversed(able)}
    others = [c for c in able if kind(c.name) != always and (c.cost or 0.0) <= REACH * (able[0].cost or 0.0)]
    chosen = [c for place, c in enumerate(others) if place < most or firsts[kind(c.name)] is c]
    if always in firsts:
        chosen.append(firsts[always])
    return [c.name for c in by_cost(chosen)]


def why_not(candidates: Sequence[Candidate], *, verbose: bool) -> list[str]:
    """Lines that say why other candidates do not run: the three next best and the nearest miss, or all."""
    able = [c for c in by_cost(candidates) if c.rejected]
    missed = sorted((c for c in candidates if c.cost is None and c.error is not None), key=lambda c: c.error or 0.0)
    refused = [c for c in candidates if c.error is None]
    shown = [*able, *missed, *refused] if verbose else [*able[:3], *missed[:1]]
    lines = [f"  not {c.name}: {c.rejected}" for c in shown]
    hidden = len(candidates) - 1 - len(shown)
    return [*lines, *([f"  nor {hidden} other candidates (verbose names them)"] if hidden > 0 else [])]
