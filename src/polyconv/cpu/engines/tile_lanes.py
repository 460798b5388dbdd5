"""Engine with tiles in the vector lanes (``csrc/cpu/tile_lanes``): forward pass and input gradient of large maps.

A scheme computes tiles of outputs by one Cook-Toom algorithm per direction. Its cost is the sum over the kernels'
stages: gather the input, transform it, multiply, transform back, write.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

from ...backend import Run
from ...numerics.prediction import Way, error_of
from ...problem import Pass, Problem
from ...util.intmath import ceil_div
from .. import native
from ..device import CpuDevice
from ..operators import Instead, common_operators
from ..plan import CpuCandidate
from ..weight_cache import TransformedWeights
from .correlations import Correlation, correlations
from .schemes import KernelScheme, compiled, suited

NAME = "tile lanes"

REORDERED, TRANSFORMED, STREAMED = 140.0, 25.0, 16.0
"""Cycles per vector of transformed weights: for direct summation they are reordered one by one, else transformed; and
read once, from beyond the core's caches."""

CHUNK_UNITS, LARGEST_CHUNK = 64, 1280 * 2**10
"""Units of a chunk, and the size up to which its transformed input stays in the cache as a whole [bytes]."""


def schemes() -> tuple[KernelScheme, ...]:
    """Schemes by their numbers."""
    return compiled("tile")


def refusal(problem: Problem) -> str | None:
    if problem.kind is Pass.WGRAD:
        return "computes outputs, not weights"
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """One candidate per scheme."""
    in_general = refusal(problem)
    parts = () if in_general else correlations(problem)
    taps = tuple([part.taps for part in parts])
    for index, (scheme, too_long) in enumerate(suited("tile", taps)):
        why_not = in_general or too_long
        if why_not is not None:
            yield CpuCandidate(NAME, scheme.name, index, scheme.direct, refusal=why_not)
            continue
        weight_cycles = cycles = 0.0
        for part in parts:
            count, vectors = problem.groups * part.times, _weight_vectors(part, scheme, device)
            weight_cycles += count * (REORDERED if scheme.direct else TRANSFORMED) * vectors
            cycles += count * (scheme_cycles(part, scheme, device) + STREAMED * vectors)
        yield CpuCandidate(
            NAME,
            scheme.name,
            index,
            scheme.direct,
            cycles=cycles + weight_cycles,
            weight_cycles=weight_cycles,
            error=partial(_error, problem, parts, index),
        )


def prepare(
    chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None, instead: Instead | None = None
) -> Run:
    return common_operators(chosen, problem, weights, instead)


def ways(chosen: CpuCandidate, problem: Problem) -> Iterator[Way]:
    """How output maps are summed by a fast algorithm; empty for direct summation."""
    scheme = schemes()[chosen.algorithm].exact
    if scheme is not None:
        for part in correlations(problem):
            yield Way(scheme, *_sums(part, chosen.algorithm), (part.taps[0], part.taps[1]))


def _error(problem: Problem, parts: tuple[Correlation, ...], index: int) -> float:
    scheme = schemes()[index].exact
    return max((error_of(problem, scheme, *sums) for sums in {_sums(part, index) for part in parts}), default=0.0)


def _sums(part: Correlation, index: int) -> tuple[int, tuple[int, ...]]:
    """Channels summed by an output, and the longest sequential sum."""
    count = part.channels * schemes()[index].segments(part.taps)
    return count, (native.longest_sum(NAME, index, count),)


def scheme_cycles(part: Correlation, scheme: KernelScheme, device: CpuDevice) -> float:
    """Estimated cycles on one core, without the weights. Fitted on a machine with AVX-512."""
    lanes, c, k, (height, width) = device.lanes, part.channels * scheme.segments(part.taps), part.outputs, part.size
    (d_h, d_w), (m_h, m_w), (n_h, n_w) = part.dilation, scheme.outputs, scheme.points
    bands = part.batch * d_h * ceil_div(ceil_div(height, d_h), m_h)
    units = ceil_div(ceil_div(width, d_w), m_w) * d_w
    vectors = bands * units / lanes
    # Transforms work on whole vectors of a band's units; products pack the units of many bands.
    ragged = bands * ceil_div(units, lanes)
    points, slots, blocks = n_h * n_w, scheme.slots, 2 if scheme.nested else 1
    padded_k = ceil_div(k, device.tile_channels) * device.tile_channels
    products = vectors * points * slots * c * padded_k * 0.45
    gather = ragged * n_h * m_w * c * (20 if part.strided else 12)
    expand = ragged * points * slots * c * 4
    invert = vectors * points * blocks * k * 5
    write = ragged * m_h * m_w * k * 7
    calls = bands * (100 * c + 60 * k)
    # More points mean more address streams and a larger working set. Many channels do not fit in the caches at all, and
    # bands of few units leave lanes empty.
    crowding = 0.61 + 0.0083 * points + (0.3 if c >= 128 else 0.0) + (0.15 if 2 * units <= lanes else 0.0)
    if scheme.direct and part.taps == (1, 1):
        crowding = 0.5  # rows are read in place
    inside = crowding * (products + gather + expand + invert + calls)
    idle = _idle(bands, units, points * slots * c, 2 / n_h if n_h > 2 else 1.0, device)
    return idle * (inside + write)


def _idle(bands: int, units: int, values: int, group: float, device: CpuDevice) -> float:
    """Time of all cores until the last one is done, as a multiple of the time of one core. A thread computes chunks of
    units, or, if neither those nor groups of their points fit into the cache, points. ``values``: of a unit's input."""
    many = bands * units >= 128
    grouped = 4 * 32 * group * values <= device.l2_bytes and (many or 2 * units >= device.lanes)
    if 4 * CHUNK_UNITS * values > LARGEST_CHUNK and not grouped:
        return 1.0
    chunks = max(1, ceil_div(bands * units, CHUNK_UNITS))
    return ceil_div(chunks, device.cores) * device.cores / chunks


def _weight_vectors(part: Correlation, scheme: KernelScheme, device: CpuDevice) -> float:
    """Vectors of transformed weights of one group."""
    channels = part.channels * scheme.segments(part.taps)
    return prod(scheme.points) * scheme.slots * channels * part.outputs / device.lanes
