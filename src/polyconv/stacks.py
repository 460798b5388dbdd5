"""Three axes as pictures of more channels: what the taps across one axis meet lies side by side, in a stack.

:mod:`polyconv.sheets` has a problem of pictures per tap, and adds up their results. Here the taps are channels of one
problem, because kernels sum over channels anyway: nothing is added to an output that lies in memory already, and few
channels become more. Either tensor can be stacked:

* the *input*: each sheet of the output is a picture, whose channels are those of all sheets that it reads;
* the *output*: each sheet of the input is a picture, whose channels are those of all sheets that it has a part in. With
  a stride, sheets of the input with another rest have other taps (:func:`~polyconv.algebra.lattice.gradient_phases`).

A pass that reads the stacked tensor reads a copy, sheet by sheet. Neighbouring pictures share sheets there: a picture
begins a few sheets after the one before, and each sheet is copied once, unless dilation or groups forbid it. A pass
that writes the stacked tensor writes a stack, whose sheets are added up to the result. That is done a block at a time,
so that the stack keeps to the memory that it is given. Numbers only; :mod:`polyconv.stacking` has the tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple

from .accuracy import error_of_additions
from .algebra.lattice import Phase, forward_phases, gradient_phases
from .problem import AXES, RESULTS, Activation, PaddingMode, Pass, Problem, contiguous_strides
from .reduction import Axis
from .repetition import all_apart
from .rounding import ceil_div

Side = Literal["x", "y"]
"""Which tensor is stacked, by its name in a :class:`~polyconv.problem.Problem`."""

NAMES: dict[Side, str] = {"x": "stacked inputs", "y": "stacked outputs"}
"""What they are called as a choice."""


class Piece(NamedTuple):
    """Sheets at equal distances, in the stack and in the tensor."""

    slots: slice
    sheets: slice


@dataclass(frozen=True, slots=True)
class StackCall:
    """Pictures that are one problem: those of an image, or one of each image. Its weight is dense."""

    problem: Problem
    stacked: int
    """Where its view begins in the stack, in elements."""
    plain: int
    """The same in the other tensor."""


@dataclass(frozen=True, slots=True)
class Block:
    """Pictures that are in the stack at the same time. A stack has a row of slots per image, and a sheet in each.

    With groups, the slots of a picture lie group by group: what one group has of each, then the next group's.
    """

    images: range
    slots: int
    apart: int
    """How many slots after the picture before a picture begins."""
    pieces: tuple[Piece, ...]
    """What lies where."""
    zeros: tuple[slice, ...]
    """Slots of sheets that lie in the padding."""
    calls: tuple[StackCall, ...]


@dataclass(frozen=True, slots=True)
class StackedPhase:
    """Pictures with the same taps."""

    taps: tuple[int, ...]
    """Of the kernel, in the order of the sheets that they meet."""
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """A problem over three axes as pictures of one of its tensors, stacked."""

    problem: Problem
    axis: int
    """The axis that is cut across."""
    side: Side
    phases: tuple[StackedPhase, ...]
    gaps: tuple[int, ...]
    """Along the axis, where the result is zero because nothing meets it. Of a result that is added up: none."""
    additions: int
    """How often something is added to one element of the result, at most."""

    @property
    def name(self) -> str:
        return NAMES[self.side]

    @property
    def calls(self) -> tuple[StackCall, ...]:
        return tuple(call for block in self.blocks for call in block.calls)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for phase in self.phases for block in phase.blocks)

    @property
    def written(self) -> bool:
        """Whether the stack is written, and then added up; else it is a copy that is read."""
        return RESULTS[self.problem.kind] == self.side

    @property
    def sheet(self) -> tuple[int, ...]:
        """Channels and extents of a sheet in the stack."""
        return sheet_of(self.problem, self.axis, self.side)

    @property
    def stacked_elements(self) -> int:
        """That are copied to stacks, or added up from them, in all."""
        return prod(self.sheet) * sum(len(block.images) * block.slots for block in self.blocks)

    @property
    def room(self) -> int:
        """Elements of the largest stack."""
        return prod(self.sheet) * max(len(block.images) * block.slots for block in self.blocks)

    @property
    def beside(self) -> tuple[int, int]:
        """Of the sheets of stacks, the weights in another order, and sums of their gradients: bytes, and launches."""
        problem, size = self.problem, self.problem.element_bytes
        weights = size * prod(problem.w_shape)
        moved, launches = 2 * weights, sum(len(phase.taps) for phase in self.phases)
        launches += sum(len(block.pieces) for block in self.blocks)
        if self.written:
            begun = prod(problem.x_shape if self.side == "x" else problem.y_shape)
            return moved + size * (begun + 3 * self.stacked_elements), launches + 1
        moved += 2 * size * self.stacked_elements
        launches += sum(len(block.zeros) for block in self.blocks)
        sums = len(self.calls) - len(self.phases) if problem.kind is Pass.WGRAD else 0
        return moved + 3 * weights * sums, launches + sums

    def predicted_error(self, errors: Iterable[float]) -> float:
        """From those of the pictures: each is relative to its own scale, and that of a sum is no smaller."""
        return max(errors) + error_of_additions(self.problem, self.additions)

    def in_words(self) -> str:
        tensor = {"x": "input", "y": "output"}[self.side]
        *fewer, taps = sorted({len(phase.taps) for phase in self.phases})
        size = f"{self.stacked_elements * self.problem.element_bytes / 2**20:.1f} MiB"
        what = f"{size} of them are added up" if self.written else f"{size} are copied there"
        return (
            f"{len(self.calls)} problems across the {AXES[3][self.axis]}, with the sheets of the {tensor} that "
            f"{'up to ' if fewer else ''}{taps} taps meet side by side, as {taps * self.sheet[0]} channels; {what}:"
        )


@lru_cache(maxsize=1024)
def stack(problem: Problem, side: Side, room: int) -> Stack | str:
    """A problem over three axes with one of its tensors stacked in so many bytes; or why that cannot be.

    Across the axis with the fewest taps, of those that have more than one; the first of equals.
    """
    several = [taps for taps in problem.kernel if taps > 1]
    if not several:
        return "no axis has more than one tap"
    axis = problem.kernel.index(min(several))
    along = Axis.of(problem, problem.in_size, problem.kernel, axis)
    if side == "y" and problem.padding_mode is not PaddingMode.ZEROS and max(along.before, along.after) > 0:
        return f"a border of {problem.padding_mode} meets sheets of the output at no equal distances"
    tensors = {"x": (problem.x_shape, problem.x_strides), "y": (problem.y_shape, problem.y_strides)}
    w = problem.w_shape, problem.w_strides
    if not all(all_apart(*tensor) for tensor in (tensors[side], w)):
        return "elements repeat in memory, as in an expanded tensor, and the error model cannot see that of a copy"
    sheet_bytes = problem.element_bytes * prod(sheet_of(problem, axis, side))
    phases = phases_of(problem, axis, side)
    most = max(phase.taps for phase in phases)
    if most * sheet_bytes > room:
        return f"{most} sheets take {most * sheet_bytes / 2**20:.1f} MiB, and the workspace is {room / 2**20:.1f} MiB"
    sheets = room // sheet_bytes
    written = RESULTS[problem.kind] == side
    additions, gaps = 0, []
    if problem.kind is Pass.WGRAD:  # each problem's result is added to that of the first
        found = [_blocks(problem, axis, side, along, phase, sheets) for phase in phases if phase.taps]
        additions = max(sum(len(block.calls) for block in blocks) for blocks in found) - 1
        gaps = sorted(set(range(along.kernel)) - {tap for phase in phases for tap in _taps(phase)})
    elif written:
        additions = _most_additions(problem, along, side, phases)
    else:
        gaps = sorted(place for phase in phases if not phase.taps for place in _positions(phase))
    part = replace(
        problem,
        tolerance=max(0.0, problem.tolerance - error_of_additions(problem, additions)),
        bias=problem.bias and problem.kind is Pass.FPROP and not written,
        residual=problem.residual and not written,
        activation=Activation.NONE if written else problem.activation,
        frozen=False,
    )
    stacked = tuple(
        StackedPhase(_taps(phase), tuple(_blocks(part, axis, side, along, phase, sheets)))
        for phase in phases
        if phase.taps
    )
    return Stack(problem, axis, side, stacked, tuple(gaps), additions)


def phases_of(problem: Problem, axis: int, side: Side) -> tuple[Phase, ...]:
    """What is read of the stacked tensor, in the words of a lattice: taps forward, and *written* is the other one."""
    kernel, stride, dilation = problem.kernel[axis], problem.stride[axis], problem.dilation[axis]
    before = problem.padding[2 * axis]
    if side == "x":
        return forward_phases(problem.out_size[axis], kernel, stride, dilation, before)
    found = gradient_phases(problem.in_size[axis], kernel, stride, dilation, before)
    return tuple(phase.forwards() for phase in found)


def stacked_picture(problem: Problem, axis: int, side: Side, taps: int) -> Problem:
    """The problem of one picture with so many sheets of a tensor in its place; strides are those of dense tensors."""
    picture = replace(problem.across(axis), batch=1)
    if side == "x":
        picture = replace(picture, in_channels=taps * problem.in_channels)
    else:
        picture = replace(picture, out_channels=taps * problem.out_channels)
    x, w, y = map(contiguous_strides, (picture.x_shape, picture.w_shape, picture.y_shape))
    return replace(picture, x_strides=x, w_strides=w, y_strides=y)


def sheet_of(problem: Problem, axis: int, side: Side) -> tuple[int, ...]:
    """Channels and extents of one sheet."""
    across = problem.across(axis)
    return across.x_shape[1:] if side == "x" else across.y_shape[1:]


def _taps(phase: Phase) -> tuple[int, ...]:
    return tuple(phase.tap_first + i * phase.tap_stride for i in range(phase.taps))


def _positions(phase: Phase) -> range:
    """Along the axis, in the tensor that is not stacked."""
    return range(phase.written_first, phase.written_first + phase.count * phase.written_step, phase.written_step)


def _most_additions(problem: Problem, along: Axis, side: Side, phases: Iterable[Phase]) -> int:
    met = Counter(
        _sheet_at(along, side, phase.read_first + i * phase.read_step + j * phase.tap_step)
        for phase in phases
        for i in range(phase.count)
        for j in range(phase.taps)
    )
    del met[None]
    begun = int(problem.bias or problem.residual)
    return max(met.values(), default=0) + begun


def _sheet_at(along: Axis, side: Side, place: int) -> int | None:
    """Which sheet of the stacked tensor lies at a place; None for zeros."""
    if side == "x":
        return along.pixel_at(place)
    return place if 0 <= place < along.outputs else None


def _blocks(part: Problem, axis: int, side: Side, along: Axis, phase: Phase, room: int) -> Iterator[Block]:
    """As many images as a stack of so many sheets has room for, or parts of an image; about the same number each."""
    apart = _pictures_apart(phase, overlap=RESULTS[part.kind] != side and part.groups == 1)

    def slots_for(count: int) -> int:
        return (count - 1) * apart + phase.taps

    images = max(1, room // slots_for(phase.count))
    pictures = phase.count if images > 1 else min(phase.count, (room - phase.taps) // apart + 1)
    for own_images in _even(part.batch, images):
        for own in _even(phase.count, pictures):
            cut, slots = phase.cut(own.start, len(own)), slots_for(len(own))
            pieces, zeros = _pieces(along, side, cut, apart, slots)
            calls = tuple(_calls(part, axis, side, cut, own_images, apart, slots))
            yield Block(own_images, slots, apart, pieces, zeros, calls)


def _pictures_apart(phase: Phase, *, overlap: bool) -> int:
    """How many slots after the picture before one begins: what they share lies there once, if it can."""
    steps, rest = divmod(phase.read_step, phase.tap_step)
    return steps if overlap and not rest and steps < phase.taps else phase.taps


def _pieces(
    along: Axis, side: Side, phase: Phase, apart: int, slots: int
) -> tuple[tuple[Piece, ...], tuple[slice, ...]]:
    """Which sheets lie in which slots, and which slots are zero."""
    pieces: list[Piece] = []
    zeros: list[slice] = []
    for first in range(apart):
        filled: list[tuple[int, int]] = []
        empty: list[tuple[int, int]] = []
        for slot in range(first, slots, apart):
            picture, tap = divmod(slot, apart)
            sheet = _sheet_at(along, side, phase.read_first + picture * phase.read_step + tap * phase.tap_step)
            if sheet is None:
                empty.append((slot, slot))
            else:
                filled.append((slot, sheet))
        pieces += _progressions(filled)
        zeros += (piece.slots for piece in _progressions(empty))
    return tuple(pieces), tuple(zeros)


def _progressions(pairs: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """Pairs of a slot and a sheet, as few pieces: those that go up by the same steps are one."""
    at = 0
    while at < len(pairs):
        end, step = at + 1, (1, 1)
        if end < len(pairs) and pairs[end][1] > pairs[at][1]:
            step = _difference(pairs[end], pairs[at])
            while end < len(pairs) and _difference(pairs[end], pairs[end - 1]) == step:
                end += 1
        last = pairs[end - 1]
        slots, sheets = (slice(pairs[at][i], last[i] + 1, step[i]) for i in (0, 1))
        yield Piece(slots, sheets)
        at = end


def _difference(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] - other[0], one[1] - other[1]


def _even(count: int, most: int) -> Iterator[range]:
    """Ranges of at most so many, that differ in their lengths by as little as can be."""
    size = ceil_div(count, ceil_div(count, most))
    yield from (range(first, min(first + size, count)) for first in range(0, count, size))


def _calls(
    part: Problem, axis: int, side: Side, phase: Phase, images: range, apart: int, slots: int
) -> Iterator[StackCall]:
    """The pictures of a block, as few problems: an image's, or one of each image."""
    dense = stacked_picture(part, axis, side, phase.taps)
    sheet = prod(sheet_of(part, axis, side))
    plain = part.y_strides if side == "x" else part.x_strides
    begins = images.start * plain[0] + phase.written_first * plain[2 + axis]
    picture_steps = apart * sheet, phase.written_step * plain[2 + axis]
    image_steps = slots * sheet, plain[0]
    by_image = len(images) <= phase.count
    batch, inner = (phase.count, picture_steps) if by_image else (len(images), image_steps)
    many, outer = (len(images), image_steps) if by_image else (phase.count, picture_steps)
    for number in range(many):
        at_stacked, at_plain = number * outer[0], begins + number * outer[1]
        yield StackCall(
            _picture(dense, part.across(axis), side, batch, inner, (at_stacked, at_plain)), at_stacked, at_plain
        )


def _picture(
    dense: Problem, across: Problem, side: Side, batch: int, steps: tuple[int, int], begins: tuple[int, int]
) -> Problem:
    """On views that begin there, with pictures so far apart: in the stack, and in the other tensor."""
    stacked, plain = steps
    aligned = dense.vector_aligned and not any(begin * dense.element_bytes % 16 for begin in begins)
    if side == "x":
        strides = (stacked, *dense.x_strides[1:]), (plain, *across.y_strides[1:])
    else:
        strides = (plain, *across.x_strides[1:]), (stacked, *dense.y_strides[1:])
    return replace(dense, batch=batch, x_strides=strides[0], y_strides=strides[1], vector_aligned=aligned)
