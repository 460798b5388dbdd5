"""Lowering of extreme geometry (huge stride, dilation or padding) to an equivalent ordinary convolution.

Kernels use 32-bit indices, and some of their loops are as long as a stride or dilation. A stride of 2**32 on four
pixels yields one output, a dilation of 2**32 with as much padding leaves one live tap. Each axis is therefore reduced,
in exact integers:

* Leading and trailing outputs that see no pixel (bias and epilogue only) and taps that meet no pixel (no part in a sum,
  zero gradient) are dropped.
* The stride of a single output and the dilation of a single tap become 1.
* An axis that is still extreme has few (output, tap) pairs that meet a pixel. The pixels of live outputs and live taps
  are *gathered*, one per pair, and convolved. An extreme border other than zeros is lowered in this way, too.

Ordinary geometry reduces to None and keeps its problem and key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..problem import Moves, PaddingMode, Pass, output_extent
from ..util.intmath import ceil_div

if TYPE_CHECKING:
    from ..arguments import Geometry

ORDINARY = 1024
"""Largest ordinary stride; a dilation or padding is extreme if it exceeds both this and the image."""
ORDINARY_OF_BOTH = 32
"""Largest ordinary stride in an input gradient if all axes exceed it: the number of phases, and of launches, is the
product of the strides. 1-D problems are exempt."""
POSITIONS = 2**31
"""Limit of 32-bit positions in kernels, which exceed the padded image by less than a tile: :data:`OVERHANG` steps each
of stride and dilation."""
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

    @classmethod
    def of(
        cls, moves: Moves, in_size: Sequence[int], kernel: Sequence[int], axis: int, longest_stride: int = ORDINARY
    ) -> Axis:
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
        """True if there is nothing to reduce (quick check)."""
        limit = max(ORDINARY, self.extent)
        return self.before <= limit and self.after <= limit and self.runs and not self.blind

    @property
    def blind(self) -> bool:
        """True if no output sees a pixel. Nothing is run then; some of oneDNN's kernels would crash."""
        return self.mode is PaddingMode.ZEROS and not any(_outputs_that_meet(self, tap) for tap in range(self.kernel))

    def pixel(self, output: int, tap: int) -> int | None:
        """Pixel under a tap of an output, None for a padded zero."""
        return self.pixel_at(output * self.stride + tap * self.dilation - self.before)

    def pixel_at(self, place: int) -> int | None:
        """Pixel at a position relative to the first pixel, border included; None for a padded zero."""
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
        """True if kernels run the axis, and run it well."""
        if self.stride > self.longest_stride or self.dilation > max(ORDINARY, self.extent):
            return False
        places = self.extent + max(self.before, 0) + max(self.after, 0)
        return places + OVERHANG * (self.stride + self.dilation) < POSITIONS


class AxisReduction(NamedTuple):
    """One axis without dead outputs and taps."""

    whole: Axis
    outputs: Sequence[int]
    """Live outputs of ``whole``: a range, unless pixels are gathered."""
    taps: Sequence[int]
    """Live taps of ``whole``."""
    axis: Axis
    """Reduced axis; unused if there are no outputs."""
    gathered: bool = False
    """True if pixels are gathered: position ``r * len(outputs) + o`` holds the pixel under tap r of output o."""

    @property
    def nothing(self) -> bool:
        """True if no output sees a pixel."""
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

    @property
    def nothing(self) -> bool:
        return any(axis.nothing for axis in self.axes)

    @property
    def all_outputs(self) -> bool:
        return all(axis.all_outputs for axis in self.axes)

    @property
    def all_taps(self) -> bool:
        return all(axis.all_taps for axis in self.axes)


def reduce_geometry(kind: Pass, in_size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> Reduction | None:
    """Reduce a convolution whose kernel fits into the padded image. None if it is ordinary."""
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
    """Reduce one axis to geometry that kernels take, unchanged if it is ordinary."""
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
    for tap in reversed(taps):  # later taps overlap earlier outputs
        live += range(max(met[tap].start, live[-1] + 1 if live else 0), met[tap].stop)
    return _gathered(axis, live, taps)


def _outputs_that_meet(axis: Axis, tap: int) -> range:
    """Outputs for which a tap lies on a pixel, not in the padding."""
    first = axis.before - tap * axis.dilation  # smallest output * stride for which the tap reaches the image
    start = max(0, ceil_div(first, axis.stride))
    stop = min(axis.outputs, ceil_div(first + axis.extent, axis.stride))
    return range(start, max(start, stop))


def _without_idle_steps(axis: Axis, outputs: int, kernel: int, before: int) -> Axis:
    """Axis of ``outputs`` and ``kernel`` taps, the first ``before`` positions before the image, without idle steps."""
    dilation = axis.dilation if kernel > 1 else 1
    reach = dilation * (kernel - 1) + 1
    if axis.mode is PaddingMode.ZEROS:
        stride = axis.stride if outputs > 1 else 1
        after = stride * (outputs - 1) + reach - axis.extent - before  # negative: crops the image
    else:  # a border cannot follow a cropped image, so the padding stays, with a stride that leaves one output
        after = axis.after
        stride = axis.stride if outputs > 1 else min(axis.stride, axis.extent + before + after - reach + 1)
    return Axis(axis.extent, kernel, stride, dilation, before, after, axis.mode, axis.longest_stride)


def _gathered(axis: Axis, outputs: Sequence[int], taps: Sequence[int]) -> AxisReduction:
    """Axis over gathered pixels. Those of neighbouring outputs are adjacent, so that the stride is 1."""
    places = Axis(len(outputs) * len(taps), len(taps), 1, len(outputs), 0, 0, axis.mode, axis.longest_stride)
    return AxisReduction(axis, outputs, taps, places, gathered=True)
