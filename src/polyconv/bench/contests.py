"""Contests of any kind, run one after another: what is known is not measured again, and a time limit ends them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Generic, Protocol, TypeVar


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
    """One row to be."""

    key: str
    run: Callable[[], R]


def outstanding(contests: Sequence[Contest[R]], known: Collection[str]) -> list[Contest[R]]:
    """Those whose keys are not among the known ones."""
    return [contest for contest in contests if contest.key not in known]


def run(contests: Sequence[Contest[R]], seconds: float | None = None) -> Iterator[R]:
    """The rows, as they are measured; none is begun after so many seconds."""
    until = inf if seconds is None else time.monotonic() + seconds
    for contest in contests:
        if time.monotonic() >= until:
            return
        yield contest.run()
