"""Passthrough cache. If a module's previous call ran ATen and the new call satisfies its guards, call ATen directly.

Most layers of a converted network may stay with ATen and must not become slower. In a network the guards take about
18 microseconds in Python, three quarters of it cache misses, because between two calls Python's objects are evicted.
So native code (``csrc/dispatch``) checks them, in less time than ``torch.nn.Conv2d`` spends on its attributes. A wheel
contains it, and ``python csrc/build.py`` builds it in place. Without it each call takes the fast path.

Profilers, modes and other observers of calls need no guard, since ATen's convolution is visible to all of them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime import state_version
from ..runtime.frozen_weights import frozen_marks

_MODULE = "polyconv.dispatch._native"

HIDING = "weight", "bias", "_conv_forward"
"""Instance attributes that would hide the module's parameters or the method of its class."""
NEVER_OF_A_CLASS = "weight", "bias", "__getattribute__"
"""Class attributes that would hide the parameters or change attribute lookup."""
ANY: Any = Ellipsis
"""Placeholder for the value of an attribute that a call does not depend on."""


class LastCall(NamedTuple):
    """Guards of a module's previous call, and its call of ATen. ``csrc/dispatch`` relies on the order of the fields."""

    while_it_lives: weakref.ref[torch.nn.Module]
    number: int
    """State version (:mod:`polyconv.runtime.state_version`)."""
    graded: bool
    """Grad mode."""
    is_frozen: bool
    """Whether the weight is frozen (:mod:`polyconv.runtime.frozen_weights`)."""
    biased: bool
    guard: Callable[..., bool]
    """Guard on input, weight and bias (if any)."""
    aten: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    """Arguments of ATen's convolution after the tensors."""
    kind: type[Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    """Names and values of the module's instance attributes, in order; :data:`ANY` for those without effect."""
    classes: tuple[dict[str, Any], ...]
    size: int
    """Namespaces of the module's classes, and their total size: a property or method added later changes it."""
    of_classes: tuple[tuple[dict[str, Any], str, Any], ...]
    """Class attributes that the call depends on: namespace, name, value."""


def _cache() -> Any:
    """Last calls by the ``id`` of their module, in native code; None without the extension.

    An entry is dropped with its module, and stored outside of it: copies and pickles do not contain it. Each call
    compares the module's attributes with those of the cached call, so changes need no notification, and a change by
    another thread during a call is seen by the next call.
    """
    try:
        native = import_module(_MODULE)
    except ImportError:
        return None
    return native.PassthroughCache(state_version.seen, frozen_marks, torch.is_grad_enabled, torch.get_num_threads, ANY)


cache = _cache()


def _never(module: torch.nn.Module, x: Tensor) -> Tensor | None:
    return None


again: Callable[[torch.nn.Module, Tensor], Tensor | None] = _never if cache is None else cache.again
"""Output of ATen's convolution if the module has a cached call whose guards hold, else None."""


def remember(
    module: Any,
    number: int,
    graded: bool,
    is_frozen: bool,
    bias: Tensor | None,
    guard: Callable[..., bool],
    aten: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    names: tuple[str, ...],
    values: tuple[Any, ...],
) -> None:
    """Cache a module's call, unless guards cannot describe it. ``values``: attributes ``names`` when it was called."""
    if cache is None:
        return
    key, kind, wanted = id(module), type(module), dict(zip(names, values, strict=True))
    own = tuple(module.__dict__)
    has = set(own)
    if not has.isdisjoint(HIDING):
        return
    classes: list[dict[str, Any]] = []
    of_classes: list[tuple[dict[str, Any], str, Any]] = []
    for each in kind.__mro__[:-1]:
        attributes = vars(each)
        (dictionary,) = gc.get_referents(attributes)
        classes.append(dictionary)
        for name in attributes.keys() & {*names, "_conv_forward"}:
            value = attributes[name]
            if name in wanted and hasattr(type(value), "__get__"):
                return
            of_classes.append((dictionary, name, value if name in has else wanted.get(name, value)))
        has.update(attributes)
    size = sum(map(len, classes))
    # Checked after all reads: a concurrent change is seen here, or by the guards of the next call.
    if not getattr(module, "_comes_straight_here", False) or kind.__getattr__ is not torch.nn.Module.__getattr__:
        return
    if not has.isdisjoint(NEVER_OF_A_CLASS) or not has.issuperset(names):
        return
    while_it_lives = weakref.ref(module, lambda _: cache.forget(key))
    how = graded, is_frozen, bias is not None, guard, aten, arguments
    what = own, tuple(wanted.get(name, ANY) for name in own), tuple(classes), size, tuple(of_classes)
    cache.remember(key, LastCall(while_it_lives, number, *how, kind, *what))
