"""Weights that somebody vouches for: nobody writes to them behind their version counters.

Known by identity, and only as long as they live: a copy, a weight that was loaded in the place of one, or the same one
in another process is not vouched for. A weak reference to a tensor would tell as much, but
``torch.utils.swap_tensors`` refuses a tensor that has one. So the reference is to the dictionary of its attributes,
which lives as long as the tensor, and which no copy and no pickle takes along.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from .forking import whole


class _Attributes(dict[str, Any]):
    """Attributes of a tensor, in a dictionary that can be referred to weakly. A pickle has a plain one."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


Promise = weakref.ref[_Attributes]
"""A new object for each call of :func:`vouch`."""

vouched: dict[int, Promise] = {}
"""By ``id``, because it is asked on every call: whether a plan for a weight may count on a promise."""


def promise_of(weight: Any) -> Promise | None:
    """The promise about a weight, if there is one: to be asked before anything is used without reading the weight."""
    promise = vouched.get(id(weight))
    return promise if promise is not None and promise() is weight.__dict__ else None


def is_frozen(module: Any) -> bool:
    """Whether the weight of a module is one of them."""
    return promise_of(module._parameters.get("weight")) is not None


def vouch(weight: Any) -> bool:
    """From now on, while the weight lives, until :func:`doubt`. Gives whether that is news."""
    key = id(weight)
    with whole:
        news = promise_of(weight) is None
        attributes = _Attributes(weight.__dict__)
        weight.__dict__ = attributes
        vouched[key] = weakref.ref(attributes, partial(_forget, key))
    return news


def doubt(weight: Any) -> bool:
    """The reverse. Gives whether that is news."""
    with whole:
        if promise_of(weight) is None:
            return False
        del vouched[id(weight)]
        weight.__dict__ = dict(weight.__dict__)
    return True


def _forget(key: int, promise: Promise) -> None:
    """The weight is gone, or its attributes are another tensor's now and gone with that."""
    if vouched.get(key) is promise:
        del vouched[key]
