"""Version of the global planning state: settings, preferences, backend overrides, observers, number of threads.

Cached plans store the version and are stale when :func:`current` differs. Returning to an earlier state returns its
earlier version, so a ``with`` block in a loop reuses its plans.

The number of threads is ``torch.get_num_threads()``, which PyTorch's kernels and polyconv's use. With OpenMP each
calling thread has its own: ``torch.set_num_threads`` sets it for the caller, and for threads that first compute later.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar

from .fork_safety import STATE_LOCK

T = TypeVar("T", bound=Hashable)

_modules = sys.modules
_sources: list[Callable[[], Hashable]] = []
_numbers = itertools.count(1)
seen: list[Any] = [{}, None]
"""Versions of the current state by number of threads, emptied by each change; and a weak reference to the process
group (a program may destroy it), None without one. ``csrc/dispatch`` reads both."""
listeners: list[Callable[[], None]] = []
"""Called after each change, and when a weight is frozen or no longer: native code follows them."""
_change = object()
"""A new object after each change."""
_group_changes = 0


def _threads_once_torch_is_there() -> int:
    """Replaces itself by ``torch.get_num_threads`` once torch is imported: settings can be read without it."""
    global _threads
    _threads = getattr(_modules.get("torch"), "get_num_threads", _threads)
    return 0 if _threads is _threads_once_torch_is_there else _threads()


_threads: Callable[[], int] = _threads_once_torch_is_there


def include(source: Callable[[], T]) -> Callable[[], T]:
    """Make the result of a function part of the state. A change of the result must call :func:`changed`."""
    _sources.append(source)
    return source


def group() -> Any:
    """The default process group, None without one. Cheap enough for every call."""
    c10d: Any = _modules.get("torch.distributed.distributed_c10d")  # not in every build of PyTorch
    return None if c10d is None else c10d._world.default_pg


def current() -> int:
    """The version of the current state. Read on every call, so the group is looked up without a function call."""
    c10d: Any = _modules.get("torch.distributed.distributed_c10d")
    group_now = None if c10d is None else c10d._world._default_pg
    if group_now is not None or seen[1] is not None:
        _look_at(group_now)
    return seen[0].get(_threads()) or _settle()


def changed() -> None:
    """Invalidate the version: before and after a change, holding ``STATE_LOCK``: no version is made in between."""
    global _change
    _change = object()
    seen[0] = {}
    announce()


def announce() -> None:
    """Call the listeners."""
    for listener in listeners:
        listener()


def _look_at(group_now: Any) -> None:
    """Detect a change of the process group, which PyTorch does not announce."""
    global _group_changes
    if group_now is None or seen[1] is None or seen[1]() is not group_now:
        with STATE_LOCK:
            seen[1] = None if group_now is None else weakref.ref(group_now)
            _group_changes = next(_numbers)
            changed()


def _settle() -> int:
    with STATE_LOCK:
        while True:
            change, numbers, threads = _change, seen[0], _threads()
            number = _number_of((threads, _group_changes, *(source() for source in _sources)))
            if _change is change:  # else an abandoned block was collected meanwhile, in this thread
                numbers[threads] = number
                return number


@lru_cache(maxsize=1024)
def _number_of(state: Hashable) -> int:
    return next(_numbers)
