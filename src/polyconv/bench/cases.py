"""How modules run against each other: in which mode and layout, how many images at once, on how many threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ..problem import Word


class Layout(Word):
    """The order in memory of images and weights, on both sides."""

    NCHW = "nchw"
    CHANNELS_LAST = "channels_last"


class Mode(Word):
    """What is timed: a call without gradients, or a step of training."""

    INFERENCE = "inference"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run a module."""

    mode: Mode
    layout: Layout
    batch: int
    threads: int

    def __str__(self) -> str:
        return f"{self.mode}, {self.layout}, batch {self.batch}, {self.threads} threads"


@dataclass(frozen=True, slots=True)
class Cases:
    """All ways that are asked for, and how often each is tried."""

    modes: Sequence[Mode] = tuple(Mode)
    layouts: Sequence[Layout] = tuple(Layout)
    batches: Sequence[int] = (1, 8)
    threads: Sequence[int] = (1,)
    repeats: int = 7
    benchmark: bool = False
    """Whether ours is raced first, with :func:`polyconv.benchmark`, until all of its choices are made."""

    def __iter__(self) -> Iterator[Case]:
        for case in product(self.modes, self.layouts, self.batches, self.threads):
            yield Case(*case)
