"""Who decides what runs: the other ranks, then a measurement of this process, then a tuning file, then the cost model.

A backend asks here when it plans a problem. Whoever keeps a plan plans again when :func:`version` is another number.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from . import agreement, settings
from .blocks import Block, Stack
from .preference import Preference
from .problem import Problem

if TYPE_CHECKING:
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


@dataclass(frozen=True, slots=True)
class Decision:
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
    mine = plan(_own(key, environment))
    if (forced is not None and forced.alone) or agreement.ranks() == 1:
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
    for measured in reversed(_measured):
        if key in measured.choices and measured.environment == environment:
            return Preference(measured.choices[key], MEASURED)
    from . import tuning

    found = tuning.find(key, environment)
    return None if found is None else Preference(found.entry.choice, f"chosen by the tuning file {found.path}")


# ---- when to plan again

_numbers = itertools.count(1)


def _gone() -> None:
    """Stands for a process group that is not there, as a reference to one that was destroyed would."""


class _State:
    """What :func:`version` saw last. The group is not kept alive: a program may destroy it."""

    version = next(_numbers)
    files: Any = None
    group: Callable[[], Any] = staticmethod(_gone)


def version() -> int:
    """A number that is another one after anything changed that a choice may depend on. Cheap: asked on every call."""
    forced = _forced.entries
    if forced:
        return forced[-1].value.version
    files, group = settings.current().tuning_file, agreement.group()
    if files is not _State.files or group is not _State.group() or (group is None and _State.group is not _gone):
        _State.files, _State.group = files, _gone if group is None else weakref.ref(group)
        _State.version = next(_numbers)
    return _State.version


# ---- choices of this process


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What was measured to be best in an environment: key -> candidate."""

    environment: Environment
    choices: Mapping[str, str]


_measured: list[Measured] = []
"""The latest last: it has the first word."""


def remember(environment: Environment, choices: Mapping[str, str]) -> Measured:
    """Let problems run what was measured to be best for them, from now on, until :func:`forget`."""
    measured = Measured(environment, dict(choices))
    _measured.append(measured)
    _State.version = next(_numbers)
    return measured


def forget(measured: Measured) -> None:
    """The reverse of :func:`remember`: what was measured before, for another model say, holds again."""
    _measured[:] = [other for other in _measured if other is not measured]
    _State.version = next(_numbers)


@dataclass(frozen=True, slots=True, eq=False)
class _Force:
    """What a block lets run."""

    choices: Mapping[str, str]
    alone: bool
    seen: list[Decision] | None
    version: int


_forced: Stack[_Force] = Stack()
"""The last has its way."""


class Forced(Block[_Force]):
    """Lets candidates run inside a ``with`` block, whatever else is in force: to measure them.

    Can be entered again. Holds for the whole process, as settings do; blocks of several threads may end in any order.
    ``alone``: the other ranks are not asked what else is planned in it, and not bound by it.
    """

    def __init__(self, choices: Mapping[str, str], *, alone: bool = False) -> None:
        super().__init__(_forced, _Force(dict(choices), alone, None, next(_numbers)))


class _Watched(Block[_Force]):
    """What :func:`watched` gives."""

    def __init__(self, alone: bool) -> None:
        now = _forced.entries[-1].value.choices if _forced.entries else {}
        self._seen: list[Decision] = []
        super().__init__(_forced, _Force(now, alone, self._seen, next(_numbers)))

    def __enter__(self) -> list[Decision]:  # type: ignore[override]
        super().__enter__()
        return self._seen


def watched(*, alone: bool = False) -> AbstractContextManager[list[Decision]]:
    """What is decided for the problems that run inside a ``with`` block, each planned anew.

    ``alone``: without the other ranks. Who is yet to measure must not agree with them on the cost model's choice.
    """
    return _Watched(alone)
