"""Who decides what runs: the other ranks, then a measurement of this process, then a tuning file, then the cost model.

A backend asks here when it plans a problem, and plans again when :func:`version` moves.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from . import agreement, settings, tuning
from .plan.preference import Preference
from .tuning import Environment

AGREED = "agreed with the other ranks"
MEASURED = "measured in this process"


class Planned(Protocol):
    """A plan of any backend."""

    @property
    def choice(self) -> str:
        """The chosen candidate's name."""


P = TypeVar("P", bound=Planned)


def decide(key: str, environment: Environment, plan: Callable[[Preference | None], P]) -> P:
    """The plan for a problem.

    Args:
        key: the problem (:func:`polyconv.tuning.problem_key`).
        environment: where it runs; only what was measured in the same one counts.
        plan: the planner, given a preference or none.
    """
    if key in _forced:
        return plan(Preference(_forced[key], "asked for"))
    mine = plan(_own(key, environment))
    if agreement.ranks() == 1:
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
    """What this process would have without the others."""
    if key in _measured:
        return Preference(_measured[key], MEASURED)
    found = tuning.find(key, environment)
    return None if found is None else Preference(found.entry.choice, f"chosen by the tuning file {found.path}")


# ---- when to plan again


class _Seen:
    """What :func:`version` saw last. The group is not kept alive: a program may destroy it."""

    files: Any = None
    group: Callable[[], Any] = staticmethod(lambda: None)
    count = 0


def version() -> int:
    """A number that is another one after anything changed that a choice may depend on. Cheap: asked on every call."""
    files, group = settings.current().tuning_file, agreement.group()
    if files is not _Seen.files or group is not _Seen.group():
        _Seen.files, _Seen.group = files, (lambda: None) if group is None else weakref.ref(group)
        _Seen.count += 1
    return _Seen.count


def _changed() -> None:
    _Seen.count += 1


# ---- choices of this process

_measured: dict[str, str] = {}
_forced: dict[str, str] = {}


def remember(choices: Mapping[str, str]) -> None:
    """Let problems run what was measured to be best for them, from now on: key -> candidate."""
    _measured.update(choices)
    _changed()


def forget(keys: Iterable[str]) -> None:
    """The reverse of :func:`remember`."""
    for key in list(keys):
        _measured.pop(key, None)
    _changed()


@contextmanager
def forced(choices: Mapping[str, str]) -> Iterator[None]:
    """Run these candidates inside a ``with`` block, whatever else is in force: to measure them."""
    before = dict(_forced)
    _forced.update(choices)
    _changed()
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)
        _changed()
