"""Depthwise convolutions (``csrc/cpu/depthwise*``): one channel in, so nothing to sum over but the taps."""

from __future__ import annotations

from collections.abc import Iterator

from ..problem import Problem
from .candidates import Candidate, Engine, error_of, reduction_of
from .device import CpuDevice


def refusal(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    if problem.channels_per_group[0] != 1:
        return f"{problem.channels_per_group[0]} input channels per group, not one"
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[Candidate]:
    """The one family of kernels."""
    why_not = refusal(problem)
    yield Candidate(
        Engine.DEPTHWISE,
        "direct",
        direct=True,
        cycles=problem.multiplications * 0.8 / device.lanes,
        error=0.0 if why_not else error_of(problem, None, reduction_of(problem), ()),
        refusal=why_not,
    )
