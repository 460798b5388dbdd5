"""Depthwise convolutions (``csrc/cpu/depthwise``): one channel in, so nothing to sum over but the taps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

from ..accuracy import error_of, reduction_of
from ..problem import Pass, Problem
from ..readiness import Run
from . import native
from .candidates import CpuCandidate
from .device import CpuDevice
from .running import own_operators
from .weights import TransformedWeights

NAME = "depthwise"
"""One channel in, a few out: nothing to sum over but taps."""

SETUP_CYCLES = 5000.0
"""Of one call, to cut the work and lay out the ring of lines: more than a few pixels are worth."""

PICKED_CYCLES = 14.0
"""To move a single pixel out of, or into, a line of the cache that has other channels beside it."""

ORDINARY_SUM = 1024
"""Products that a lane of a weight gradient is taken to add at least, so that predictions for ordinary images are the
same on every processor: rows of up to 512 outputs are cut into shorter sums by each instruction set."""


def refusal(problem: Problem) -> str | None:
    """Why these kernels cannot run the problem, or None."""
    if problem.channels_per_group[0] != 1:
        return f"{problem.channels_per_group[0]} input channels per group, not one"
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The one family of kernels."""
    why_not = refusal(problem)
    yield CpuCandidate(
        NAME,
        "direct",
        direct=True,
        cycles=SETUP_CYCLES + _cycles(problem, device.lanes),
        error=0.0 if why_not else partial(_error, problem),
        refusal=why_not,
    )


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    return own_operators("depthwise", problem)


def _error(problem: Problem) -> float:
    return error_of(problem, None, _longest_sum(problem), ())


def _longest_sum(problem: Problem) -> int:
    """Products that are added in sequence. In a weight gradient a lane adds so many and goes on in double."""
    reduction = reduction_of(problem)
    if problem.kind is not Pass.WGRAD:
        return reduction
    return min(reduction, max(ORDINARY_SUM, native.depthwise_longest_sum(problem)))


def _cycles(problem: Problem, lanes: int) -> float:
    """Estimated cycles of one core: every pixel moves once, every product is computed once."""
    moved = prod(problem.x_shape) + prod(problem.y_shape)
    again = 1.6 if problem.kind is Pass.WGRAD else 1.0
    per_pixel = PICKED_CYCLES if _picks_pixels(problem) else 10.0 / lanes
    return again * (per_pixel * moved + 0.5 * problem.multiplications / lanes)


def _picks_pixels(problem: Problem) -> bool:
    """Whether the lines of a channel are put together pixel by pixel: only channels that each have one of their own
    for an output are taken side by side, as they lie in channels_last."""
    return problem.channels_per_group[1] != 1 and problem.x_strides[1] == 1
