"""Frozen weights: every write to them moves their version counters, as :func:`polyconv.freeze` promises.

Known by identity, and only while they live: a copy, a weight loaded in its place, or the same weight in another process
is not frozen. The weak reference is to the tensor's ``__dict__``, because ``torch.utils.swap_tensors`` refuses a tensor
that has one itself. The dictionary lives as long as the tensor, and no copy or pickle takes it along.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from . import state_version
from .fork_safety import STATE_LOCK


class _Attributes(dict[str, Any]):
    """``__dict__`` of a tensor that allows weak references. Pickled as a plain dict."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


FrozenMark = weakref.ref[_Attributes]
"""A new object for each call of :func:`mark_frozen`."""

frozen_marks: dict[int, FrozenMark] = {}
"""Promises by ``id`` of the weight: cheap enough for a lookup on every call, which decides how a call is planned."""


def mark_of(weight: Any) -> FrozenMark | None:
    """The promise about a weight, None if it is not frozen. Required before cached data replaces reading the weight."""
    promise = frozen_marks.get(id(weight))
    return promise if promise is not None and promise() is weight.__dict__ else None


def is_frozen(module: Any) -> bool:
    """Whether the weight of a module is frozen."""
    return mark_of(module._parameters.get("weight")) is not None


def mark_frozen(weight: Any) -> bool:
    """Register ``weight`` as frozen until :func:`unmark_frozen` or deallocation. Returns False if it already was."""
    key = id(weight)
    with STATE_LOCK:
        news = mark_of(weight) is None
        attributes = _Attributes(weight.__dict__)
        weight.__dict__ = attributes
        frozen_marks[key] = weakref.ref(attributes, partial(_forget, key))
        state_version.announce()
    return news


def unmark_frozen(weight: Any) -> bool:
    """Unregister a frozen weight. Returns False if it was not frozen."""
    with STATE_LOCK:
        if mark_of(weight) is None:
            return False
        del frozen_marks[id(weight)]
        weight.__dict__ = dict(weight.__dict__)
        state_version.announce()
    return True


def _forget(key: int, promise: FrozenMark) -> None:
    """Called when the weight, or the tensor that its ``__dict__`` was swapped to, is deallocated."""
    if frozen_marks.get(key) is promise:
        del frozen_marks[key]
