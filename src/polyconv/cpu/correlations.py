"""A pass as what the kernels see: correlations of unit stride between sub-lattices of the images.

Stride and dilation share their common divisor: with a stride of 2 and a dilation of 1, the taps fall into two classes
per axis, each of which reads every second pixel. Forward, the classes are further input channels of one correlation;
in the input gradient each class of pixels is a correlation of its own (:mod:`polyconv.algebra.lattice`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from ..algebra.lattice import gradient_phases
from ..problem import Pair, Pass, Problem


@dataclass(frozen=True, slots=True)
class Correlation:
    """One correlation of one group: ``size`` outputs in ``outputs`` channels, each a sum over ``channels`` and taps."""

    batch: int
    channels: int
    outputs: int
    size: Pair
    taps: Pair
    dilation: Pair
    strided: bool = False
    """Whether neighbouring columns, read or written, do not follow one another in memory."""


@lru_cache(maxsize=4096)
def correlations(problem: Problem) -> tuple[Correlation, ...]:
    """What one group of a forward pass or of an input gradient is made of."""
    c, k = problem.channels_per_group
    if problem.kind is Pass.DGRAD:
        per_axis = [
            gradient_phases(
                problem.in_size[axis],
                problem.kernel[axis],
                problem.stride[axis],
                problem.dilation[axis],
                problem.padding[2 * axis],
            )
            for axis in range(2)
        ]
        return tuple(
            Correlation(
                problem.batch,
                k,
                c,
                (h.count, w.count),
                (h.taps, w.taps),
                (-h.tap_step, -w.tap_step),
                problem.stride[1] != 1,
            )
            for h in per_axis[0]
            for w in per_axis[1]
            if h.taps and w.taps
        )
    common = [gcd(problem.stride[axis], problem.dilation[axis]) for axis in range(2)]
    classes = [min(problem.stride[axis] // common[axis], problem.kernel[axis]) for axis in range(2)]
    taps = tuple(-(-problem.kernel[axis] // classes[axis]) for axis in range(2))
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
