"""Reference engine: direct summation written for clarity (``csrc/cpu/reference``), for float64 and as a fallback."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...backend import Run
from ...numerics.prediction import error_of
from ...problem import Problem
from ..device import CpuDevice
from ..operators import own_operators
from ..plan import CpuCandidate
from ..weight_cache import TransformedWeights

NAME = "plain"

CALL_CYCLES = 2e5
"""Fixed cost of a call, so large that even the smallest problems prefer another engine."""


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate. It sums in double, so only the result is rounded."""
    cycles = CALL_CYCLES + problem.multiplications * 40.0 / device.lanes
    yield CpuCandidate(NAME, "direct", direct=True, cycles=cycles, error=partial(error_of, problem, None, 1, ()))


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    return own_operators("plain", problem)
