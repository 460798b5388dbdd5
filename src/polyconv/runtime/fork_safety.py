"""Locks held across ``os.fork()``.

A forked child has a copy of the memory but only one thread: a lock that another thread held, Python's import locks
included, is never released, and a table that it was updating stays half-updated. So first-call loading and building,
and updates in several steps, hold ``STATE_LOCK``, and a fork acquires it as well. First-call imports hold
``IMPORT_LOCK``.

Calls with a cached plan take neither lock, and code that holds one never waits for a thread that may need it.
"""

from __future__ import annotations

import os
import threading
from typing import Any


def _taken_by_forks() -> Any:
    """A lock that a fork acquires. Reentrant, because a signal handler may fork while the lock is held."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


IMPORT_LOCK = _taken_by_forks()
"""Held by the threads of :mod:`polyconv.runtime.lazy_import`, for which holders of ``STATE_LOCK`` wait."""
STATE_LOCK = _taken_by_forks()  # second: a fork acquires the last registered lock first, and this is the outer one
