"""Depthwise engine (``csrc/cpu/depthwise``): one input channel per group, so the sum is over taps only.

Beside direct summation there is a fast algorithm for many taps (``segments-inl.h``): F(4, 4) along both axes, whose
segments of 4 x 4 taps are a correlation over transformed tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from fractions import Fraction
from functools import lru_cache, partial
from math import prod

from torch import Tensor

from ...algebra.cook_toom import INFINITY
from ...algebra.segments import AxisScheme, Scheme2d
from ...backend import Run
from ...lowering.border import has_border
from ...numerics.prediction import Way, error_of, reduction_of
from ...problem import HALF_DTYPES, Pass, Problem
from ...tuning_key import layout
from ...util.intmath import ceil_div
from .. import native
from ..device import CpuDevice
from ..operators import Instead, Judge, own_operators
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


BY_SEGMENTS = 1
"""Number of the fast algorithm; direct summation has 0."""

TILE, LONGEST_SUM = 4, 64
"""Outputs of a tile and taps of a segment, along an axis; most products that are added in sequence, of whole rows."""

FEWEST_TAPS = 81
"""Least number of taps of the fast algorithm: with fewer, transforms take longer than the products that it saves."""

DOUBT = 1.15
"""Required advantage of the fast algorithm over direct summation, by whose measurements profiles correct it."""

POINT_CYCLES, INPUT_CYCLES, OUTPUT_CYCLES, WEIGHT_CYCLES = 0.6, 300.0, 330.0, 1100.0
"""Cycles per vector of channels: of a product at a point, and to transform a tile of the input, one of the output, and
a segment."""


def refusal(problem: Problem) -> str | None:
    if problem.channels_per_group[0] != 1:
        return f"{problem.channels_per_group[0]} input channels per group, not one"
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    return None


def why_not_by_segments(problem: Problem) -> str | None:
    """Why the fast algorithm does not run a problem, or None."""
    if (why_not := refusal(problem)) is not None:
        return why_not
    if problem.kind is Pass.WGRAD:
        return "computes outputs, not weights"
    if problem.channels_per_group != (1, 1) or problem.rank != 2:
        return "of one output channel per group"
    if max(*problem.stride, *problem.dilation) > 1 or has_border(problem):
        return "of unit stride, without dilation, with zeros around the input"
    if prod(problem.kernel) < FEWEST_TAPS or min(problem.kernel) < TILE:
        return f"of at least {FEWEST_TAPS} taps, {TILE} along each axis"
    if any(1 not in (strides[1], strides[3]) for strides in (problem.x_strides, problem.y_strides)):
        return "of tensors with contiguous channels or columns"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """Direct summation, and the fast algorithm."""
    error = partial(_error, problem)
    yield CpuCandidate.single(NAME, refusal(problem), lambda: SETUP_CYCLES + _cycles(problem, device.lanes), error)
    form = f"F({TILE},{TILE}) x F({TILE},{TILE}) in segments"
    why_not = why_not_by_segments(problem)
    if device.instruction_set == "sse4":
        why_not = "compiled for AVX2 and AVX-512, and for ARM64"
    if why_not is not None:
        yield CpuCandidate(NAME, form, BY_SEGMENTS, refusal=why_not)
        return
    weight_cycles, cycles = _cycles_by_segments(problem, device.lanes)
    yield CpuCandidate(
        NAME,
        form,
        BY_SEGMENTS,
        cycles=DOUBT * (SETUP_CYCLES + weight_cycles + cycles),
        weight_cycles=DOUBT * weight_cycles,
        error=lambda: max(way.error(problem) for way in _ways(problem)),
    )


def ways(chosen: CpuCandidate, problem: Problem) -> Iterator[Way]:
    """How output maps are summed by the fast algorithm; empty for direct summation."""
    if chosen.algorithm == BY_SEGMENTS:
        yield from _ways(problem)


def _ways(problem: Problem) -> Iterator[Way]:
    down, across = (ceil_div(taps, TILE) for taps in problem.kernel)
    rows = min(down, max(1, LONGEST_SUM // across))
    yield Way(_scheme(), down * across, (rows * across, ceil_div(down, rows)), (problem.kernel[0], problem.kernel[1]))


@lru_cache(maxsize=1)
def _scheme() -> Scheme2d:
    """The fast algorithm of a segment, at the points of ``csrc/cpu/common/cook_toom.h`` for seven."""
    finite = [sign * Fraction(p) for p in ("1", "1/4", "3/2") for sign in (1, -1)]
    axis = AxisScheme.cut(TILE, TILE, points=(INFINITY, *finite))
    return Scheme2d(axis, axis)


def takes_half(problem: Problem) -> bool:
    """True if the kernels take half-precision tensors, of which they widen blocks of channels: dense ones."""
    tensors = (
        (problem.x_shape, problem.x_strides),
        (problem.w_shape, problem.w_strides),
        (problem.y_shape, problem.y_strides),
    )
    return problem.rank == 2 and all(layout(*tensor) in ("nchw", "nhwc") for tensor in tensors)


def prepare(
    chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None, instead: Instead | None = None
) -> Run:
    by_segments = chosen.algorithm == BY_SEGMENTS
    if problem.kind is Pass.DGRAD and (by_segments or problem.dtype in HALF_DTYPES):
        geometry, op = native.geometry_numbers(problem), native.operator("depthwise_dgrad")
        return lambda t: op(t["y"], t["w"], t["x"], geometry, t.pop("bias", None), by_segments)
    if not by_segments:
        return own_operators("depthwise", problem)
    geometry, op = native.geometry_numbers(problem), native.operator("depthwise_fprop")
    activation, transform = native.activation_numbers(problem.activation), native.operator("depthwise_transform")
    judge = Judge(weights, instead)

    def forward(tensors: MutableMapping[str, Tensor]) -> None:
        x, w, y, transformed = tensors["x"], tensors["w"], tensors["y"], None
        if weights is not None:
            owner = tensors.get("owner")
            transformed = weights.of(x, w, y, [], [-2], problem.frozen, owner, lambda: transform(w.float()))
            tensors["w"] = w = w.float()
            if transformed is not None and (other := judge(w, transformed)) is not None:
                other(tensors)
                return
        op(x, w, tensors.get("bias"), y, geometry, tensors.get("residual"), *activation, True, transformed)

    return forward


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


def _cycles_by_segments(problem: Problem, lanes: int) -> tuple[float, float]:
    """Estimated cycles of one core: for the weight's transform, and for the rest."""
    vectors, pairs, inputs, outputs, segments = ceil_div(problem.groups, lanes), 1.0, 1.0, 1.0, 1.0
    written = problem.in_size if problem.kind is Pass.DGRAD else problem.out_size
    read = problem.out_size if problem.kind is Pass.DGRAD else problem.in_size
    for axis in range(2):
        rows, count = ceil_div(written[axis], TILE), ceil_div(problem.kernel[axis], TILE)
        with_pixels = min(ceil_div(read[axis], TILE) + 1, rows + count - 1)
        segments, outputs, inputs = segments * count, outputs * rows, inputs * with_pixels
        # Rows of tiles without pixels are skipped; most columns are not.
        pairs *= rows * count * (min(1.0, with_pixels / max(rows, count)) if axis == 0 else 1.0)
    points = (2 * TILE - 1) ** 2
    moved = 5.0 / lanes * (prod(problem.x_shape) + prod(problem.y_shape))
    each = POINT_CYCLES * points * pairs + INPUT_CYCLES * inputs + OUTPUT_CYCLES * outputs
    return WEIGHT_CYCLES * vectors * segments, problem.batch * vectors * each + moved


def _scatters(problem: Problem) -> bool:
    to_one_channel = problem.kind is Pass.DGRAD and problem.groups == 1
    return to_one_channel and (max(problem.stride) > 1 or problem.in_size[0] == 1)


def _picks_pixels(problem: Problem) -> bool:
    """True if lines are assembled pixel by pixel: in channels_last only a channel multiplier of 1 allows whole vectors
    of channels."""
    return problem.channels_per_group[1] != 1 and problem.x_strides[1] == 1
