"""Lazy imports at the first call that needs a module: complete, or not at all.

Python runs signal handlers in the middle of an import as anywhere else: Ctrl-C would leave half-imported modules, and
a handler that makes a first call itself would find them. But handlers run in the main thread only. So a thread of its
own imports a module to the end, while the caller waits and may be interrupted. A fork waits for that thread as well.
"""

from __future__ import annotations

import _thread  # not threading, whose locks may be held when a signal handler runs
from importlib import import_module
from types import ModuleType

from .fork_safety import IMPORT_LOCK


def imported(name: str) -> ModuleType:
    """Import a module. Raises what its import raises."""
    return _Import(name).result()


class _Import:
    """One import and its thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._outcome: ModuleType | BaseException | None = None
        self._running = _thread.allocate_lock()

    def result(self) -> ModuleType:
        self._running.acquire()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # no thread can be started, as at interpreter shutdown: import in this one
            self._run()
        with self._running:
            if isinstance(self._outcome, ModuleType):
                return self._outcome
            assert self._outcome is not None
            raise self._outcome

    def _run(self) -> None:
        try:
            with IMPORT_LOCK:
                self._outcome = import_module(self._name)
        except BaseException as error:
            self._outcome = error
        finally:
            self._running.release()
