"""Lowering of volumes (3-D) to 2-D problems with the taps of one axis stacked as channels.

:mod:`polyconv.lowering.volume_sum` runs a 2-D problem per tap and adds the results. Here the taps become channels,
which kernels sum anyway: nothing is added to an output in memory, and few channels become more. Either tensor can be
stacked:

* the *input*: one 2-D problem per output slice, whose input channels are those of all slices that it reads;
* the *output*: one 2-D problem per input slice, whose output channels are those of all slices that it contributes to.
  With a stride, the taps depend on the residue of the slice (:func:`~polyconv.algebra.polyphase.gradient_phases`).

A pass that reads the stacked tensor reads a copy. Neighbouring 2-D problems overlap there, so that each slice is copied
once, unless dilation or groups prevent it. A pass that writes the stacked tensor writes a stack, whose slices are added
to the result. Both work in blocks that fit the workspace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod, sqrt
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ..activation import Activation
from ..algebra.polyphase import Phase, forward_phases, gradient_phases
from ..numerics.aliasing import all_apart
from ..numerics.prediction import error_of_additions, rounding_error
from ..problem import AXES, RESULTS, PaddingMode, Pass, Problem, contiguous_strides
from ..util.intmath import ceil_div
from .base import WeightPart, run_with_part
from .epilogue import apply_epilogue, begun, summed_per_channel
from .extreme_geometry import Axis

if TYPE_CHECKING:  # planners import this module, and need no torch
    from torch import Tensor

    from ..backend import Run

Side = Literal["x", "y"]
"""Stacked tensor, by its name in a :class:`~polyconv.problem.Problem`."""

NAMES: dict[Side, str] = {"x": "stacked inputs", "y": "stacked outputs"}
"""Candidate names."""


class Piece(NamedTuple):
    """Equally spaced slots of the stack, and the equally spaced slices of the tensor that they hold."""

    slots: slice
    slices: slice


@dataclass(frozen=True, slots=True)
class StackCall:
    """One 2-D problem, batched over the slices of an image or over images. Its weight is contiguous."""

    problem: Problem
    stacked: int
    plain: int
    """Offsets of its views in the stack and in the other tensor [elements]."""


@dataclass(frozen=True, slots=True)
class Block:
    """2-D problems that share one fill of the stack. Per image, a stack has a row of slots of one slice each. With
    groups, the slots of a 2-D problem are ordered by group: one group's channels of each slice, then the next's."""

    images: range
    slots: int
    apart: int
    """Distance between the first slots of consecutive 2-D problems [slots]."""
    pieces: tuple[Piece, ...]
    zeros: tuple[slice, ...]
    """Slots of padding."""
    calls: tuple[StackCall, ...]


@dataclass(frozen=True, slots=True)
class StackedPhase:
    """2-D problems with the same taps."""

    taps: tuple[int, ...]
    """Taps of the kernel, in the order of their slices."""
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """A 3-D problem as 2-D problems on one stacked tensor."""

    problem: Problem
    axis: int
    side: Side
    phases: tuple[StackedPhase, ...]
    gaps: tuple[int, ...]
    """Slices of the result without any contribution, to be zeroed; empty if the stack is written."""
    additions: int
    """Largest number of additions to one element of the result."""

    @property
    def name(self) -> str:
        return NAMES[self.side]

    @property
    def calls(self) -> tuple[StackCall, ...]:
        return tuple(call for block in self.blocks for call in block.calls)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(dict.fromkeys(call.problem for call in self.calls))

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        """Run the 2-D problems block by block. All blocks share one buffer."""
        problem = self.problem
        run_pass = _run_weight_gradient if problem.kind is Pass.WGRAD else _run_fprop_or_dgrad

        def run_all(tensors: MutableMapping[str, Tensor]) -> None:
            result = tensors[RESULTS[problem.kind]]
            if self.written:
                begun(result, tensors.get("bias"), tensors.get("residual"), Activation.NONE)
            for place in self.gaps:
                result.select(2 + self.axis, place).zero_()
            run_pass(self, runs, tensors)
            if self.written:
                apply_epilogue(result, None, problem.activation)
            if "db" in tensors:
                tensors["db"].copy_(summed_per_channel(tensors["y"]))

        return run_all

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for phase in self.phases for block in phase.blocks)

    @property
    def written(self) -> bool:
        """True if the stack is written, then added to the result; False if it is a copy that is read."""
        return RESULTS[self.problem.kind] == self.side

    @property
    def slice_shape(self) -> tuple[int, ...]:
        return slice_shape(self.problem, self.axis, self.side)

    @property
    def stacked_elements(self) -> int:
        """Total elements copied to stacks or added from them."""
        return prod(self.slice_shape) * sum(len(block.images) * block.slots for block in self.blocks)

    @property
    def room(self) -> int:
        """Elements of the largest stack."""
        return prod(self.slice_shape) * max(len(block.images) * block.slots for block in self.blocks)

    @property
    def extra_traffic(self) -> tuple[int, int]:
        """Extra traffic of stacking slices, reordering weights and summing their gradients: (bytes, launches)."""
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
        """With the rounding of a weight gradient's parts, whose errors add up as independent ones."""
        rounded = sqrt(self.additions) * rounding_error(self.problem)
        return max(errors) + error_of_additions(self.problem, self.additions) + rounded

    def in_words(self) -> str:
        tensor = {"x": "input", "y": "output"}[self.side]
        *fewer, taps = sorted({len(phase.taps) for phase in self.phases})
        size = f"{self.stacked_elements * self.problem.element_bytes / 2**20:.1f} MiB"
        channels, what = taps * self.slice_shape[0], "added up" if self.written else "copied"
        return (
            f"{len(self.calls)} problems across the {AXES[3][self.axis]}, with the {tensor} slices of "
            f"{'up to ' if fewer else ''}{taps} taps stacked as {channels} channels; {size} are {what}:"
        )


@lru_cache(maxsize=1024)
def stack(problem: Problem, side: Side, room: int) -> Stack | str:
    """Lower a 3-D problem with one tensor stacked in ``room`` bytes, sliced across the first axis with the fewest taps
    above one. Returns the reason if that is impossible."""
    several = [taps for taps in problem.kernel if taps > 1]
    if not several:
        return "no axis has more than one tap"
    axis = problem.kernel.index(min(several))
    along = Axis.of(problem, problem.in_size, problem.kernel, axis)
    if side == "y" and problem.padding_mode is not PaddingMode.ZEROS and max(along.before, along.after) > 0:
        return f"with {problem.padding_mode} padding the output slices of a tap are not equally spaced"
    tensors = {"x": (problem.x_shape, problem.x_strides), "y": (problem.y_shape, problem.y_strides)}
    w = problem.w_shape, problem.w_strides
    if not all(all_apart(*tensor) for tensor in (tensors[side], w)):
        return "elements repeat in memory, as in an expanded tensor, and the error model cannot see that of a copy"
    slice_bytes = problem.element_bytes * prod(slice_shape(problem, axis, side))
    phases = phases_of(problem, axis, side)
    most = max(phase.taps for phase in phases)
    if most * slice_bytes > room:
        return f"{most} slices take {most * slice_bytes / 2**20:.1f} MiB, and the workspace is {room / 2**20:.1f} MiB"
    slices = room // slice_bytes
    written = RESULTS[problem.kind] == side
    additions, gaps = 0, []
    if problem.kind is Pass.WGRAD:  # the results of all 2-D problems are added to the first one
        found = [_blocks(problem, axis, side, along, phase, slices) for phase in phases if phase.taps]
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
        StackedPhase(_taps(phase), tuple(_blocks(part, axis, side, along, phase, slices)))
        for phase in phases
        if phase.taps
    )
    return Stack(problem, axis, side, stacked, tuple(gaps), additions)


def phases_of(problem: Problem, axis: int, side: Side) -> tuple[Phase, ...]:
    """Phases with forward taps, in which the stacked tensor is *read* and the other one is *written*."""
    kernel, stride, dilation = problem.kernel[axis], problem.stride[axis], problem.dilation[axis]
    before = problem.padding[2 * axis]
    if side == "x":
        return forward_phases(problem.out_size[axis], kernel, stride, dilation, before)
    found = gradient_phases(problem.in_size[axis], kernel, stride, dilation, before)
    return tuple(phase.forwards() for phase in found)


def stacked_problem(problem: Problem, axis: int, side: Side, taps: int) -> Problem:
    """2-D problem of one slice with ``taps`` slices of a tensor as channels, and contiguous strides."""
    flat = replace(problem.across(axis), batch=1)
    if side == "x":
        flat = replace(flat, in_channels=taps * problem.in_channels)
    else:
        flat = replace(flat, out_channels=taps * problem.out_channels)
    x, w, y = map(contiguous_strides, (flat.x_shape, flat.w_shape, flat.y_shape))
    return replace(flat, x_strides=x, w_strides=w, y_strides=y)


def slice_shape(problem: Problem, axis: int, side: Side) -> tuple[int, ...]:
    """Channels and extents of one slice."""
    across = problem.across(axis)
    return across.x_shape[1:] if side == "x" else across.y_shape[1:]


def _taps(phase: Phase) -> tuple[int, ...]:
    return tuple(phase.tap_first + i * phase.tap_stride for i in range(phase.taps))


def _positions(phase: Phase) -> range:
    """Slices of the tensor that is not stacked."""
    return range(phase.written_first, phase.written_first + phase.count * phase.written_step, phase.written_step)


def _most_additions(problem: Problem, along: Axis, side: Side, phases: Iterable[Phase]) -> int:
    met = Counter(
        _slice_at(along, side, phase.read_first + i * phase.read_step + j * phase.tap_step)
        for phase in phases
        for i in range(phase.count)
        for j in range(phase.taps)
    )
    del met[None]
    begun = int(problem.bias or problem.residual)
    return max(met.values(), default=0) + begun


def _slice_at(along: Axis, side: Side, place: int) -> int | None:
    """Slice of the stacked tensor at a position along the axis, None for zeros."""
    if side == "x":
        return along.pixel_at(place)
    return place if 0 <= place < along.outputs else None


def _blocks(part: Problem, axis: int, side: Side, along: Axis, phase: Phase, room: int) -> Iterator[Block]:
    """Blocks of images, or of parts of an image, that fit a stack of ``room`` slices, of nearly equal size."""
    apart = _slots_apart(phase, overlap=RESULTS[part.kind] != side and part.groups == 1)

    def slots_for(count: int) -> int:
        return (count - 1) * apart + phase.taps

    images = max(1, room // slots_for(phase.count))
    most = phase.count if images > 1 else min(phase.count, (room - phase.taps) // apart + 1)
    for own_images in _even(part.batch, images):
        for own in _even(phase.count, most):
            cut, slots = phase.cut(own.start, len(own)), slots_for(len(own))
            pieces, zeros = _pieces(along, side, cut, apart, slots)
            calls = tuple(_calls(part, axis, side, cut, own_images, apart, slots))
            yield Block(own_images, slots, apart, pieces, zeros, calls)


def _slots_apart(phase: Phase, *, overlap: bool) -> int:
    """Distance between consecutive 2-D problems [slots]: below ``phase.taps`` if they can share slots."""
    steps, rest = divmod(phase.read_step, phase.tap_step)
    return steps if overlap and not rest and steps < phase.taps else phase.taps


def _pieces(
    along: Axis, side: Side, phase: Phase, apart: int, slots: int
) -> tuple[tuple[Piece, ...], tuple[slice, ...]]:
    """Slices with their slots, and the slots of zeros."""
    pieces: list[Piece] = []
    zeros: list[slice] = []
    for first in range(apart):
        filled: list[tuple[int, int]] = []
        empty: list[tuple[int, int]] = []
        for slot in range(first, slots, apart):
            number, tap = divmod(slot, apart)
            found = _slice_at(along, side, phase.read_first + number * phase.read_step + tap * phase.tap_step)
            if found is None:
                empty.append((slot, slot))
            else:
                filled.append((slot, found))
        pieces += _progressions(filled)
        zeros += (piece.slots for piece in _progressions(empty))
    return tuple(pieces), tuple(zeros)


def _progressions(pairs: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    """(slot, slice) pairs as few pieces: arithmetic progressions are merged."""
    at = 0
    while at < len(pairs):
        end, step = at + 1, (1, 1)
        if end < len(pairs) and pairs[end][1] > pairs[at][1]:
            step = _difference(pairs[end], pairs[at])
            while end < len(pairs) and _difference(pairs[end], pairs[end - 1]) == step:
                end += 1
        last = pairs[end - 1]
        slots, slices = (slice(pairs[at][i], last[i] + 1, step[i]) for i in (0, 1))
        yield Piece(slots, slices)
        at = end


def _difference(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] - other[0], one[1] - other[1]


def _even(count: int, most: int) -> Iterator[range]:
    """Ranges of at most ``most`` elements and nearly equal length."""
    size = ceil_div(count, ceil_div(count, most))
    yield from (range(first, min(first + size, count)) for first in range(0, count, size))


def _calls(
    part: Problem, axis: int, side: Side, phase: Phase, images: range, apart: int, slots: int
) -> Iterator[StackCall]:
    """2-D problems of a block, batched over the slices of an image or over images, whichever makes fewer calls."""
    dense = stacked_problem(part, axis, side, phase.taps)
    size = prod(slice_shape(part, axis, side))
    plain = part.y_strides if side == "x" else part.x_strides
    begins = images.start * plain[0] + phase.written_first * plain[2 + axis]
    slice_steps = apart * size, phase.written_step * plain[2 + axis]
    image_steps = slots * size, plain[0]
    by_image = len(images) <= phase.count
    batch, inner = (phase.count, slice_steps) if by_image else (len(images), image_steps)
    many, outer = (len(images), image_steps) if by_image else (phase.count, slice_steps)
    for number in range(many):
        at_stacked, at_plain = number * outer[0], begins + number * outer[1]
        yield StackCall(
            _on_views(dense, part.across(axis), side, batch, inner, (at_stacked, at_plain)), at_stacked, at_plain
        )


def _on_views(
    dense: Problem, across: Problem, side: Side, batch: int, steps: tuple[int, int], begins: tuple[int, int]
) -> Problem:
    """2-D problem on views; ``steps`` and ``begins`` are batch strides and offsets in the stack and other tensor."""
    stacked, plain = steps
    aligned = dense.vector_aligned and not any(begin * dense.element_bytes % 16 for begin in begins)
    if side == "x":
        strides = (stacked, *dense.x_strides[1:]), (plain, *across.y_strides[1:])
    else:
        strides = (plain, *across.x_strides[1:]), (stacked, *dense.y_strides[1:])
    return replace(dense, batch=batch, x_strides=strides[0], y_strides=strides[1], vector_aligned=aligned)


# ---- execution


def _run_fprop_or_dgrad(stack: Stack, runs: Mapping[Problem, Run], tensors: Mapping[str, Tensor]) -> None:
    """Forward pass or input gradient."""
    memory = tensors[stack.side].new_empty(stack.room)
    for phase in stack.phases:
        part = _part(stack, phase, tensors["w"])
        for block, views in _filled_blocks(stack, phase, tensors, memory):
            for call, own in views:
                given = {**own, "bias": tensors["bias"]} if call.problem.bias else own
                run_with_part(runs[call.problem], given, part)
            if stack.written:
                for slices, slots in _slices_and_slots(stack, block, tensors, memory):
                    slices.add_(slots)


def _part(stack: Stack, phase: StackedPhase, w: Tensor) -> WeightPart:
    """Stacked weights of a phase, made once at most."""
    make = lru_cache(1)(lambda: stacked_weights(w, phase.taps, stack.axis, stack.side, stack.problem.groups))
    return WeightPart(w, f"{stack.name} {stack.axis} {phase.taps}".encode(), make)


def _run_weight_gradient(stack: Stack, runs: Mapping[Problem, Run], tensors: Mapping[str, Tensor]) -> None:
    """Weight gradient: sum the gradients of all 2-D problems in float32, then scatter them to the taps."""
    memory = tensors[stack.side].new_empty(stack.room)
    for phase in stack.phases:
        first: Tensor | None = None
        for _, views in _filled_blocks(stack, phase, tensors, memory):
            for call, own in views:
                dw = memory.new_empty(call.problem.w_shape)
                runs[call.problem]({**own, "dw": dw})
                first = dw.float() if first is None else first.add_(dw)
        assert first is not None
        apart = of_taps(first, len(phase.taps), stack.side, stack.problem.groups)
        for tap, of_tap in zip(phase.taps, apart, strict=True):
            tensors["dw"].select(2 + stack.axis, tap).copy_(of_tap)


_Views: TypeAlias = "Iterator[tuple[StackCall, dict[str, Tensor]]]"
"""For each 2-D problem of a block, its tensors except the weight."""


def _filled_blocks(
    stack: Stack, phase: StackedPhase, tensors: Mapping[str, Tensor], memory: Tensor
) -> Iterator[tuple[Block, _Views]]:
    """Blocks with their views, each after its slices are copied to the stack, unless the pass writes the stack."""
    for block in phase.blocks:
        if not stack.written:
            for slices, slots in _slices_and_slots(stack, block, tensors, memory):
                slots.copy_(slices)
            for zeros in block.zeros:
                _slots(stack, block, memory, zeros).zero_()
        yield block, _views(stack, block, tensors, memory)


def _views(stack: Stack, block: Block, tensors: Mapping[str, Tensor], memory: Tensor) -> _Views:
    for call in block.calls:
        problem = call.problem
        shapes = {"x": (problem.x_shape, problem.x_strides), "y": (problem.y_shape, problem.y_strides)}
        views = {
            name: memory.as_strided(*view, call.stacked) if name == stack.side else _seen(tensors[name], *view, call)
            for name, view in shapes.items()
        }
        if problem.residual:
            views["residual"] = _seen(tensors["residual"], *shapes["y"], call)
        yield call, views


def _seen(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], call: StackCall) -> Tensor:
    return tensor.as_strided(shape, strides, tensor.storage_offset() + call.plain)


def _slots(stack: Stack, block: Block, memory: Tensor, slots: slice) -> Tensor:
    """View of some slots of a stack: images, slots, groups, channels of a group, extents of a slice."""
    images, groups = len(block.images), stack.problem.groups
    channels, *size = stack.slice_shape
    own = memory[: images * block.slots * prod(stack.slice_shape)]
    if groups == 1:
        return own.view(images, block.slots, 1, channels, *size)[:, slots]
    taps = block.apart  # with groups, 2-D problems share no slot
    first, tap = divmod(slots.start, taps)
    by_tap = own.view(images, -1, groups, taps, channels // groups, *size)
    return by_tap[:, first : ceil_div(slots.stop - tap, taps) : ceil_div(slots.step, taps), :, tap]


def _slices_and_slots(
    stack: Stack, block: Block, tensors: Mapping[str, Tensor], memory: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Slices of the tensor and their slots in the stack."""
    images = tensors[stack.side][block.images.start : block.images.stop].movedim(2 + stack.axis, 1)
    for piece in block.pieces:
        yield (
            images[:, piece.slices].unflatten(2, (stack.problem.groups, -1)),
            _slots(stack, block, memory, piece.slots),
        )


def stacked_weights(w: Tensor, taps: tuple[int, ...], axis: int, side: Side, groups: int) -> Tensor:
    """Weights of some taps in the channel order of the stack; contiguous for any layout of ``w``."""
    import torch

    first, *others = (_grouped(w.select(2 + axis, tap), side, groups) for tap in taps)
    dense = w.new_empty(first.shape[0], len(taps), *first.shape[1:])  # torch.stack alone would keep the layout
    stacked = torch.stack([first, *others], 1, out=dense)
    return stacked.flatten(1, 2) if side == "x" else stacked.flatten(0, 2)


def of_taps(dw: Tensor, taps: int, side: Side, groups: int) -> Iterator[Tensor]:
    """Inverse of :func:`stacked_weights`, tap by tap."""
    across = dw.unflatten(1, (taps, -1)) if side == "x" else dw.unflatten(0, (groups, taps, -1))
    yield from (one if side == "x" else one.flatten(0, 1) for one in across.unbind(1))


def _grouped(w: Tensor, side: Side, groups: int) -> Tensor:
    """Weights of one tap with the channels to be stacked, of the input or of a group's output, as dimension 1."""
    return w if side == "x" else w.unflatten(0, (groups, -1))
