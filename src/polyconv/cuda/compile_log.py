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
from collections import Counter
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
        self._spans: list[tuple[float, float, str]] = []
        """Start, end and symbol of each."""
        self._ended = clock()
        self._running: Counter[int] = Counter()
        """By process: after a fork, the parent's compilations do not run in the child."""

    @contextmanager
    def noted(self, symbol: str) -> Iterator[None]:
        """Context around the compilation of one kernel. A failed compilation counts, too."""
        began, process = self._clock(), os.getpid()
        with STATE_LOCK:
            self._running[process] += 1
        try:
            yield
        finally:
            with STATE_LOCK:
                self._running[process] -= 1
                self._ended = self._clock()
                self._spans.append((began, self._ended, symbol))

    def quiet(self) -> float | None:
        """Time [s] since the last compilation, 0 while one is running; None if all are over and reported."""
        with STATE_LOCK:
            if self._running[os.getpid()]:
                return 0.0
            return self._clock() - self._ended if self._spans else None

    def take(self) -> Compiled:
        """Return the statistics and reset them."""
        with STATE_LOCK:
            spans, self._spans = sorted(self._spans), []
        seconds = until = 0.0
        for began, ended, _ in spans:
            seconds += max(0.0, ended - max(began, until))
            until = max(until, ended)
        longest, symbol = max(((ended - began, symbol) for began, ended, symbol in spans), default=(0.0, ""))
        return Compiled(len(spans), seconds, symbol, longest)


class Teller:
    """Logs compilations in one line after a quiet period [s]. ``cache``: the cache folder; None if there is none."""

    def __init__(self, compilations: Compilations, arch: str, cache: Path | None, quiet: float = QUIET) -> None:
        self._compilations = compilations
        self._arch = arch
        self._cache = cache
        self._quiet = quiet
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Start waiting for the quiet period if there are unreported compilations."""
        if self._compilations.quiet() is None:
            return
        with STATE_LOCK:
            if self._thread is None:
                atexit.register(self.tell)
            if self._thread is None or not self._thread.is_alive():  # a parent process's thread is dead after a fork
                self._thread = threading.Thread(target=self._wait, daemon=True)
                self._thread.start()

    def tell(self) -> None:
        """Log unreported compilations now, if any."""
        found = self._compilations.take()
        if found.kernels:
            kept = f"the cache is {self._cache}" if self._cache is not None else "nothing says where to keep them"
            logger.log(
                logging.WARNING if found.seconds >= NOTICED else logging.INFO,
                "polyconv compiled %d kernel%s for %s in %.1f s; %s. polyconv.warmup(model, x) compiles those of a "
                "model beforehand, side by side",
                *(found.kernels, "" if found.kernels == 1 else "s", self._arch, found.seconds, kept),
            )

    def _wait(self) -> None:
        while (quiet := self._compilations.quiet()) is not None and quiet < self._quiet:
            time.sleep(self._quiet - quiet)
        self.tell()
