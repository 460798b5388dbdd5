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

The reduced problem runs on parts of the tensors. The rest needs no computation: an output that sees no pixel is bias
plus epilogue; a tap that overlaps no pixel, or a pixel that no tap overlaps, has a zero gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..problem import Extents, Moves, PaddingMode, Pass, Problem, Sides, dense_strides, output_extent
from ..util.intmath import ceil_div
from .epilogue import begun, summed_per_channel

if TYPE_CHECKING:  # planners import this module, and need no torch
    from torch import Tensor

    from ..backend import Run

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


class Reduction(NamedTuple):
    """A convolution, reduced axis by axis."""

    axes: tuple[AxisReduction, ...]

    @property
    def stride(self) -> Extents:
        return tuple(part.axis.stride for part in self.axes)

    @property
    def padding(self) -> Sides:
        return tuple(side for part in self.axes for side in (part.axis.before, part.axis.after))

    @property
    def dilation(self) -> Extents:
        return tuple(part.axis.dilation for part in self.axes)

    @property
    def nothing(self) -> bool:
        return any(axis.nothing for axis in self.axes)

    @property
    def all_outputs(self) -> bool:
        return all(axis.all_outputs for axis in self.axes)


def reduce_problem(problem: Problem) -> Reduction | None:
    """:func:`reduce_geometry` of a problem."""
    return reduce_geometry(problem.kind, problem.in_size, problem.kernel, problem)


def reduce_geometry(kind: Pass, in_size: Sequence[int], kernel: Sequence[int], moves: Moves) -> Reduction | None:
    """Reduce a convolution whose kernel fits into the padded image. None if it is ordinary."""
    both = kind is Pass.DGRAD and len(moves.stride) > 1 and min(moves.stride) > ORDINARY_OF_BOTH
    longest_stride = ORDINARY_OF_BOTH if both else ORDINARY
    axes = [Axis.of(moves, in_size, kernel, i, longest_stride) for i in range(len(kernel))]
    if all(axis.ordinary for axis in axes):
        return None
    reduced = tuple(map(reduce_axis, axes))
    if all(part.axis == part.whole and not part.nothing for part in reduced):
        return None
    return Reduction(reduced)


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


# ---- the lowering


class Reduced(NamedTuple):
    """A problem of extreme geometry as an ordinary problem on parts of its tensors."""

    problem: Problem
    reduction: Reduction
    part: Problem

    @classmethod
    def of(cls, problem: Problem, reduction: Reduction) -> Reduced:
        """Lower a problem. Strides and alignment of the parts are read from meta tensors."""
        from ..arguments import suggests_channels_last  # lazy: imports torch

        part = replace(
            problem,
            in_size=tuple(axis.axis.extent for axis in reduction.axes),
            kernel=tuple(len(axis.taps) for axis in reduction.axes),
            stride=reduction.stride,
            padding=reduction.padding,
            dilation=reduction.dilation,
            frozen=False,
        )
        x_last, w_last = (
            suggests_channels_last(shape, strides)
            for shape, strides in ((problem.x_shape, problem.x_strides), (problem.w_shape, problem.w_strides))
        )
        if problem.kind is Pass.FPROP:
            x, w = _read(reduction, _meta(problem, "x")), _taps(reduction, _meta(problem, "w"))
            last = any(suggests_channels_last(each.shape, each.stride()) for each in (x, w))
            y_strides = dense_strides(part.y_shape, last)
            part, read = replace(part, x_strides=x.stride(), w_strides=w.stride(), y_strides=y_strides), [x]
        elif problem.kind is Pass.DGRAD:
            w, y = _taps(reduction, _meta(problem, "w")), _seen(reduction, _meta(problem, "y"))
            x_strides = dense_strides(part.x_shape, x_last)
            part, read = replace(part, x_strides=x_strides, w_strides=w.stride(), y_strides=y.stride()), [y]
        else:
            x, y = _read(reduction, _meta(problem, "x")), _seen(reduction, _meta(problem, "y"))
            w_strides = dense_strides(part.w_shape, w_last)
            bias = problem.bias and reduction.all_outputs  # outputs that see no pixel depend on the bias, too
            part = replace(part, x_strides=x.stride(), w_strides=w_strides, y_strides=y.stride(), bias=bias)
            read = [x, y]
        aligned = not any(each.storage_offset() * problem.element_bytes % 16 for each in read)
        part = replace(part, vector_aligned=problem.vector_aligned and aligned)
        return cls(problem, reduction, part)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (self.part,)

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        run = runs[self.part]
        adapted = {Pass.FPROP: self._fprop, Pass.DGRAD: self._dgrad, Pass.WGRAD: self._wgrad}[self.problem.kind]
        return lambda tensors: adapted(run, tensors)

    def in_words(self) -> str:
        return "without outputs and taps that see no pixel"

    def _fprop(self, run: Run, tensors: MutableMapping[str, Tensor]) -> None:
        reduction, part, y = self.reduction, self.part, tensors["y"]
        bias, residual = tensors.get("bias"), tensors.get("residual")
        if not reduction.all_outputs:
            begun(y, bias, residual, part.activation)
        given = {"x": _read(reduction, tensors["x"]), "w": _taps(reduction, tensors["w"])}
        given["y"] = y.new_empty_strided(part.y_shape, part.y_strides)
        if bias is not None:
            given["bias"] = bias
        if residual is not None:
            given["residual"] = y.new_empty_strided(part.y_shape, part.y_strides).copy_(_seen(reduction, residual))
        run(given)
        if reduction.all_outputs and given["y"].stride() == y.stride():
            tensors["y"] = given["y"]
        else:
            _put(y, given["y"], [axis.outputs for axis in reduction.axes])

    def _dgrad(self, run: Run, tensors: MutableMapping[str, Tensor]) -> None:
        grad, w = _seen(self.reduction, tensors["y"]), _taps(self.reduction, tensors["w"])
        given = {"y": grad, "w": w, "x": grad.new_empty_strided(self.part.x_shape, self.part.x_strides)}
        run(given)
        dx = given["x"]
        for dim, axis in enumerate(self.reduction.axes, start=2):
            if axis.gathered:
                dx = _scattered(dx, dim, axis)
        tensors["x"].copy_(dx)

    def _wgrad(self, run: Run, tensors: MutableMapping[str, Tensor]) -> None:
        grad, dw = tensors["y"], tensors["dw"]
        given = {"x": _read(self.reduction, tensors["x"]), "y": _seen(self.reduction, grad)}
        given["dw"] = dw.new_empty_strided(self.part.w_shape, self.part.w_strides)
        if self.part.bias:
            given["db"] = tensors["db"]
        run(given)
        _put(dw.zero_(), given["dw"], [axis.taps for axis in self.reduction.axes])
        if self.problem.bias and not self.part.bias:
            tensors["db"].copy_(summed_per_channel(grad))


# ---- parts of tensors


def _meta(problem: Problem, name: str) -> Tensor:
    """Operand of a problem without data."""
    import torch

    shape, strides = getattr(problem, f"{name}_shape"), getattr(problem, f"{name}_strides")
    return torch.empty_strided(shape, strides, dtype=getattr(torch, problem.dtype), device="meta")


def _part(tensor: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """Select indices of each spatial axis. A view if all are ranges, else a copy."""
    for dim, wanted in enumerate(places, start=2):
        if isinstance(wanted, range):
            tensor = tensor.narrow(dim, wanted.start, len(wanted))
        else:
            tensor = tensor.index_select(dim, _numbers(wanted).to(tensor.device))
    return tensor


def _numbers(places: Sequence[int]) -> Tensor:
    import torch

    return torch.tensor(list(places), device="cpu")  # not on torch's default device


def _taps(reduction: Reduction, w: Tensor) -> Tensor:
    """Part of the weight with the taps that are multiplied."""
    return _part(w, [axis.taps for axis in reduction.axes])


def _seen(reduction: Reduction, y: Tensor) -> Tensor:
    """Part of an output, output gradient or residual that sees pixels."""
    return _part(y, [axis.outputs for axis in reduction.axes])


def _put(whole: Tensor, part: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """Overwrite the given indices of each spatial axis of ``whole`` with ``part``. Returns ``whole``."""
    if all(isinstance(wanted, range) for wanted in places):
        _part(whole, places).copy_(part)
    else:
        import torch

        grid = torch.meshgrid(*map(_numbers, places), indexing="ij")
        everything: tuple[Any, ...] = (slice(None), slice(None))
        whole[everything + tuple(numbers.to(whole.device) for numbers in grid)] = part
    return whole


def _read(reduction: Reduction, x: Tensor) -> Tensor:
    """Input with the pixels of its gathered axes copied into place; other axes are unchanged."""
    for dim, axis in enumerate(reduction.axes, start=2):
        if axis.gathered:
            pixels = _pixels(axis)
            x = x.index_select(dim, pixels.clamp(min=0).to(x.device))
            if (pixels < 0).any():
                shape = [-1 if other == dim else 1 for other in range(x.dim())]
                x.masked_fill_((pixels < 0).to(x.device).view(shape), 0)
    return x


def _pixels(axis: AxisReduction) -> Tensor:
    """Pixel index at each position of a gathered axis; -1 in the zero padding."""
    whole, last = axis.whole, axis.whole.extent - 1
    by_tap = _numbers(axis.taps)[:, None] * whole.dilation - whole.before
    place = (by_tap + _numbers(axis.outputs) * whole.stride).flatten()
    if whole.mode is PaddingMode.REPLICATE:
        return place.clamp(0, last)
    if whole.mode is PaddingMode.CIRCULAR:
        return place % whole.extent
    if whole.mode is PaddingMode.REFLECT:
        folded = place % max(2 * last, 1)
        return folded.minimum(2 * last - folded)
    return place.masked_fill((place < 0) | (place > last), -1)


def _scattered(gathered: Tensor, dim: int, axis: AxisReduction) -> Tensor:
    """Transpose of the gather: sums the positions of each pixel in a fixed order, unlike ``index_add`` on a GPU."""
    pixels = _pixels(axis)
    order = pixels.argsort(stable=True)
    pixel, counts = pixels[order].unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    size = [*gathered.shape]
    size[dim] = axis.whole.extent
    result = gathered.new_zeros(size)
    for count in counts.unique().tolist():  # pixels with equally many positions are summed together
        chosen = ((counts == count) & (pixel >= 0)).nonzero().flatten()
        places = order[starts[chosen, None] + _numbers(range(count))].flatten().to(gathered.device)
        sums = gathered.index_select(dim, places).unflatten(dim, (len(chosen), count)).sum(dim + 1)
        result.index_copy_(dim, pixel[chosen].to(gathered.device), sums)
    return result
