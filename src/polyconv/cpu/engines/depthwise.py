"""Depthwise engine (``csrc/cpu/depthwise``): one input channel per group, so the sum is over taps only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

from ...backend import Run
from ...numerics.prediction import error_of, reduction_of
from ...problem import HALF_DTYPES, Pass, Problem
from ...tuning_key import layout
from .. import native
from ..device import CpuDevice
from ..operators import own_operators
from ..plan import CpuCandidate
from ..weight_cache import TransformedWeights

NAME = "depthwise"

SETUP_CYCLES = 5000.0
"""Cost of a call's setup: splitting the work and laying out the ring of lines."""

PICKED_CYCLES = 14.0
"""Cycles to load or store a single pixel in a cache line that holds other channels."""

SCATTERED_CYCLES = 3.0
"""Cycles per product of an input gradient of one channel with a stride, or of signals: few of a vector's lanes are in
use."""

ORDINARY_SUM = 1024
"""Assumed minimum of products that a lane of a weight gradient adds, so that predictions for ordinary images are equal
on every processor: each instruction set cuts rows of up to 512 outputs into shorter sums."""


def refusal(problem: Problem) -> str | None:
    if problem.channels_per_group[0] != 1:
        return f"{problem.channels_per_group[0]} input channels per group, not one"
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate."""
    error = partial(_error, problem)
    yield CpuCandidate.single(NAME, refusal(problem), lambda: SETUP_CYCLES + _cycles(problem, device.lanes), error)


def takes_half(problem: Problem) -> bool:
    """True if the kernels take half-precision tensors, of which they widen blocks of channels: dense ones."""
    tensors = (
        (problem.x_shape, problem.x_strides),
        (problem.w_shape, problem.w_strides),
        (problem.y_shape, problem.y_strides),
    )
    return problem.rank == 2 and all(layout(*tensor) in ("nchw", "nhwc") for tensor in tensors)


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    if problem.dtype in HALF_DTYPES and problem.kind is Pass.DGRAD:
        geometry, op = native.geometry_numbers(problem), native.operator("depthwise_dgrad")
        return lambda t: op(t["y"], t["w"], t["x"], geometry, t.pop("bias", None))
    return own_operators("depthwise", problem)


def _error(problem: Problem) -> float:
    return error_of(problem, None, _longest_sum(problem), ())


def _longest_sum(problem: Problem) -> int:
    """Longest sequential sum. A lane of a weight gradient adds a limited number of products before it uses double."""
    reduction = reduction_of(problem)
    if problem.kind is not Pass.WGRAD:
        return reduction
    return min(reduction, max(ORDINARY_SUM, native.depthwise_longest_sum(problem)))


def _cycles(problem: Problem, lanes: int) -> float:
    """Estimated cycles of one core: every pixel moves once, every product is computed once."""
    moved = prod(problem.x_shape) + prod(problem.y_shape)
    again = 1.6 if problem.kind is Pass.WGRAD else 1.0
    per_pixel = PICKED_CYCLES if _picks_pixels(problem) else 10.0 / lanes
    per_product = SCATTERED_CYCLES if _scatters(problem) else 0.5 / lanes
    return again * (per_pixel * moved + per_product * problem.multiplications)


def _scatters(problem: Problem) -> bool:
    to_one_channel = problem.kind is Pass.DGRAD and problem.groups == 1
    return to_one_channel and (max(problem.stride) > 1 or problem.in_size[0] == 1)


def _picks_pixels(problem: Problem) -> bool:
    """True if lines are assembled pixel by pixel: in channels_last only a channel multiplier of 1 allows whole vectors
    of channels."""
    return problem.channels_per_group[1] != 1 and problem.x_strides[1] == 1
