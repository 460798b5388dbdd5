"""Extreme geometry made ordinary: what a convolution with huge numbers computes, said with small ones.

A stride of 2**32 on an image of four pixels is an odd way to ask for one output, and a dilation of 2**32 with as much
padding lets all taps but one meet nothing but zeros. Kernels count in 32 bits, and some of their loops are as long as a
stride or a dilation, so such numbers must not reach them. Here one axis is reduced, in exact integers:

* Outputs that see no pixel have only a bias and an epilogue; taps that no output meets a pixel with have no part in any
  sum, and no gradient. Both are left out at the ends.
* The stride between no more than one output, and the dilation between no more than one tap, mean nothing.
* What is still extreme then has few pairs of an output and a tap that meet a pixel: the pixels are *gathered*, one for
  each pair of a live output and a live tap, and the convolution goes over those. That is also how a border other than
  zeros is reduced.

Ordinary geometry reduces to None: nothing changes for it, not even the name that its plan is known by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .problem import Moves, PaddingMode, Pass, output_extent
from .rounding import ceil_div

if TYPE_CHECKING:
    from .arguments import Geometry

ORDINARY = 1024
"""A stride beyond this is extreme; so is a dilation or a padding beyond this and beyond the image."""
ORDINARY_OF_BOTH = 32
"""A stride beyond this is extreme in an input gradient if the other axis has such a one, too: there are as many phases
as both strides multiply to, and a plan has launches for them. A signal has no other axis."""
POSITIONS = 2**31
"""What kernels can count in 32 bits. They go beyond the padded image by less than a tile, in steps of stride and
dilation: :data:`OVERHANG` of each."""
OVERHANG = 64


class Axis(NamedTuple):
    """One axis of a convolution."""

    extent: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    mode: PaddingMode = PaddingMode.ZEROS
    longest_stride: int = ORDINARY
    """That is not extreme."""

    @classmethod
    def of(
        cls, moves: Moves, in_size: Sequence[int], kernel: Sequence[int], axis: int, longest_stride: int = ORDINARY
    ) -> Axis:
        """One of the axes that a convolution has."""
        return cls(
            in_size[axis],
            kernel[axis],
            moves.stride[axis],
            moves.dilation[axis],
            moves.padding[2 * axis],
            moves.padding[2 * axis + 1],
            PaddingMode(moves.padding_mode),
            longest_stride,
        )

    @property
    def outputs(self) -> int:
        return output_extent(self.extent, self.before, self.after, self.kernel, self.stride, self.dilation)

    @property
    def ordinary(self) -> bool:
        """Whether there is nothing to reduce, by a quick look."""
        limit = max(ORDINARY, self.extent)
        return self.before <= limit and self.after <= limit and self.runs and not self.blind

    @property
    def blind(self) -> bool:
        """Whether no output sees a pixel. There is nothing to run then; some of oneDNN's kernels would crash."""
        return self.mode is PaddingMode.ZEROS and not any(_outputs_that_meet(self, tap) for tap in range(self.kernel))

    def pixel(self, output: int, tap: int) -> int | None:
        """On which pixel a tap of an output lies; None where a zero stands."""
        return self.pixel_at(output * self.stride + tap * self.dilation - self.before)

    def pixel_at(self, place: int) -> int | None:
        """Which pixel stands at a place, counted from the first one, border included; None where a zero stands."""
        last = self.extent - 1
        if self.mode is PaddingMode.REPLICATE:
            return min(max(place, 0), last)
        if self.mode is PaddingMode.CIRCULAR:
            return place % self.extent
        if self.mode is PaddingMode.REFLECT:
            folded = place % max(2 * last, 1)
            return min(folded, 2 * last - folded)
        return place if 0 <= place <= last else None

    @property
    def runs(self) -> bool:
        """Whether kernels run it, and run it well."""
        if self.stride > self.longest_stride or self.dilation > max(ORDINARY, self.extent):
            return False
        places = self.extent + max(self.before, 0) + max(self.after, 0)
        return places + OVERHANG * (self.stride + self.dilation) < POSITIONS


class AxisReduction(NamedTuple):
    """One axis with the dead ends left out."""

    whole: Axis
    outputs: Sequence[int]
    """Those of the whole that are computed. A range, unless pixels are gathered."""
    taps: Sequence[int]
    """Those of the whole that are multiplied."""
    axis: Axis
    """What is left to compute; where there are no outputs, nothing is."""
    gathered: bool = False
    """Whether its pixels are gathered: place ``r * len(outputs) + o`` is what tap r of output o sees."""

    @property
    def nothing(self) -> bool:
        """Whether no output sees a pixel."""
        return not self.outputs

    @property
    def all_outputs(self) -> bool:
        return len(self.outputs) == self.whole.outputs

    @property
    def all_taps(self) -> bool:
        return len(self.taps) == self.whole.kernel


class Reduction(NamedTuple):
    """A convolution, reduced axis by axis."""

    axes: tuple[AxisReduction, ...]
    geometry: Geometry
    """Of what is left."""

    @property
    def nothing(self) -> bool:
        """Whether no output sees a pixel."""
        return any(axis.nothing for axis in self.axes)

    @property
    def all_outputs(self) -> bool:
        return all(axis.all_outputs for axis in self.axes)

    @property
    def all_taps(self) -> bool:
        return all(axis.all_taps for axis in self.axes)


def reduce_geometry(kind: Pass, in_size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> Reduction | None:
    """The reduction of a convolution whose kernel fits into the padded image; None where it is ordinary."""
    both = kind is Pass.DGRAD and len(geometry.stride) > 1 and min(geometry.stride) > ORDINARY_OF_BOTH
    longest_stride = ORDINARY_OF_BOTH if both else ORDINARY
    axes = [Axis.of(geometry, in_size, kernel, i, longest_stride) for i in range(len(kernel))]
    if all(axis.ordinary for axis in axes):
        return None
    reduced = tuple(map(reduce_axis, axes))
    if all(part.axis == part.whole and not part.nothing for part in reduced):
        return None
    left = [part.axis for part in reduced]
    moves = geometry._replace(
        stride=tuple(axis.stride for axis in left),
        padding=tuple(side for axis in left for side in (axis.before, axis.after)),
        dilation=tuple(axis.dilation for axis in left),
    )
    return Reduction(reduced, moves)


def reduce_axis(axis: Axis) -> AxisReduction:
    """One axis with the numbers that kernels take; itself where they take it."""
    if axis.ordinary:
        return AxisReduction(axis, range(axis.outputs), range(axis.kernel), axis)
    if axis.mode is PaddingMode.ZEROS:
        return _without_dead_ends(axis)
    left = _without_idle_steps(axis, axis.outputs, axis.kernel, axis.before)
    if left.runs:
        return AxisReduction(axis, range(axis.outputs), range(axis.kernel), left)
    return _gathered(axis, range(axis.outputs), range(axis.kernel))


def _without_dead_ends(axis: Axis) -> AxisReduction:
    met = [_outputs_that_meet(axis, tap) for tap in range(axis.kernel)]
    taps = [tap for tap, outputs in enumerate(met) if outputs]
    if not taps:
        return AxisReduction(axis, (), (), axis)
    live_taps = range(taps[0], taps[-1] + 1)
    outputs = range(min(met[tap].start for tap in taps), max(met[tap].stop for tap in taps))
    before = axis.before - live_taps.start * axis.dilation - outputs.start * axis.stride
    left = _without_idle_steps(axis, len(outputs), len(live_taps), before)
    if left.runs:
        return AxisReduction(axis, outputs, live_taps, left)
    live: list[int] = []
    for tap in reversed(taps):  # later taps meet earlier outputs
        live += range(max(met[tap].start, live[-1] + 1 if live else 0), met[tap].stop)
    return _gathered(axis, live, taps)


def _outputs_that_meet(axis: Axis, tap: int) -> range:
    """The outputs whose tap lies on a pixel and not in the padding."""
    first = axis.before - tap * axis.dilation  # of the places that the stride steps over, where the image begins
    start = max(0, ceil_div(first, axis.stride))
    stop = min(axis.outputs, ceil_div(first + axis.extent, axis.stride))
    return range(start, max(start, stop))


def _without_idle_steps(axis: Axis, outputs: int, kernel: int, before: int) -> Axis:
    """The same with so many outputs and taps, the first of which lie ``before`` places before the image."""
    dilation = axis.dilation if kernel > 1 else 1
    reach = dilation * (kernel - 1) + 1
    if axis.mode is PaddingMode.ZEROS:
        stride = axis.stride if outputs > 1 else 1
        after = stride * (outputs - 1) + reach - axis.extent - before  # crops where the image goes on
    else:  # a border cannot follow a cropped image: the padding stays, and a stride that leaves one output
        after = axis.after
        stride = axis.stride if outputs > 1 else min(axis.stride, axis.extent + before + after - reach + 1)
    return Axis(axis.extent, kernel, stride, dilation, before, after, axis.mode, axis.longest_stride)


def _gathered(axis: Axis, outputs: Sequence[int], taps: Sequence[int]) -> AxisReduction:
    """Neighbouring outputs lie side by side, so that kernels find a stride of one."""
    places = Axis(len(outputs) * len(taps), len(taps), 1, len(outputs), 0, 0, axis.mode, axis.longest_stride)
    return AxisReduction(axis, outputs, taps, places, gathered=True)
