"""Log of just-in-time compilation during calls: one line once it is over.

The first step of a model compiles kernels one after another, and nothing marks the last one. So compilation counts as
over after a quiet period, and one line then reports the number of kernels, the time and the cache folder.
:func:`polyconv.warmup` takes the figures and reports them itself.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..runtime.fork_safety import STATE_LOCK

logger = logging.getLogger(__name__)

QUIET = 3.0
"""Quiet period [s] without a compilation after which no more are expected."""
NOTICED = 2.0
"""Compile time [s] from which the line is a warning instead of information."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Statistics of compiled kernels; several may compile in parallel."""

    kernels: int = 0
    seconds: float = 0.0
    """Wall-clock time during which at least one kernel was compiling."""
    longest: str = ""
    longest_seconds: float = 0.0
    """Time of the slowest kernel: a lower bound with any number of cores."""


class Compilations:
    """Compilations of a cache since the last :meth:`take`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found = Compiled()
        self._process = os.getpid()
        self._running = 0
        self._since = 0.0
        """Start of the current period of compilation, or end of the last one."""

    @contextmanager
    def noted(self, symbol: str) -> Iterator[None]:
        """Context around the compilation of one kernel. A failed compilation counts, too."""
        began = self._clock()
        with STATE_LOCK:
            self._forget_parent()
            if not self._running:
                self._since = began
            self._running += 1
        try:
            yield
        finally:
            with STATE_LOCK:
                self._ended(symbol, began)

    def _ended(self, symbol: str, began: float) -> None:
        now, found = self._clock(), self._found
        self._running -= 1
        slower = now - began > found.longest_seconds
        self._found = Compiled(
            found.kernels + 1,
            found.seconds + (0.0 if self._running else now - self._since),
            symbol if slower else found.longest,
            now - began if slower else found.longest_seconds,
        )
        if not self._running:
            self._since = now

    def _forget_parent(self) -> None:
        """Reset the count of running compilations after a fork: they run in the parent only."""
        if self._process != os.getpid():
            self._process, self._running = os.getpid(), 0

    @property
    def waits(self) -> bool:
        """Whether there are unreported compilations."""
        return self._found.kernels > 0

    @property
    def quiet(self) -> float:
        """Time [s] since the last compilation; 0 while one is running."""
        with STATE_LOCK:
            self._forget_parent()
            return 0.0 if self._running else self._clock() - self._since

    def take(self) -> Compiled:
        """Return the statistics and reset them."""
        with STATE_LOCK:
            found, self._found = self._found, Compiled()
            return found


class Teller:
    """Logs compilations in one line after a quiet period [s]. ``cache``: the cache folder; None if there is none."""

    def __init__(self, compilations: Compilations, arch: str, cache: Path | None, quiet: float = QUIET) -> None:
        self._compilations = compilations
        self._arch = arch
        self._cache = cache
        self._quiet = quiet
        self._timer: threading.Timer | None = None

    def listen(self) -> None:
        """Start the timer if there are unreported compilations."""
        if not self._compilations.waits:
            return
        with STATE_LOCK:
            if self._timer is None:
                atexit.register(self.tell)
            if self._timer is None or not self._timer.is_alive():  # a parent process's timer is dead after a fork
                self._wait(self._quiet)

    def tell(self) -> None:
        """Log unreported compilations now, if any."""
        found = self._compilations.take()
        if found.kernels:
            kept = f"the cache is {self._cache}" if self._cache is not None else "nothing says where to keep them"
            logger.log(
                logging.WARNING if found.seconds >= NOTICED else logging.INFO,
                "polyconv compiled %d kernel%s for %s in %.1f s; %s. polyconv.warmup(model, x) compiles those of a "
                "model beforehand, side by side",
                found.kernels,
                "" if found.kernels == 1 else "s",
                self._arch,
                found.seconds,
                kept,
            )

    def _wait(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._tell_if_over)
        self._timer.daemon = True
        self._timer.start()

    def _tell_if_over(self) -> None:
        left = self._quiet - self._compilations.quiet
        if left > 0:
            with STATE_LOCK:
                self._wait(left)
        else:
            self.tell()
