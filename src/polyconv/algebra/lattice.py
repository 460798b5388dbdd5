"""Stride and dilation as lattices: a convolution along one axis as dense, unit-stride problems on sub-lattices.

Forward, ``y[i] = sum_r w[r] * x[i * stride - before + r * dilation]``. Every output position reads the taps in the same
way, so one phase covers the axis.

Its input gradient (and so a transposed convolution) is ``dx[h] = sum w[r] * dy[o]`` over the pairs with
``h + before = o * stride + r * dilation``. Only the taps with ``r * dilation = h + before (mod stride)`` meet an output
at all. So the positions h fall into ``stride`` residue classes, each with its own subset of taps, evenly spaced; within
a class position and output advance together. Looping over classes, no tap is multiplied by a structural zero.

A fast algorithm wants more: a dense correlation, of unit stride on both sides, taps forward. :func:`dense_axis` brings
any phase into that form. A stride of the reading side splits the taps once more, into classes that are summed like
channels; what dilation is left splits the positions; and taps that run backwards are read from the other end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from ..rounding import ceil_div


@dataclass(frozen=True, slots=True)
class Phase:
    """One residue class along one axis.

    Position ``i < count`` is written at ``written_first + i * written_step``. Its tap ``j < taps`` reads the source at
    ``read_first + i * read_step + j * tap_step`` with kernel element ``tap_first + j * tap_stride``.
    """

    written_first: int
    written_step: int
    count: int
    read_first: int
    read_step: int
    tap_step: int
    taps: int
    tap_first: int
    tap_stride: int

    def cut(self, first: int, count: int) -> Phase:
        """The ``count`` positions from number ``first`` on: how large problems are cut into slabs."""
        return replace(
            self,
            written_first=self.written_first + first * self.written_step,
            read_first=self.read_first + first * self.read_step,
            count=min(count, self.count - first),
        )

    def forwards(self) -> Phase:
        """The same with taps that read forward: those that run backwards, from the other end."""
        if self.tap_step > 0 or not self.taps:
            return self
        last = self.taps - 1
        return replace(
            self,
            read_first=self.read_first + last * self.tap_step,
            tap_step=-self.tap_step,
            tap_first=self.tap_first + last * self.tap_stride,
            tap_stride=-self.tap_stride,
        )


def forward_phases(outputs: int, kernel: int, stride: int, dilation: int, before: int) -> tuple[Phase, ...]:
    """The single phase of a forward convolution with ``before`` elements of padding in front."""
    return (
        Phase(
            written_first=0,
            written_step=1,
            count=outputs,
            read_first=-before,
            read_step=stride,
            tap_step=dilation,
            taps=kernel,
            tap_first=0,
            tap_stride=1,
        ),
    )


def gradient_phases(inputs: int, kernel: int, stride: int, dilation: int, before: int) -> tuple[Phase, ...]:
    """The phases of the input gradient, one per residue of the stride that has any position, taps or not."""
    common = gcd(stride, dilation)
    tap_stride = stride // common
    tap_step = -(dilation // common)
    meeting = {r * dilation % stride: r for r in range(min(tap_stride, kernel))}
    phases = []
    # As many residues as the stride has, but for those that it steps over the whole image with.
    for residue, first in sorted(((first + before) % stride, first) for first in range(min(stride, inputs))):
        tap = meeting.get(residue)
        phases.append(
            Phase(
                written_first=first,
                written_step=stride,
                count=ceil_div(inputs - first, stride),
                read_first=0 if tap is None else (first + before - tap * dilation) // stride,
                read_step=1,
                tap_step=tap_step,
                taps=0 if tap is None else ceil_div(kernel - tap, tap_stride),
                tap_first=tap or 0,
                tap_stride=tap_stride,
            )
        )
    return tuple(phases)


@dataclass(frozen=True, slots=True)
class TapClass:
    """Taps of a :class:`DenseAxis` that read the same residue of the source: tap ``t < taps`` of position i reads
    ``read_first + read_step * (i + dilation * t)`` with kernel element ``tap_first + t * tap_stride``."""

    read_first: int
    taps: int
    tap_first: int
    tap_stride: int


@dataclass(frozen=True, slots=True)
class DenseAxis:
    """One phase as dense correlations, one per class of taps, that are added up.

    Position ``i < count`` is written at ``written_first + i * written_step``. The positions ``i = a + dilation * q`` of
    each ``a < dilation`` are consecutive outputs q of a correlation with consecutive taps: what F(m, r) computes.
    """

    written_first: int
    written_step: int
    count: int
    read_step: int
    dilation: int
    classes: tuple[TapClass, ...]

    @property
    def taps(self) -> int:
        """Of the first class, the longest; the others are filled up with zeros."""
        return self.classes[0].taps


def dense_axis(phase: Phase) -> DenseAxis:
    """A phase with taps forward and both sides of unit stride. One that meets no tap has no tap: it writes zeros."""
    if not phase.taps:
        return DenseAxis(phase.written_first, phase.written_step, phase.count, 1, 1, (TapClass(0, 0, 0, 0),))
    phase = phase.forwards()
    common = gcd(phase.read_step, phase.tap_step)
    apart = phase.read_step // common
    classes = tuple(
        TapClass(
            read_first=phase.read_first + first * phase.tap_step,
            taps=ceil_div(phase.taps - first, apart),
            tap_first=phase.tap_first + first * phase.tap_stride,
            tap_stride=apart * phase.tap_stride,
        )
        for first in range(min(apart, phase.taps))
    )
    return DenseAxis(
        phase.written_first, phase.written_step, phase.count, phase.read_step, phase.tap_step // common, classes
    )
