"""Version of the global planning state: settings, preferences, backend overrides, observers, number of threads.

Cached plans store the version and are stale when :func:`now` differs. Returning to an earlier state returns its earlier
version, so a ``with`` block in a loop reuses its plans.

The threads that count are those that the calling thread may use, ``torch.get_num_threads()``: PyTorch's kernels and
polyconv's run on as many. With OpenMP each thread has a count of its own: ``torch.set_num_threads`` is for the thread
that calls it, and for threads that compute for the first time after that.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, TypeVar

from .forking import whole

T = TypeVar("T", bound=Hashable)

_modules = sys.modules
_sources: list[Callable[[], Hashable]] = []
_numbers = itertools.count(1)
seen: list[Any] = [{}, None]
"""The numbers of the state that was seen last, by the count of threads, none since it changed; and the process group,
None where there was none. It is not kept alive, a program may destroy it: it is known by a weak reference. ``csrc/ops``
reads both."""
_change = object()
"""Another one after each change."""
_group_changes = 0


def _threads_once_torch_is_there() -> int:
    """Replaces itself by ``torch.get_num_threads``: settings can be read without importing torch."""
    global _threads
    _threads = getattr(_modules.get("torch"), "get_num_threads", _threads)
    return 0 if _threads is _threads_once_torch_is_there else _threads()


_threads: Callable[[], int] = _threads_once_torch_is_there


def follow(source: Callable[[], T]) -> Callable[[], T]:
    """Make what a function gives a part of the state. Whoever makes it give something else says so: :func:`changed`."""
    _sources.append(source)
    return source


def group() -> Any:
    """The default process group as it is now, None where there is none: cheap enough to ask on every call."""
    c10d: Any = _modules.get("torch.distributed.distributed_c10d")  # not in every build of PyTorch
    return None if c10d is None else c10d._world.default_pg


def now() -> int:
    """The number of the state in force. Cheap: asked on every call, so the group is looked up without a call."""
    c10d: Any = _modules.get("torch.distributed.distributed_c10d")
    group_now = None if c10d is None else c10d._world._default_pg
    if group_now is not None or seen[1] is not None:
        _look_at(group_now)
    return seen[0].get(_threads()) or _settle()


def changed() -> None:
    """To be said before and after a change, in ``with whole``: nobody else learns a number of the state meanwhile."""
    global _change
    _change = object()
    seen[0] = {}


def _look_at(group_now: Any) -> None:
    """A process group comes and goes without a word to anyone."""
    global _group_changes
    if group_now is None or seen[1] is None or seen[1]() is not group_now:
        with whole:
            seen[1] = None if group_now is None else weakref.ref(group_now)
            _group_changes = next(_numbers)
            changed()


def _settle() -> int:
    with whole:
        while True:
            change, numbers, threads = _change, seen[0], _threads()
            number = _number_of((threads, _group_changes, *(source() for source in _sources)))
            if _change is change:  # else the block that somebody forgot ended meanwhile, in this thread
                numbers[threads] = number
                return number


@lru_cache(maxsize=1024)
def _number_of(state: Hashable) -> int:
    return next(_numbers)
