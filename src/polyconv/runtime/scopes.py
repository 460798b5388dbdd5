"""Scopes: ``with`` blocks that change process-wide state, and whose end is not lost to Ctrl-C.

Python delivers a signal between any two steps of a program, also in ``__enter__`` and ``__exit__``. So the effect of a
block is one entry of a stack, ending it is idempotent, and the entry of a block interrupted before its end is removed
when the block is garbage collected, together with the traceback that refers to it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from . import state_version
from .fork_safety import STATE_LOCK

T = TypeVar("T")
G = TypeVar("G")

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class ScopeEntry(Generic[T]):
    """Effect of entering a block once."""

    value: T
    forgotten: weakref.ref[Any] | None = None
    """Removes the entry when the block is garbage collected; None after the block has ended."""
    number: int = field(default_factory=_numbers.__next__)
    """Number of the block, equal for each time it is entered."""


class ScopeStack(Generic[T]):
    """Entries in force, in the order entered. Blocks of several threads may end in any order.

    ``settle`` is called after each change, and again if it was interrupted. Without it, the numbers of the entries are
    part of the state of :mod:`~polyconv.runtime.state_version`.
    """

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self.entries: tuple[ScopeEntry[T], ...] = ()
        self._settle = settle
        if settle is None:
            state_version.include(lambda: tuple(entry.number for entry in self.entries))

    def put(self, entry: ScopeEntry[T]) -> None:
        self._change(lambda entries: (*entries, entry))

    def take(self, entry: ScopeEntry[T]) -> None:
        """Remove an entry, if it is there."""
        self._change(lambda entries: tuple(other for other in entries if other is not entry))

    def _change(self, changed: Callable[[tuple[ScopeEntry[T], ...]], tuple[ScopeEntry[T], ...]]) -> None:
        with STATE_LOCK:
            state_version.changed()
            while True:
                before = self.entries
                after = changed(before)
                if self.entries is before:  # else a block was garbage collected meanwhile, and its entry removed
                    self.entries = after
                    break
            if self._settle is not None:
                self._settle()
            state_version.changed()


class Scope(ContextDecorator, Generic[T, G]):
    """Context manager that puts ``value`` in force and returns ``gives``. Reusable and reentrant."""

    def __init__(self, stack: ScopeStack[T], value: T, gives: G) -> None:
        self._stack = stack
        self._value = value
        self._gives = gives
        self._number = next(_numbers)
        self._open: tuple[ScopeEntry[T], ...] = ()
        """Entries that have not ended."""

    def __enter__(self) -> G:
        stack, entry = self._stack, ScopeEntry(self._value, number=self._number)
        entry.forgotten = weakref.ref(self, lambda _: stack.take(entry))
        self._open = (*self._open, entry)
        try:
            stack.put(entry)
        except BaseException:
            self._end(entry)
            raise
        return self._gives

    def __exit__(self, *_: object) -> None:
        entry = self._open[-1]
        try:
            self._end(entry)
        except BaseException:
            self._end(entry)
            raise

    def _end(self, entry: ScopeEntry[T]) -> None:
        self._stack.take(entry)
        self._open = tuple(other for other in self._open if other is not entry)
        entry.forgotten = None
