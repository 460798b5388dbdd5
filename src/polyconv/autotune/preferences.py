"""Preferences: which candidate is planned for a problem.

In order of precedence: forced, agreed with other ranks, measured in this process, tuning file, cost model.

A cached plan is stale when :mod:`~polyconv.runtime.state_version` differs.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import settings
from ..backend import Backend, Plan
from ..problem import Pass, Problem
from ..runtime import state_version
from ..runtime.fork_safety import STATE_LOCK
from ..runtime.scopes import Scope, ScopeEntry, ScopeStack
from ..selection import Preference
from ..util.lru import LruTable
from . import rank_consensus

if TYPE_CHECKING:
    from ..tuning_key import Environment

AGREED = "agreed with the other ranks"
MEASURED = "measured in this process"


class Decision(NamedTuple):
    """A choice made for a problem."""

    problem: Problem
    inference: bool
    """True if the prepared weight is cached between calls."""
    key: str
    choice: str


P = TypeVar("P", bound=Plan)


def plan(backend: Backend[P], problem: Problem, *, inference: bool = False, w: Tensor | None = None) -> P:
    """Plan a problem by the preference of highest precedence; only measurements of the backend's environment count.

    A plan that lowers a volume has each of its 2-D problems planned in this way. ``w``: as for :meth:`Backend.plan`.
    """
    key, environment = key_of(backend, problem, inference=inference), backend.environment()
    forced = _forced.entries[-1].value if _forced.entries else None
    is_forced = forced is not None and key in forced.choices
    wish = Preference(forced.choices[key]) if forced and is_forced else _own(key, environment)
    found = backend.plan(problem, inference=inference, prefer=wish)
    # Do not publish the cost model's choice before autotuning: the first rank to finish decides.
    alone = is_forced or (forced is not None and forced.alone) or (wish is None and _is_autotuning())
    if not alone and (agreed := rank_consensus.agree(environment.device, key, found.choice)) != found.choice:
        wish = Preference(agreed, AGREED)
        found = backend.plan(problem, inference=inference, prefer=wish)
        if found.choice != agreed:
            warnings.warn(
                f"the other ranks run {agreed!r} for a convolution that cannot run it here ({environment}): "
                f"{found.choice!r} runs instead. Results may differ between ranks in the last bits. Problem: {key}",
                RuntimeWarning,
                stacklevel=2,
            )
    decision = Decision(problem, _caches(backend, problem, inference), key, found.choice)
    for entry in _forced.entries:
        if entry.value.seen is not None and decision not in entry.value.seen:
            entry.value.seen.append(decision)
    if w is not None:
        found = backend.plan(problem, inference=inference, prefer=wish, w=w)
    whole: P = found.with_parts(lambda part: plan(backend, part, inference=inference))  # type: ignore[assignment]
    return whole


def key_of(backend: Backend[Any], problem: Problem, *, inference: bool = False) -> str:
    """Key under which measurements for a problem are stored."""
    from ..tuning_key import problem_key  # lazy, as below: calls with a cached plan do not need it

    return problem_key(problem, kept_weights=_caches(backend, problem, inference))


def _caches(backend: Backend[Any], problem: Problem, inference: bool) -> bool:
    """Whether the weight cache may be used for a weight that is not frozen."""
    return backend.caches_weights and inference and problem.kind is Pass.FPROP


def _own(key: str, environment: Environment) -> Preference | None:
    """Preference of this process, without the other ranks; None leaves it to the cost model."""
    for entry in reversed(_measured.entries):
        if key in entry.value.choices and entry.value.environment == environment:
            return Preference(entry.value.choices[key], entry.value.source)
    outcome = _outcomes[environment, key]
    if outcome is not None:
        return outcome
    from . import tuning_lookup

    found = tuning_lookup.find(key, environment)
    return None if found is None else Preference(found.entry.choice, f"chosen by the tuning file {found.path}")


def are_forced() -> bool:
    """True inside a block of :class:`Forced` or :func:`watched`."""
    return bool(_forced.entries)


def measured(environment: Environment) -> dict[str, str]:
    """Measured choices for an environment, by key, as :func:`plan` prefers them."""
    from . import tuning_lookup

    found: dict[str, str] = {}
    for path in reversed(tuning_lookup.files()):
        found |= tuning_lookup.contents(path).choices(environment)
    found |= {key: outcome.name for (place, key), outcome in _outcomes.every().items() if place == environment}
    for entry in _measured.entries:
        if entry.value.environment == environment:
            found |= entry.value.choices
    return found


def are_none(problem: Problem) -> bool:
    """Whether there is no preference for a 2-D problem or one that differs from it in the width alone, no autotuning
    and no other rank: then equal costs mean equal choices."""
    if _forced.entries or _measured.entries or len(_outcomes) or settings.current().benchmark:
        return False
    from ..tuning_key import problem_key
    from . import tuning_lookup

    return rank_consensus.ranks() == 1 and not tuning_lookup.has_any_width(problem_key(problem))


# ---- online autotuning


def may_autotune(key: str, environment: Environment) -> bool:
    """True if the problem is to be autotuned online: enabled, and without any measured preference."""
    return _is_autotuning() and _own(key, environment) is None


def _is_autotuning() -> bool:
    """True if online autotuning is active: not inside :class:`Forced` or :func:`watched`, nor in deterministic mode."""
    return settings.current().benchmark and not _forced.entries and not determinism_is_asked_for()


def determinism_is_asked_for() -> bool:
    """True if PyTorch is in deterministic mode."""
    return torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic


# ---- invalidation of plans


@state_version.include
def _files() -> int:
    """Identity of the setting: naming the tuning files again invalidates plans, since they may have been rewritten."""
    return id(settings.current().tuning_file)  # the state keeps the settings, and so this tuple, alive


# ---- preferences of this process


class Measured(NamedTuple):
    """Best candidates by key, measured in one environment."""

    environment: Environment
    choices: Mapping[str, str]
    source: str = MEASURED


_measured: ScopeStack[Measured] = ScopeStack()
"""The last one takes precedence."""


def remember(environment: Environment, choices: Mapping[str, str], source: str = MEASURED) -> ScopeEntry[Measured]:
    """Prefer measured choices until :func:`forget`."""
    measured = ScopeEntry(Measured(environment, dict(choices), source))
    _measured.put(measured)
    return measured


def forget(measured: ScopeEntry[Measured]) -> None:
    """Undo :func:`remember`; earlier measurements, for another model say, apply again."""
    _measured.take(measured)


MOST_OUTCOMES = 8192
"""Largest number of autotuning outcomes kept."""

_outcomes: LruTable[tuple[Environment, str], Preference] = LruTable(MOST_OUTCOMES)
"""Outcomes by environment and key. A problem whose outcome is evicted is autotuned again."""
_outcome_changes = 0


@state_version.include
def _outcomes_changed() -> int:
    return _outcome_changes


def settle(environment: Environment, key: str, choice: str, source: str) -> None:
    """Prefer the outcome of an autotuning session from now on; :func:`remember` takes precedence."""
    global _outcome_changes
    with STATE_LOCK:
        state_version.changed()
        _outcomes.put((environment, key), Preference(choice, source))
        _outcome_changes += 1
        state_version.changed()


def forget_outcomes() -> None:
    """Undo every :func:`settle`, so that problems are autotuned again."""
    global _outcome_changes
    with STATE_LOCK:
        state_version.changed()
        _outcomes.clear()
        _outcome_changes += 1
        state_version.changed()


class _Force(NamedTuple):
    """Effect of a :class:`Forced` or :func:`watched` block."""

    choices: Mapping[str, str]
    alone: bool
    seen: list[Decision] | None


_forced: ScopeStack[_Force] = ScopeStack()
"""The last one takes precedence."""


class Forced(Scope[_Force, None]):
    """Force candidates inside a ``with`` block, above all other preferences, to measure them.

    Re-entrant and process-wide, as settings are; blocks of several threads may end in any order. With ``alone``, other
    problems planned inside neither follow nor bind the other ranks.
    """

    def __init__(self, choices: Mapping[str, str], *, alone: bool = False) -> None:
        super().__init__(_forced, _Force(dict(choices), alone, None), None)


def are_watched() -> bool:
    """True inside a :func:`watched` block."""
    return any(entry.value.seen is not None for entry in _forced.entries)


def watched(*, alone: bool = False) -> AbstractContextManager[list[Decision]]:
    """Record the decisions for problems that run inside a ``with`` block, each planned anew. With ``alone``, the other
    ranks are ignored: the cost model's choice must not be agreed on before a measurement."""
    seen: list[Decision] = []
    now = _forced.entries[-1].value.choices if _forced.entries else {}
    return Scope(_forced, _Force(now, alone, seen), seen)
