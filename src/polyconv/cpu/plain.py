"""Direct summation written for clarity (``csrc/cpu/plain``): float64, and whatever no other kernel takes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ..accuracy import error_of
from ..problem import Problem
from ..readiness import Run
from .candidates import CpuCandidate
from .device import CpuDevice
from .running import own_operators
from .weights import TransformedWeights

NAME = "plain"
"""Written for clarity: float64, and whatever no other kernel takes."""

CALL_CYCLES = 2e5
"""Of one call, whatever it computes: so that no other one is too slow for the smallest of problems."""


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The one kernel. Its sums are in double, so that only the result is rounded."""
    cycles = CALL_CYCLES + problem.multiplications * 40.0 / device.lanes
    yield CpuCandidate(NAME, "direct", direct=True, cycles=cycles, error=partial(error_of, problem, None, 1, ()))


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    return own_operators("plain", problem)
