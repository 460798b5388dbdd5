"""``with`` blocks that change something for the process, and whose end is not lost to Ctrl-C.

Python delivers a signal between any two steps of a program, those of ``__enter__`` and of ``__exit__`` included. So
what a block puts in force is one entry of a stack, there or not; its end may be done twice; and a block that was
interrupted before the first step of its end takes its entry back when it is itself forgotten: when nobody holds the
traceback any more.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from . import epoch
from .forking import whole

T = TypeVar("T")
G = TypeVar("G")

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """What one entering of a block has put in force."""

    value: T
    forgotten: weakref.ref[Any] | None = None
    """Takes the entry back when the block is gone; without it, when the block has ended, nothing needs to."""
    number: int = field(default_factory=_numbers.__next__)
    """Of the block: the same each time that it is entered."""


class Stack(Generic[T]):
    """What is in force, in the order in which it was entered. Blocks of several threads may end in any order.

    Args:
        settle: called after each change, and again if it was interrupted. Without it, which blocks are in force is by
            itself a part of what :mod:`~polyconv.epoch` numbers.
    """

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self.entries: tuple[Entry[T], ...] = ()
        self._settle = settle
        if settle is None:
            epoch.follow(lambda: tuple(entry.number for entry in self.entries))

    def put(self, entry: Entry[T]) -> None:
        self._change(lambda entries: (*entries, entry))

    def take(self, entry: Entry[T]) -> None:
        """Does nothing where the entry is not, or no longer."""
        self._change(lambda entries: tuple(other for other in entries if other is not entry))

    def _change(self, changed: Callable[[tuple[Entry[T], ...]], tuple[Entry[T], ...]]) -> None:
        with whole:
            epoch.changed()
            while True:
                before = self.entries
                after = changed(before)
                if self.entries is before:  # else the entry of a forgotten block was taken back meanwhile
                    self.entries = after
                    break
            if self._settle is not None:
                self._settle()
            epoch.changed()


class Block(ContextDecorator, Generic[T, G]):
    """Puts a value in force while the block runs, and gives something. Can be entered again, also inside itself."""

    def __init__(self, stack: Stack[T], value: T, gives: G) -> None:
        self._stack = stack
        self._value = value
        self._gives = gives
        self._number = next(_numbers)
        self._open: tuple[Entry[T], ...] = ()
        """Entered and not left."""

    def __enter__(self) -> G:
        stack, entry = self._stack, Entry(self._value, number=self._number)
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

    def _end(self, entry: Entry[T]) -> None:
        self._stack.take(entry)
        self._open = tuple(other for other in self._open if other is not entry)
        entry.forgotten = None
