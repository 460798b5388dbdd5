"""Modules that are imported at the first call that needs them: whole, or not at all.

A first call may be interrupted, or come from a handler of signals that itself interrupts a first call; and Python runs
such handlers in the middle of an import as anywhere else. Ctrl-C then leaves modules that are half there, and a second
import of the same thread finds one that is. But handlers run in the main thread only. So a module is imported by a
thread of its own, to the end; who asked for it waits, and may be interrupted. A fork waits for that thread as well.
"""

from __future__ import annotations

import _thread  # not threading, whose own locks a handler of signals may find taken
from importlib import import_module
from types import ModuleType

from .forking import importing


def imported(name: str) -> ModuleType:
    """The module of this name. Raises what its import raises."""
    return _Import(name).result()


class _Import:
    """One import, and the thread that does it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._outcome: ModuleType | BaseException | None = None
        self._running = _thread.allocate_lock()

    def result(self) -> ModuleType:
        self._running.acquire()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no more threads, as at the end of the interpreter: then this one has to do
            self._run()
        with self._running:
            if isinstance(self._outcome, ModuleType):
                return self._outcome
            assert self._outcome is not None
            raise self._outcome

    def _run(self) -> None:
        try:
            with importing:
                self._outcome = import_module(self._name)
        except BaseException as error:
            self._outcome = error
        finally:
            self._running.release()
