"""Who decides what runs: the other ranks, then a measurement of this process, then a tuning file, then the cost model.

A backend asks here when it plans a problem. Whoever keeps a plan plans again when the number of
:mod:`~polyconv.epoch` is another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch

from . import agreement, epoch, settings
from .blocks import Block, Entry, Stack
from .forking import whole
from .preference import Preference
from .problem import Problem
from .recent import Recent

if TYPE_CHECKING:
    from .accuracy import Way
    from .tuning import Environment

AGREED = "agreed with the other ranks"
MEASURED = "measured in this process"


class Planned(Protocol):
    """A plan of any backend."""

    @property
    def choice(self) -> str:
        """The chosen candidate's name."""

    @property
    def name(self) -> str:
        """What runs, for people: the candidate, and what is done beside it."""

    @property
    def predicted_error(self) -> float:
        """The largest error of any element to be expected, relative to the output's scale."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """How its output maps are summed by fast algorithms; none where all sums are direct."""


class Decision(NamedTuple):
    """What was decided for a problem."""

    problem: Problem
    inference: bool
    """The backend prepares the weight once for many calls."""
    key: str
    choice: str


P = TypeVar("P", bound=Planned)


def decide(problem: Problem, inference: bool, environment: Environment, plan: Callable[[Preference | None], P]) -> P:
    """The plan for a problem.

    Args:
        problem, inference: what is asked; ``inference``: the backend keeps the prepared weight between calls.
        environment: where it runs; only what was measured in the same one counts.
        plan: the planner, given a preference or none.
    """
    from .tuning import problem_key  # here, as below: a call whose plan is made needs nothing of it

    key = problem_key(problem, kept_weights=inference)
    decided = _decide(key, environment, plan)
    for entry in _forced.entries:
        if entry.value.seen is not None:
            entry.value.seen.append(Decision(problem, inference, key, decided.choice))
    return decided


def _decide(key: str, environment: Environment, plan: Callable[[Preference | None], P]) -> P:
    forced = _forced.entries[-1].value if _forced.entries else None
    if forced is not None and key in forced.choices:
        return plan(Preference(forced.choices[key], "asked for"))
    own = _own(key, environment)
    mine = plan(own)
    if (forced is not None and forced.alone) or agreement.ranks() == 1:
        return mine
    if own is None and _races():  # nobody is to be bound by the model's choice: the first to end its race decides
        return mine
    agreed = agreement.agree(environment.device, key, mine.choice)
    if agreed == mine.choice:
        return mine
    adopted = plan(Preference(agreed, AGREED))
    if adopted.choice != agreed:
        warnings.warn(
            f"the other ranks run {agreed!r} for a convolution that cannot run it here ({environment}): "
            f"{adopted.choice!r} runs instead. Results may differ between ranks in the last bits. Problem: {key}",
            RuntimeWarning,
            stacklevel=2,
        )
    return adopted


def _own(key: str, environment: Environment) -> Preference | None:
    """What this process would run without the others."""
    for entry in reversed(_measured.entries):
        if key in entry.value.choices and entry.value.environment == environment:
            return Preference(entry.value.choices[key], entry.value.source)
    raced = _raced[environment, key]
    if raced is not None:
        return raced
    from . import tuning

    found = tuning.find(key, environment)
    return None if found is None else Preference(found.entry.choice, f"chosen by the tuning file {found.path}")


# ---- races


def may_be_raced(key: str, environment: Environment) -> bool:
    """Whether the first calls of a problem are to find out what runs it: nobody but the cost model has a word on it."""
    return _races() and _own(key, environment) is None


def _races() -> bool:
    """Whether problems are raced now. Not where somebody measures, or looks on; nor where bits are to be the same."""
    return settings.current().benchmark and not _forced.entries and not determinism_is_asked_for()


def determinism_is_asked_for() -> bool:
    """Whether the program wants the same bits from the same call."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic


# ---- when to plan again


@epoch.follow
def _files() -> int:
    """Tuning files are asked again when a program names them anew: they may have been written meanwhile."""
    return id(settings.current().tuning_file)  # of a tuple that the state keeps alive, with the settings


# ---- choices of this process


class Measured(NamedTuple):
    """What was measured to be best in an environment: key -> candidate."""

    environment: Environment
    choices: Mapping[str, str]
    source: str = MEASURED
    """How, in the words of :class:`~polyconv.preference.Preference`."""


_measured: Stack[Measured] = Stack()
"""The latest last: it has the first word."""


def remember(environment: Environment, choices: Mapping[str, str], source: str = MEASURED) -> Entry[Measured]:
    """Let problems run what was measured to be best for them, from now on, until :func:`forget`."""
    measured = Entry(Measured(environment, dict(choices), source))
    _measured.put(measured)
    return measured


def forget(measured: Entry[Measured]) -> None:
    """The reverse of :func:`remember`: what was measured before, for another model say, holds again."""
    _measured.take(measured)


MOST_RACED = 8192
"""Outcomes of races to remember."""

_raced: Recent[tuple[Environment, str], Preference] = Recent(MOST_RACED)
"""By where and what. Of a problem that is forgotten the next calls are raced anew."""
_raced_changes = 0


@epoch.follow
def _races_that_ended() -> int:
    return _raced_changes


def settle(environment: Environment, key: str, choice: str, source: str) -> None:
    """Let a problem run what a race has found, from now on. What :func:`remember` was told comes first."""
    global _raced_changes
    with whole:
        epoch.changed()
        _raced.put((environment, key), Preference(choice, source))
        _raced_changes += 1
        epoch.changed()


def forget_races() -> None:
    """The reverse of every :func:`settle` so far: problems are raced anew."""
    global _raced_changes
    with whole:
        epoch.changed()
        _raced.clear()
        _raced_changes += 1
        epoch.changed()


class _Force(NamedTuple):
    """What a block lets run."""

    choices: Mapping[str, str]
    alone: bool
    seen: list[Decision] | None


_forced: Stack[_Force] = Stack()
"""The last has its way."""


class Forced(Block[_Force, None]):
    """Lets candidates run inside a ``with`` block, whatever else is in force: to measure them.

    Can be entered again. Holds for the whole process, as settings do; blocks of several threads may end in any order.
    ``alone``: the other ranks are not asked what else is planned in it, and not bound by it.
    """

    def __init__(self, choices: Mapping[str, str], *, alone: bool = False) -> None:
        super().__init__(_forced, _Force(dict(choices), alone, None), None)


def are_watched() -> bool:
    """Whether someone wants to see what is decided, pass by pass."""
    return any(entry.value.seen is not None for entry in _forced.entries)


def watched(*, alone: bool = False) -> AbstractContextManager[list[Decision]]:
    """What is decided for the problems that run inside a ``with`` block, each planned anew.

    ``alone``: without the other ranks. Who is yet to measure must not agree with them on the cost model's choice.
    """
    seen: list[Decision] = []
    now = _forced.entries[-1].value.choices if _forced.entries else {}
    return Block(_forced, _Force(now, alone, seen), seen)
