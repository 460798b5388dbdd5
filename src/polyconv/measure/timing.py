"""Interleaved timing of calls, so that other load on the machine affects all candidates alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil, inf, nan
from statistics import median
from typing import Any

import torch

from ..autotune.elimination import Elimination

SHORTEST = 2e-3
"""Least duration [s] of a sample, which is the mean of as many calls as needed."""
MOST_CALLS = 200
"""Most calls per sample."""
FEWEST_ROUNDS = 3
"""Rounds that are run at any patience."""
SGEMM_SIZE = 1024

Within = Mapping[str, Callable[[], AbstractContextManager[object]]]
"""Context in which a candidate's calls are made, by name; entered and left outside the timing."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call."""

    best: float
    median: float
    cpu: float = nan
    """Least CPU time of all threads of the process; not affected by other processes."""

    @classmethod
    def of(cls, samples: list[float], cpu: list[float]) -> Timing:
        return cls(best=min(samples), median=median(samples), cpu=min(cpu))


Sample = Callable[[Callable[[], object], int], float]
"""Returns the mean time [s] of a number of calls."""


def sample(call: Callable[[], object], times: int) -> float:
    """Mean time [s] by the host's clock."""
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def cuda_sample(call: Callable[[], object], times: int) -> float:
    """Mean time [s] by events on the current GPU: see :func:`current`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times


def now(device: torch.device) -> float:
    """The host's clock [s], after a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current device, on which events are recorded; nothing for the CPU."""
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
    """Time the calls in turn, ``repeats`` times; each round starts with another one. A first round, not counted, warms
    up caches, pools and threads, and determines the calls per sample.

    Args:
        calls: the candidates.
        repeats: number of rounds.
        timer: takes one sample; on a GPU, one that synchronises.
        within: contexts of candidates; the others run in the current one.
        patience: time [s] after which rounds beyond :data:`FEWEST_ROUNDS` are skipped.
        stays: candidates that are timed to the end, by default all; of the others, those far behind drop out.
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
        per_sample[name] = calls_per_sample(once)
    standings = Elimination(names, repeats, names if stays is None else stays)
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
                    calls[name]()  # the context changed, so the plan is looked up again
                before = time.process_time()
                seconds = timer(calls[name], per_sample[name])
                cpu[name].append((time.process_time() - before) / per_sample[name])
            standings.note(name, seconds)
    return {name: Timing.of(list(found), cpu[name]) for name, found in standings.samples.items()}


def calls_per_sample(once: float) -> int:
    """Calls whose mean is one sample, by the time [s] of one."""
    return max(1, min(MOST_CALLS, ceil(SHORTEST / max(once, 1e-9))))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run a ``with`` block with ``count`` threads in PyTorch's pool, which polyconv shares."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache(maxsize=8)
def sgemm_rate(count: int, repeats: int = 10) -> float:
    """Multiply-adds per second of ``torch.mm`` with ``count`` threads: the machine's peak of dense arithmetic. Measured
    once, because clock and units of a virtual machine cannot be read."""
    a, b = (torch.randn(SGEMM_SIZE, SGEMM_SIZE) for _ in range(2))
    with threads(count), torch.inference_mode():
        return SGEMM_SIZE**3 / interleaved({"mm": lambda: torch.mm(a, b)}, repeats)["mm"].best


def timings_as_json(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    return {
        name: {f"{what}_ms": seconds * 1e3 for what, seconds in asdict(timing).items()}
        for name, timing in timings.items()
    }


def timings_from_json(found: Mapping[str, Mapping[str, float]]) -> dict[str, Timing]:
    return {
        name: Timing(*(one[f"{what}_ms"] / 1e3 for what in ("best", "median", "cpu"))) for name, one in found.items()
    }
