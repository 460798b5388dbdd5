"""Direct summation written for clarity (``csrc/cpu/plain``): float64, and whatever no other kernel takes."""

from __future__ import annotations

from collections.abc import Iterator

from ..accuracy import error_of
from ..problem import Problem
from .candidates import CpuCandidate, Engine
from .device import CpuDevice


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The one kernel. Its sums are in double, so that only the result is rounded."""
    cycles = problem.multiplications * 40.0 / device.lanes
    yield CpuCandidate(Engine.PLAIN, "direct", direct=True, cycles=cycles, error=error_of(problem, None, 1, ()))
