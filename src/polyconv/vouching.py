"""Weights that somebody vouches for: nobody writes to them behind their version counters.

Known by identity, and only as long as they live: a copy, a weight that was loaded in the place of one, or the same one
in another process is not vouched for.
"""

from __future__ import annotations

import weakref
from typing import Any

from .forking import whole

vouched: dict[int, weakref.ref[Any]] = {}
"""By ``id``, because it is asked on every call: whether a weight is among them."""


def is_frozen(module: Any) -> bool:
    """Whether the weight of a module is one of them."""
    return id(module._parameters.get("weight")) in vouched


def vouch(weight: Any) -> bool:
    """From now on, while the weight lives, until :func:`doubt`. Gives whether that is news."""
    key = id(weight)
    with whole:
        news = key not in vouched
        vouched[key] = weakref.ref(weight, lambda _: vouched.pop(key, None))
    return news


def doubt(weight: Any) -> bool:
    """The reverse. Gives whether that is news."""
    with whole:
        return vouched.pop(id(weight), None) is not None
