"""What compiling costs a program that did not ask for it beforehand: written down, and said once it is over.

The first step of a model compiles one kernel after another, wherever a convolution first wants one. Nobody tells when
the last of them was compiled. So it is taken to be over when none was for a while, and then one line says how many they
were, how long that took, and where they are kept. Who prepares a model on purpose takes the figures and says them.
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

from ..forking import whole

logger = logging.getLogger(__name__)

QUIET = 3.0
"""Seconds without a compilation after which no more are expected."""
NOTICED = 2.0
"""Seconds of compiling that a person notices: what took as long is said where warnings are."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Kernels that were compiled, several at a time."""

    kernels: int = 0
    seconds: float = 0.0
    """In which at least one of them was being compiled."""
    longest: str = ""
    longest_seconds: float = 0.0
    """Of the one that took longest: with any number of cores it takes as long."""


class Compilations:
    """What a cache has compiled since it was last asked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found = Compiled()
        self._process = os.getpid()
        self._running = 0
        self._since = 0.0
        """When the first of those that are running began; else when the last ended."""

    @contextmanager
    def noted(self, symbol: str) -> Iterator[None]:
        """Around the compilation of a kernel; one that fails counts as well, for the time that it took."""
        began = self._clock()
        with whole:
            self._forget_parent()
            if not self._running:
                self._since = began
            self._running += 1
        try:
            yield
        finally:
            with whole:
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
        """What a parent process was compiling when this one was forked off, nobody compiles here."""
        if self._process != os.getpid():
            self._process, self._running = os.getpid(), 0

    @property
    def waits(self) -> bool:
        """Whether there is something that nobody was told of."""
        return self._found.kernels > 0

    @property
    def quiet(self) -> float:
        """Seconds since the last compilation; none while one is running."""
        with whole:
            self._forget_parent()
            return 0.0 if self._running else self._clock() - self._since

    def take(self) -> Compiled:
        """What was compiled since this was last asked."""
        with whole:
            found, self._found = self._found, Compiled()
            return found


class Teller:
    """Says what was compiled, in one line, when it is over.

    Args:
        compilations: what is told of.
        arch: the architecture that they are for.
        cache: the folder that they are kept in; None where none is known.
        quiet: how long to wait for more.
    """

    def __init__(self, compilations: Compilations, arch: str, cache: Path | None, quiet: float = QUIET) -> None:
        self._compilations = compilations
        self._arch = arch
        self._cache = cache
        self._quiet = quiet
        self._timer: threading.Timer | None = None

    def listen(self) -> None:
        """To be called when something may have been compiled."""
        if not self._compilations.waits:
            return
        with whole:
            if self._timer is None:
                atexit.register(self.tell)
            if self._timer is None or not self._timer.is_alive():  # that of a parent process is dead here
                self._wait(self._quiet)

    def tell(self) -> None:
        """Now, if there is anything to say."""
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
            with whole:
                self._wait(left)
        else:
            self.tell()
