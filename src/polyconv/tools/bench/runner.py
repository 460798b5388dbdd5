"""Runs contests one after another in a separate process, until all are done or a time limit is reached.

A contest that fails becomes a :class:`Failure` and the others continue, even if it killed the process, as PyTorch 2.13
does in the weight gradient of a strided 1x1 layer in channels_last (heap corruption).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context
from typing import Any, Generic, Protocol, TypeVar

from ...cpu import native


class Result(Protocol):
    """Result of a contest: a row of a table."""

    @property
    def key(self) -> str:
        """Identifier of the contest, stable across runs."""

    @property
    def headline(self) -> float:
        """Speed-up over PyTorch that the progress display shows."""

    def as_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Result, covariant=True)


@dataclass(frozen=True, slots=True)
class Contest(Generic[R]):
    """A row to measure. ``run`` must be picklable."""

    key: str
    run: Callable[[], R]


@dataclass(frozen=True, slots=True)
class Failure:
    key: str
    reason: str


def run(contests: Sequence[Contest[R]], seconds: float | None = None) -> Iterator[R | Failure]:
    """Yield each result when measured; no contest starts after ``seconds``."""
    until = inf if seconds is None else time.monotonic() + seconds
    runs = _Worker()
    try:
        for contest in contests:
            if time.monotonic() >= until:
                return
            yield runs.run(contest)
    finally:
        runs.close()


class _Worker:
    """Process that runs contests, replaced after a contest that killed it."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def run(self, contest: Contest[R]) -> R | Failure:
        if self._pool is None:
            self._pool = worker()
        try:
            return self._pool.submit(contest.run).result()
        except BrokenProcessPool:
            self.close()
            return Failure(contest.key, "it ended the process that ran it")
        except Exception as error:  # raised by a network or a kernel: goes into the report
            return Failure(contest.key, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def worker(preload: Sequence[str] = ()) -> ProcessPoolExecutor:
    """A process forked from one that has only imported packages, those of ``preload``."""
    context = get_context("forkserver")
    if preload:
        context.set_forkserver_preload(list(preload))
    return ProcessPoolExecutor(1, context, _begin, (instruction_set(),))


def instruction_set() -> str:
    """Instruction set of the native kernels, which workers then use; empty without native kernels."""
    return native.instruction_set() if native.is_available() else ""


def _begin(isa: str) -> None:
    """Initialise a worker: ignore Ctrl-C, which the parent handles, and use the parent's instruction set."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isa:
        native.instruction_set(isa)
