"""A pass as the kernels see it: correlations of unit stride between sub-lattices of the images.

Stride and dilation are divided by their common divisor. With stride 2 and dilation 1 the taps fall into two classes per
axis, each reading every second pixel. In a forward pass the classes are additional input channels of one correlation;
in the input gradient each class of pixels is a correlation of its own (:mod:`polyconv.algebra.polyphase`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from ...algebra.polyphase import gradient_phases
from ...problem import Extents, Pass, Problem
from ...util.intmath import ceil_div


@dataclass(frozen=True, slots=True)
class Correlation:
    """One correlation of one group: ``size`` outputs in ``outputs`` channels, each a sum over ``channels`` and taps."""

    batch: int
    channels: int
    outputs: int
    size: Extents
    taps: Extents
    dilation: Extents
    strided: bool = False
    """True if neighbouring columns, read or written, are not adjacent in memory."""
    times: int = 1
    """Number of correlations that differ only in their start: a stride has as many pixel classes, but few kinds."""


def _kinds(problem: Problem, axis: int) -> Counter[tuple[int, int, int]]:
    """(count, taps, dilation) of the pixel classes along an axis that meet a tap, with their multiplicity."""
    phases = gradient_phases(
        problem.in_size[axis],
        problem.kernel[axis],
        problem.stride[axis],
        problem.dilation[axis],
        problem.padding[2 * axis],
    )
    return Counter((phase.count, phase.taps, -phase.tap_step) for phase in phases if phase.taps)


@lru_cache(maxsize=4096)
def correlations(problem: Problem) -> tuple[Correlation, ...]:
    """The correlations of one group of a forward pass or an input gradient."""
    c, k = problem.channels_per_group
    if problem.kind is Pass.DGRAD:
        rows, columns = _kinds(problem, 0), _kinds(problem, 1)
        return tuple(
            Correlation(
                problem.batch,
                k,
                c,
                (h_count, w_count),
                (h_taps, w_taps),
                (h_dilation, w_dilation),
                problem.stride[1] != 1,
                h_times * w_times,
            )
            for (h_count, h_taps, h_dilation), h_times in rows.items()
            for (w_count, w_taps, w_dilation), w_times in columns.items()
        )
    common = [gcd(problem.stride[axis], problem.dilation[axis]) for axis in range(2)]
    classes = [min(problem.stride[axis] // common[axis], problem.kernel[axis]) for axis in range(2)]
    taps = tuple(ceil_div(problem.kernel[axis], classes[axis]) for axis in range(2))
    dilation = tuple(problem.dilation[axis] // common[axis] for axis in range(2))
    return (
        Correlation(
            problem.batch,
            c * prod(classes),
            k,
            problem.out_size,
            (taps[0], taps[1]),
            (dilation[0], dilation[1]),
            problem.stride[1] != 1,
        ),
    )
