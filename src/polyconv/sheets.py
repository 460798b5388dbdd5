"""Three axes as pictures: a volume is a stack of sheets, and its convolution a sum of convolutions of sheets.

Kernels know height and width. Across one of three axes the volume is cut into sheets: there each tap meets some
outputs, each with one sheet of the input. That is a convolution of pictures, with these outputs for its batch, on views
of the tensors; the taps are summed by adding to what is there. Nothing is copied, and a tap that lies in the padding is
left out. Numbers only; :mod:`polyconv.summing` has the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from .accuracy import error_of_additions
from .problem import AXES, Activation, Pass, Problem, Shape, Strides, channels_last_strides, contiguous_strides
from .reduction import Axis

NAME = "sum of pictures"
"""What it is called as a choice: how each picture is computed is the picture's own choice."""


@dataclass(frozen=True, slots=True)
class Sheets:
    """Sheets of the input and the outputs that they meet through one tap: one problem of pictures, on views."""

    problem: Problem
    x: int
    """Where the views begin, in elements from the first one of each tensor."""
    w: int
    y: int
    result_strides: Strides
    """Of the result where it belongs. Those of the problem, unless it is computed apart and then added."""
    adds: bool
    """Whether the result is added to what is there; else it is the first to be written there."""

    @property
    def apart(self) -> bool:
        """Whether the result is computed in memory of its own: only kernels of a forward pass add to what is there."""
        return self.adds and self.problem.kind is not Pass.FPROP


@dataclass(frozen=True, slots=True)
class Cut:
    """A problem over three axes as a sum of problems of pictures."""

    problem: Problem
    axis: int
    """The axis that is cut across."""
    sheets: tuple[Sheets, ...]
    """In the order in which they run."""
    gaps: tuple[range, ...]
    """Along the axis, where the result has to be begun with zeros, or with the bias, because no sheets do that."""
    additions: int
    """How often something is added to one element of the result, at most."""

    @property
    def name(self) -> str:
        return NAME

    @property
    def calls(self) -> tuple[Sheets, ...]:
        return self.sheets

    @property
    def activates_apart(self) -> bool:
        """Whether the activation has to wait for sums of several problems."""
        return self.problem.activation is not Activation.NONE and self.additions > 0

    @property
    def addends(self) -> list[int]:
        """The elements of each result that is added to another."""
        return [prod(result_shape(sheets.problem)) for sheets in self.sheets if sheets.adds]

    @property
    def beside(self) -> tuple[int, int]:
        """Of what is computed apart, and then added: bytes, and launches."""
        added = [prod(result_shape(sheets.problem)) for sheets in self.sheets if sheets.apart]
        return 3 * self.problem.element_bytes * sum(added), len(added)

    def predicted_error(self, errors: Iterable[float]) -> float:
        """From those of the pictures: each is relative to its own scale, and that of the sum is no smaller."""
        return max(errors) + error_of_additions(self.problem, self.additions)

    def in_words(self) -> str:
        adding = sum(one.adds for one in self.sheets)
        return f"{len(self.sheets)} problems across the {AXES[3][self.axis]}, {adding} of them added to others:"


def result_shape(problem: Problem) -> Shape:
    """Of what a pass computes."""
    return {Pass.FPROP: problem.y_shape, Pass.DGRAD: problem.x_shape, Pass.WGRAD: problem.w_shape}[problem.kind]


@lru_cache(maxsize=1024)
def cut(problem: Problem) -> Cut:
    """Across the axis with the fewest taps, which makes the fewest sums; the first of equals."""
    axis = problem.kernel.index(min(problem.kernel))
    along = Axis.of(problem, problem.in_size, problem.kernel, axis)
    begin, add, additions = [], [], Counter[_Place]()
    begun: set[_Place] = set()
    for meeting in _by_images(problem, axis, sorted(_meetings(along), key=lambda meeting: -meeting.length)):
        places = meeting.places(problem.kind, along.stride)
        if begun.isdisjoint(places):
            begin.append(meeting)
            begun.update(places)
        else:
            add.append(meeting)
            additions.update(places)
    most = max(additions.values(), default=0)
    part = replace(problem, tolerance=max(0.0, problem.tolerance - error_of_additions(problem, most)))
    if most:
        part = replace(part, activation=Activation.NONE)
    sheets = [
        (meeting.image or 0, _sheets(part, axis, meeting, adds=adds))
        for adds, meetings in ((False, begin), (True, add))
        for meeting in meetings
    ]
    sheets.sort(key=lambda pair: pair[0])  # image by image, so that what is added to is still in a cache
    extent = {Pass.FPROP: along.outputs, Pass.DGRAD: along.extent, Pass.WGRAD: along.kernel}[problem.kind]
    gaps = _ranges(sorted(set(range(extent)) - {place for _, place in begun}))
    return Cut(problem, axis, tuple(one for _, one in sheets), tuple(gaps), most)


_Place = tuple[int | None, int]
"""Where a result lies: in which image, if it is in one, and where along the axis."""


class _Meeting(NamedTuple):
    """A tap and outputs that follow one another, whose sheets of the input are a stride apart."""

    tap: int
    output: int
    sheet: int
    length: int
    """How many outputs."""
    image: int | None = None
    """In which image; None: in all."""

    def places(self, kind: Pass, stride: int) -> list[_Place]:
        """Where its results lie."""
        if kind is Pass.WGRAD:
            return [(None, self.tap)]
        first, step = (self.output, 1) if kind is Pass.FPROP else (self.sheet, stride)
        return [(self.image, first + step * number) for number in range(self.length)]


def _meetings(along: Axis) -> Iterator[_Meeting]:
    """All taps and outputs that meet on a sheet, in as few meetings as possible."""
    for tap in range(along.kernel):
        now: _Meeting | None = None
        for output in range(along.outputs):
            sheet = along.pixel(output, tap)
            if now is not None and (output, sheet) == (now.output + now.length, now.sheet + now.length * along.stride):
                now = now._replace(length=now.length + 1)
                continue
            if now is not None:
                yield now
            now = None if sheet is None else _Meeting(tap, output, sheet, 1)
        if now is not None:
            yield now


def _by_images(problem: Problem, axis: int, meetings: Sequence[_Meeting]) -> Iterator[_Meeting]:
    """Meetings whose pictures lie at equal distances: of all images at once, or of one image, or of one output.

    One of these for all meetings, so that the images are alike.
    """
    images, stride = problem.batch, problem.stride[axis]
    steps = [
        (problem.x_strides[0], stride * problem.x_strides[2 + axis]),
        (problem.y_strides[0], problem.y_strides[2 + axis]),
    ]
    if images > 1 and all(outer == one.length * inner for one in meetings for outer, inner in steps):
        yield from meetings
    elif images <= max(meeting.length for meeting in meetings):
        yield from (meeting._replace(image=image) for meeting in meetings for image in range(images))
    else:
        for tap, output, sheet, length, _ in meetings:
            yield from (_Meeting(tap, output + i, sheet + i * stride, 1) for i in range(length))


def _sheets(problem: Problem, axis: int, meeting: _Meeting, *, adds: bool) -> Sheets:
    """One problem of pictures. What is computed apart is dense."""
    kind, (tap, output, sheet, length, image) = problem.kind, meeting
    x_axis, y_axis = problem.x_strides[2 + axis], problem.y_strides[2 + axis]
    x, w, y = sheet * x_axis, tap * problem.w_strides[2 + axis], output * y_axis
    batch, x_step, y_step = length, problem.stride[axis] * x_axis, y_axis
    if image is not None:
        x, y = x + image * problem.x_strides[0], y + image * problem.y_strides[0]
    elif length == 1:
        batch, x_step, y_step = problem.batch, problem.x_strides[0], problem.y_strides[0]
    else:
        batch = problem.batch * length
    moved = (y,) if adds and kind is Pass.DGRAD else (x, y)  # what is computed apart begins where torch lets it begin
    across = problem.across(axis)
    picture = replace(
        across,
        batch=batch,
        x_strides=(x_step, *across.x_strides[1:]),
        y_strides=(y_step, *across.y_strides[1:]),
        vector_aligned=problem.vector_aligned and not any(begin * problem.element_bytes % 16 for begin in moved),
        bias=problem.bias and kind is Pass.FPROP and not adds,
        residual=kind is Pass.FPROP and (adds or problem.residual),
        frozen=False,
    )
    strides = {Pass.FPROP: picture.y_strides, Pass.DGRAD: picture.x_strides, Pass.WGRAD: picture.w_strides}[kind]
    dense = (channels_last_strides if strides[1] == 1 else contiguous_strides)(result_shape(picture))
    if adds and kind is Pass.DGRAD:
        picture = replace(picture, x_strides=dense)
    elif adds and kind is Pass.WGRAD:
        picture = replace(picture, w_strides=dense)
    return Sheets(picture, x, w, y, strides, adds)


def _ranges(numbers: Sequence[int]) -> Iterator[range]:
    """Sorted numbers, as few ranges."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[start], numbers[end - 1] + 1)
            start = end
