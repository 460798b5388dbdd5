"""Polyphase decomposition of stride and dilation: one axis as dense, unit-stride correlations on sub-lattices.

Forward, ``y[i] = sum_r w[r] * x[i * stride - before + r * dilation]``: one phase covers the axis.

The input gradient (and a transposed convolution) is ``dx[h] = sum w[r] * dy[o]`` over the pairs with
``h + before = o * stride + r * dilation``. Only taps with ``r * dilation = h + before (mod stride)`` contribute, so the
positions h fall into ``stride`` residue classes, each with its own evenly spaced subset of taps. A loop over the
classes multiplies no tap by a structural zero.

:func:`dense_axis` converts a phase to what fast algorithms need: dense, unit-stride correlations with forward taps. A
read stride splits the taps into classes that are summed like channels; the remaining dilation splits the positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from ..util.intmath import ceil_div


@dataclass(frozen=True, slots=True)
class Phase:
    """One residue class along one axis: position ``i < count`` is written at ``written_first + i * written_step``. Its
    tap ``j < taps`` reads the source at ``read_first + i * read_step + j * tap_step`` with kernel element
    ``tap_first + j * tap_stride``."""

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
        """Slab of at most ``count`` positions, starting at position ``first``."""
        return replace(
            self,
            written_first=self.written_first + first * self.written_step,
            read_first=self.read_first + first * self.read_step,
            count=min(count, self.count - first),
        )

    def forwards(self) -> Phase:
        """Equivalent phase with ``tap_step`` > 0: backward taps are reversed."""
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
    """Single phase of a forward convolution with ``before`` elements of leading padding."""
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
    """Phases of the input gradient, one per residue class that has a position; ``taps`` may be 0."""
    common = gcd(stride, dilation)
    tap_stride = stride // common
    tap_step = -(dilation // common)
    meeting = {r * dilation % stride: r for r in range(min(tap_stride, kernel))}
    phases = []
    # A stride larger than the axis leaves residue classes without a position.
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
    """Taps of a :class:`DenseAxis` that read one residue class of the source: tap ``t < taps`` of position i reads
    ``read_first + read_step * (i + dilation * t)`` with kernel element ``tap_first + t * tap_stride``."""

    read_first: int
    taps: int
    tap_first: int
    tap_stride: int


@dataclass(frozen=True, slots=True)
class DenseAxis:
    """One phase as a sum of dense correlations, one per class of taps.

    Position ``i < count`` is written at ``written_first + i * written_step``. For each ``a < dilation``, the positions
    ``i = a + dilation * q`` are consecutive outputs q of a correlation with consecutive taps, as F(m, r) computes.
    """

    written_first: int
    written_step: int
    count: int
    read_step: int
    dilation: int
    classes: tuple[TapClass, ...]

    @property
    def taps(self) -> int:
        """Taps of the first class, the longest; shorter classes are padded with zeros."""
        return self.classes[0].taps


def dense_axis(phase: Phase) -> DenseAxis:
    """Convert a phase to forward taps and unit stride on both sides. A phase without taps writes zeros."""
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
