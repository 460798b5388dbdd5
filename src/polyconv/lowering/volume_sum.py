"""Lowering of volumes (3-D) to a sum of 2-D problems, one per tap across one axis.

The volume is sliced across one axis. Each tap of that axis maps slices of the input to slices of the output: a 2-D
convolution on views, with these slices as its batch, that accumulates into the output. Nothing is copied, and taps in
the padding are skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ..activation import Activation
from ..numerics.prediction import error_of_additions, rounding_error
from ..problem import AXES, RESULTS, Pass, Problem, Shape, Strides, channels_last_strides, contiguous_strides
from .base import WeightPart, run_with_part
from .epilogue import apply_epilogue, begun, summed_per_channel
from .extreme_geometry import Axis

if TYPE_CHECKING:  # planners import this module, and need no torch
    from torch import Tensor

    from ..backend import Run

NAME = "sum of slices"
"""Candidate name; the candidates of the 2-D problems are chosen separately."""


@dataclass(frozen=True, slots=True)
class SliceProblem:
    """Input and output slices that overlap through one tap: one 2-D problem, on views."""

    problem: Problem
    x: int
    """Offset of the view in each tensor [elements], as ``w`` and ``y``."""
    w: int
    y: int
    result_strides: Strides
    """Strides of the result in its tensor. They differ from the problem's if it is computed in a separate buffer."""
    adds: bool
    """True if the result is added to the output, False if it is the first one written there."""

    @property
    def apart(self) -> bool:
        """True if the result needs a separate buffer: only forward kernels accumulate into the output."""
        return self.adds and self.problem.kind is not Pass.FPROP


@dataclass(frozen=True, slots=True)
class VolumeSum:
    """A 3-D problem as a sum of 2-D problems."""

    problem: Problem
    axis: int
    calls: tuple[SliceProblem, ...]
    gaps: tuple[range, ...]
    """Slices of the result that no 2-D problem initialises, to be filled with zeros or bias and residual."""
    additions: int
    """Largest number of additions to one element of the result."""

    @property
    def name(self) -> str:
        return NAME

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(dict.fromkeys(call.problem for call in self.calls))

    @property
    def activates_apart(self) -> bool:
        """True if the activation follows the sum of several 2-D problems, and so cannot be fused."""
        return self.problem.activation is not Activation.NONE and self.additions > 0

    @property
    def addends(self) -> list[int]:
        """Elements of each result that is added to the output."""
        return [prod(result_shape(call.problem)) for call in self.calls if call.adds]

    @property
    def extra_traffic(self) -> tuple[int, int]:
        """Extra traffic of adding separate buffers: (bytes, launches)."""
        added = [prod(result_shape(call.problem)) for call in self.calls if call.apart]
        return 3 * self.problem.element_bytes * sum(added), len(added)

    def predicted_error(self, errors: Iterable[float]) -> float:
        """Predicted error, from those of the 2-D problems, whose scales do not exceed that of the sum."""
        return (
            max(errors)
            + error_of_additions(self.problem, self.additions)
            + self.additions * rounding_error(self.problem)
        )

    def in_words(self) -> str:
        adding = sum(one.adds for one in self.calls)
        return f"{len(self.calls)} problems across the {AXES[3][self.axis]}, {adding} of them added to others:"

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        """Run the 2-D problems in order. Separate results share one buffer: each is added before the next."""
        name = RESULTS[self.problem.kind]
        steps = [(call, runs[call.problem], _views(call)) for call in self.calls]
        room = max((prod(result_shape(call.problem)) for call in self.calls if call.apart), default=0)

        def run_all(tensors: MutableMapping[str, Tensor]) -> None:
            for gap in self.gaps:
                _begin(self, gap, name, tensors)
            apart = tensors[name].new_empty(room)
            for call, run, views in steps:
                shape, strides, begins = views[name]
                result = _seen(tensors[name], shape, call.result_strides, begins)
                given = {key: _seen(tensors[key], *view) for key, view in views.items() if key not in (name, "w")}
                given[name] = apart.as_strided(shape, strides) if call.apart else result
                if call.problem.bias:
                    given["bias"] = tensors["bias"]
                if call.adds and not call.apart:
                    given["residual"] = result
                if "w" in views:
                    whole = tensors["w"]
                    make = partial(_seen, whole, *views["w"])
                    run_with_part(run, given, WeightPart(whole, f"{NAME} {call.w}".encode(), make))
                else:
                    run(given)
                if call.apart:
                    result.add_(given[name])
                elif given[name] is not result:  # the backend returned a result buffer of its own
                    result.copy_(given[name])
            if self.activates_apart:
                apply_epilogue(tensors[name], None, self.problem.activation)
            if "db" in tensors:
                tensors["db"].copy_(summed_per_channel(tensors["y"]))

        return run_all


def result_shape(problem: Problem) -> Shape:
    """Shape of a pass's result."""
    return {Pass.FPROP: problem.y_shape, Pass.DGRAD: problem.x_shape, Pass.WGRAD: problem.w_shape}[problem.kind]


@lru_cache(maxsize=1024)
def volume_sum(problem: Problem) -> VolumeSum:
    """Slice across the first axis with the fewest taps, which needs the fewest sums."""
    axis = problem.kernel.index(min(problem.kernel))
    along = Axis.of(problem, problem.in_size, problem.kernel, axis)
    begin, add, additions = [], [], Counter[_Place]()
    begun: set[_Place] = set()
    for overlap in _by_images(problem, axis, sorted(_overlaps(along), key=lambda overlap: -overlap.length)):
        places = overlap.places(problem.kind, along.stride)
        if begun.isdisjoint(places):
            begin.append(overlap)
            begun.update(places)
        else:
            add.append(overlap)
            additions.update(places)
    most = max(additions.values(), default=0)
    part = replace(problem, tolerance=max(0.0, problem.tolerance - error_of_additions(problem, most)))
    if most:
        part = replace(part, activation=Activation.NONE)
    calls = [
        (overlap.image or 0, _slice_problem(part, axis, overlap, adds=adds))
        for adds, overlaps in ((False, begin), (True, add))
        for overlap in overlaps
    ]
    calls.sort(key=lambda pair: pair[0])  # image by image, so that accumulated outputs stay in the cache
    extent = {Pass.FPROP: along.outputs, Pass.DGRAD: along.extent, Pass.WGRAD: along.kernel}[problem.kind]
    gaps = _ranges(sorted(set(range(extent)) - {place for _, place in begun}))
    return VolumeSum(problem, axis, tuple(one for _, one in calls), tuple(gaps), most)


_Place = tuple[int | None, int]
"""Slice of the result: image (None for all of them, or for a weight gradient) and position along the axis."""


class _TapOverlap(NamedTuple):
    """Tap overlap: one tap and ``length`` consecutive output slices, whose input slices are a stride apart."""

    tap: int
    output: int
    pixel: int
    length: int
    image: int | None = None
    """Index of the image; None for all images."""

    def places(self, kind: Pass, stride: int) -> list[_Place]:
        """Slices of the result."""
        if kind is Pass.WGRAD:
            return [(None, self.tap)]
        first, step = (self.output, 1) if kind is Pass.FPROP else (self.pixel, stride)
        return [(self.image, first + step * number) for number in range(self.length)]


def _overlaps(along: Axis) -> Iterator[_TapOverlap]:
    """All overlaps of taps with input slices, as few as possible."""
    for tap in range(along.kernel):
        now: _TapOverlap | None = None
        for output in range(along.outputs):
            pixel = along.pixel(output, tap)
            if now is not None and (output, pixel) == (now.output + now.length, now.pixel + now.length * along.stride):
                now = now._replace(length=now.length + 1)
                continue
            if now is not None:
                yield now
            now = None if pixel is None else _TapOverlap(tap, output, pixel, 1)
        if now is not None:
            yield now


def _by_images(problem: Problem, axis: int, overlaps: Sequence[_TapOverlap]) -> Iterator[_TapOverlap]:
    """Split overlaps so that each is a batch with one stride: over all images, one image, or one output slice; all in
    the same way, so that images are computed alike."""
    images, stride = problem.batch, problem.stride[axis]
    steps = [
        (problem.x_strides[0], stride * problem.x_strides[2 + axis]),
        (problem.y_strides[0], problem.y_strides[2 + axis]),
    ]
    if images > 1 and all(outer == one.length * inner for one in overlaps for outer, inner in steps):
        yield from overlaps
    elif images <= max(overlap.length for overlap in overlaps):
        yield from (overlap._replace(image=image) for overlap in overlaps for image in range(images))
    else:
        for tap, output, pixel, length, _ in overlaps:
            yield from (_TapOverlap(tap, output + i, pixel + i * stride, 1) for i in range(length))


def _slice_problem(problem: Problem, axis: int, overlap: _TapOverlap, *, adds: bool) -> SliceProblem:
    """2-D problem of one overlap. A separate result buffer is dense."""
    kind, (tap, output, pixel, length, image) = problem.kind, overlap
    x_axis, y_axis = problem.x_strides[2 + axis], problem.y_strides[2 + axis]
    x, w, y = pixel * x_axis, tap * problem.w_strides[2 + axis], output * y_axis
    batch, x_step, y_step = length, problem.stride[axis] * x_axis, y_axis
    if image is not None:
        x, y = x + image * problem.x_strides[0], y + image * problem.y_strides[0]
    elif length == 1:
        batch, x_step, y_step = problem.batch, problem.x_strides[0], problem.y_strides[0]
    else:
        batch = problem.batch * length
    moved = (y,) if adds and kind is Pass.DGRAD else (x, y)  # a separate buffer is aligned by the allocator
    across = problem.across(axis)
    part = replace(
        across,
        batch=batch,
        x_strides=(x_step, *across.x_strides[1:]),
        y_strides=(y_step, *across.y_strides[1:]),
        vector_aligned=problem.vector_aligned and not any(begin * problem.element_bytes % 16 for begin in moved),
        bias=problem.bias and kind is Pass.FPROP and not adds,
        residual=kind is Pass.FPROP and (adds or problem.residual),
        frozen=False,
    )
    strides = {Pass.FPROP: part.y_strides, Pass.DGRAD: part.x_strides, Pass.WGRAD: part.w_strides}[kind]
    dense = (channels_last_strides if strides[1] == 1 else contiguous_strides)(result_shape(part))
    if adds and kind is Pass.DGRAD:
        part = replace(part, x_strides=dense)
    elif adds and kind is Pass.WGRAD:
        part = replace(part, w_strides=dense)
    return SliceProblem(part, x, w, y, strides, adds)


def _ranges(numbers: Sequence[int]) -> Iterator[range]:
    """Sorted numbers as the fewest ranges."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[start], numbers[end - 1] + 1)
            start = end


# ---- execution


_View = tuple[Shape, Strides, int]
"""Shape, strides, and offset in the tensor [elements]."""


def _views(call: SliceProblem) -> dict[str, _View]:
    """Views of the 3-D tensors that a 2-D problem uses, by name."""
    problem = call.problem
    w = (problem.w_shape, problem.w_strides, call.w)
    y = (problem.y_shape, problem.y_strides, call.y)
    views = {
        "x": (problem.x_shape, problem.x_strides, call.x),
        "dw" if problem.kind is Pass.WGRAD else "w": w,
        "y": y,
    }
    return views | ({"residual": y} if problem.residual and not call.adds else {})


def _seen(tensor: Tensor, shape: Shape, strides: Strides, begins: int) -> Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + begins)


def _begin(whole: VolumeSum, gap: range, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Fill slices of the result with an empty sum: zeros, or in a forward pass bias, residual and activation."""
    result, residual = tensors[name], tensors.get("residual")
    dim = 2 + whole.axis
    added = None if residual is None else residual.narrow(dim, gap.start, len(gap))
    activation = Activation.NONE if whole.activates_apart else whole.problem.activation
    begun(result.narrow(dim, gap.start, len(gap)), tensors.get("bias"), added, activation)
