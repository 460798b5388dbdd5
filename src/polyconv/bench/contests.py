"""Contests of any kind, run one after another in a process of their own, until all are or a time limit ends them.

One that cannot be run is a :class:`Failure`, and the rest go on: also where it ended the process, as PyTorch 2.13 does
in the weight gradient of a strided 1x1 layer in channels_last (its heap is corrupt then).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context
from typing import Any, Generic, Protocol, TypeVar

from ..cpu import native


class Result(Protocol):
    """What a contest found: a row of a table."""

    @property
    def key(self) -> str:
        """Which contest it was, in words: the same for every run of it."""

    @property
    def headline(self) -> float:
        """The one ratio that is told as soon as it is known: how many times as fast as PyTorch."""

    def as_json(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Result, covariant=True)


@dataclass(frozen=True, slots=True)
class Contest(Generic[R]):
    """One row to be. What it runs can be sent to another process."""

    key: str
    run: Callable[[], R]


@dataclass(frozen=True, slots=True)
class Failure:
    """A contest that could not be run."""

    key: str
    reason: str


def outstanding(contests: Sequence[Contest[R]], known: Collection[str]) -> list[Contest[R]]:
    """Those whose keys are not among the known ones."""
    return [contest for contest in contests if contest.key not in known]


def run(contests: Sequence[Contest[R]], seconds: float | None = None) -> Iterator[R | Failure]:
    """What each found, as it is measured; none is begun after so many seconds."""
    until = inf if seconds is None else time.monotonic() + seconds
    worker = _Worker()
    try:
        for contest in contests:
            if time.monotonic() >= until:
                return
            yield worker.run(contest)
    finally:
        worker.close()


class _Worker:
    """A process that runs contests; when one ends it, the next gets a new one."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def run(self, contest: Contest[R]) -> R | Failure:
        if self._pool is None:
            isa = native.instruction_set() if native.is_available() else ""
            self._pool = ProcessPoolExecutor(1, get_context("forkserver"), begin, (isa,))
        try:
            return self._pool.submit(contest.run).result()
        except BrokenProcessPool:
            self.close()
            return Failure(contest.key, "it ended the process that ran it")
        except Exception as error:  # whatever a network or a kernel did: the report says it
            return Failure(contest.key, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def begin(isa: str) -> None:
    """Set a new process up: Ctrl-C is for the one that started it, and kernels are for the same instruction set."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isa:
        native.instruction_set(isa)
