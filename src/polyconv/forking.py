"""What a fork waits for.

A forked child has a copy of the memory and of one thread. What the other threads were about stays as it was, for ever:
a lock that one of them held is never released, those of Python's own around modules that are being imported included.
So what a first call loads and builds, and what changes in several steps, is done in ``with whole:``. A fork takes that
lock as well. It waits until things are whole, and a child finds them so, and the lock free. What a first call imports
has the lock ``importing``.

No call whose plan is made takes one, and nobody inside waits for a thread that may want it.
"""

from __future__ import annotations

import os
import threading
from typing import Any


def _taken_by_forks() -> Any:
    """A lock that is held while the process is copied. Reentrant: a handler of signals may fork amid all this."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


importing = _taken_by_forks()
"""Held by the threads of :mod:`polyconv.importing`, for which others wait that hold the lock ``whole``."""
whole = _taken_by_forks()  # after the other: a fork takes what was registered last first, and this is the right order
