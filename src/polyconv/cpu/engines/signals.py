"""Depthwise convolutions of signals (``csrc/cpu/signals``): one row per image, one input channel per group.

Memory sets the pace, whatever the dtype: half precision is widened on load, summed in float32 and rounded once. No
profile corrects the estimate, which is the traffic and a cautious cost of the taps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

from ...activation import Activation
from ...backend import Run
from ...numerics.prediction import HALF_ROUNDING, error_of, reduction_of, rounding_error
from ...problem import Pass, Problem
from ..device import CpuDevice
from ..operators import own_operators
from ..plan import CpuCandidate
from ..weight_cache import TransformedWeights

NAME = "signals"

LONGEST_SUM = 2048
"""Most products of a row that a weight gradient adds in float before it continues in double (``kSignalChunk``)."""

SETUP_CYCLES, ROW_CYCLES = 5000.0, 150.0
"""Cost of a call, and of the edges of a row."""

MOVED_CYCLES, TRANSPOSED_CYCLES = 11.0, 22.0
"""Cycles per vector of float32 that is read or written: contiguous along the row, or along the channels."""

COPIED_CYCLES, RESIDUE_CYCLES = 1.5, 60.0
"""With a stride, each output channel's row is copied, so that the elements of a residue class are neighbours: cycles
per element, and per class. Of few outputs it is most of the time: of 32 frames of an STFT, nine tenths."""

WIDENED_CYCLES, SILU_CYCLES = 3.0, 35.0
"""Cycles per vector that is widened or rounded, and per vector of SiLU."""


def refusal(problem: Problem) -> str | None:
    if problem.channels_per_group[0] != 1:
        return f"{problem.channels_per_group[0]} input channels per group, not one"
    if problem.dtype not in ("float32", *HALF_ROUNDING):
        return f"computes in float32, not {problem.dtype}"
    if problem.in_size[0] != 1 or problem.kernel[0] != 1 or any(problem.padding[:2]):
        return "of images of one row"
    if problem.kind is Pass.DGRAD and (problem.stride[1] != 1 or problem.channels_per_group[1] != 1):
        return "the input gradient of a stride or of several outputs per channel"
    result = {Pass.FPROP: problem.y_strides, Pass.DGRAD: problem.x_strides, Pass.WGRAD: (1,)}[problem.kind]
    if result[-1] != 1:
        return "writes contiguous rows"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate."""
    cycles = partial(_cycles, problem, device.lanes)
    yield CpuCandidate.single(NAME, refusal(problem), cycles, partial(_error, problem))


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    return own_operators("signal", problem)


def _error(problem: Problem) -> float:
    count = reduction_of(problem)
    longest = min(count, LONGEST_SUM) if problem.kind is Pass.WGRAD else count
    return error_of(problem, None, longest, ()) + rounding_error(problem)


def _cycles(problem: Problem, lanes: int) -> float:
    """Estimated cycles of one core: every element moves once, or twice with a stride; each product is computed once."""
    half = problem.dtype != "float32"
    cycles = SETUP_CYCLES + ROW_CYCLES * problem.batch * problem.out_channels
    for shape, strides in ((problem.x_shape, problem.x_strides), (problem.y_shape, problem.y_strides)):
        moved = MOVED_CYCLES if strides[-1] == 1 else TRANSPOSED_CYCLES
        cycles += prod(shape) / lanes * (moved / 2 + WIDENED_CYCLES if half else moved)
    if problem.stride[1] > 1:
        row = COPIED_CYCLES * problem.in_size[1] + RESIDUE_CYCLES * problem.stride[1]
        cycles += problem.batch * problem.out_channels * row
    if problem.activation not in (Activation.NONE, Activation.RELU):
        cycles += SILU_CYCLES * prod(problem.y_shape) / lanes
    return cycles + (1.2 if problem.kind is Pass.WGRAD else 1.0) * problem.multiplications / lanes
