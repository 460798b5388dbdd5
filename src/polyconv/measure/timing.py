"""How calls are timed: in turn, so that whatever else the machine does meets every candidate alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, nan
from statistics import median
from typing import Any

import torch

from ..standings import Standings

SHORTEST = 2e-3
"""Seconds that one sample lasts at least: shorter calls are repeated within it, and the sample is their mean."""
MOST_CALLS = 200
"""Calls within one sample, at most."""
FEWEST_ROUNDS = 3
"""Rounds that are run whatever they take."""
SGEMM_SIZE = 1024

Within = Mapping[str, Callable[[], AbstractContextManager[object]]]
"""By candidate: the state of the program in which its calls are made, entered and left outside the timing."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call."""

    best: float
    median: float
    cpu: float = nan
    """Of all threads of the process together, at best: what is left of the time on a machine that others use, too."""

    @classmethod
    def of(cls, samples: list[float], cpu: list[float]) -> Timing:
        return cls(best=min(samples), median=median(samples), cpu=min(cpu))


Sample = Callable[[Callable[[], object], int], float]
"""Calls something so many times and gives the seconds that one call took, the mean of them."""


def sample(call: Callable[[], object], times: int) -> float:
    """Seconds per call by this process's clock."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def cuda_sample(call: Callable[[], object], times: int) -> float:
    """Seconds per call by the clock of the current GPU: see :func:`current`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A ``with`` block in which a GPU is the current one, on which events are recorded; nothing for the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    repeats: int,
    timer: Sample = sample,
    *,
    within: Within | None = None,
    patience: float = inf,
    stays: Collection[str] | None = None,
) -> dict[str, Timing]:
    """Time the calls in turn, ``repeats`` times; each round starts with another one.

    A first round, not counted, warms up caches, pools and threads, and says how many calls make a sample.

    Args:
        calls: the candidates.
        repeats: rounds.
        timer: takes one sample; on a GPU, one that waits for it.
        within: the state in which a candidate runs; those that are not named run in the one that is there.
        patience: seconds after which no more than :data:`FEWEST_ROUNDS` are run.
        stays: who is timed to the end; of the others, who is far behind drops out. Everybody, unless they are named.
    """
    names = list(calls)
    states = {name: (within or {}).get(name, nullcontext) for name in names}
    began = time.perf_counter()
    per_sample = {}
    for name, call in calls.items():
        with states[name]():
            call()
            once = timer(call, 1)
            if once < SHORTEST:
                once = min(once, timer(call, 1))
        per_sample[name] = max(1, min(MOST_CALLS, ceil(SHORTEST / max(once, 1e-9))))
    standings = Standings(names, repeats, names if stays is None else stays)
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        if turn >= FEWEST_ROUNDS and time.perf_counter() - began > patience:
            break
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name not in standings.running:
                continue
            with states[name]():
                if name in (within or {}) and per_sample[name] > 1:
                    calls[name]()  # the state changed: what follows from it, a plan, is found again
                before = time.process_time()
                seconds = timer(calls[name], per_sample[name])
                cpu[name].append((time.process_time() - before) / per_sample[name])
            standings.note(name, seconds)
    return {name: Timing.of(list(found), cpu[name]) for name, found in standings.samples.items()}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch's thread pool, which polyconv shares, at ``count`` threads inside a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=8)
def sgemm_rate(count: int, repeats: int = 10) -> float:
    """Multiply-adds per second of ``torch.mm`` at ``count`` threads: what a machine gives to dense arithmetic.

    The clock and the units of a virtual machine cannot be read, so a peak is not computed; it is measured, once.
    """
    a, b = (torch.randn(SGEMM_SIZE, SGEMM_SIZE) for _ in range(2))
    with threads(count), torch.inference_mode():
        return SGEMM_SIZE**3 / interleaved({"mm": lambda: torch.mm(a, b)}, repeats)["mm"].best
