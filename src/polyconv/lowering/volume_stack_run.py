"""Execution of :mod:`polyconv.lowering.volume_stack`: slices copied to a stack, or summed from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from math import prod

import torch
from torch import Tensor

from ..backend import Run
from ..problem import RESULTS, Activation, Pass, Problem
from ..util.intmath import ceil_div
from .epilogue import apply_epilogue, begun, summed_per_channel
from .volume_stack import Block, Side, Stack, StackCall, StackedPhase


def stacked(stack: Stack, runs: Mapping[Problem, Run]) -> Run:
    """Run of a 3-D problem from the runs of its 2-D problems. All blocks share one buffer."""
    problem = stack.problem
    run_pass = _run_weight_gradient if problem.kind is Pass.WGRAD else _run_pictures

    def run_all(tensors: MutableMapping[str, Tensor]) -> None:
        result = tensors[RESULTS[problem.kind]]
        if stack.written:
            begun(result, tensors.get("bias"), tensors.get("residual"), Activation.NONE)
        for place in stack.gaps:
            result.select(2 + stack.axis, place).zero_()
        run_pass(stack, runs, tensors)
        if stack.written:
            apply_epilogue(result, None, problem.activation)
        if "db" in tensors:
            tensors["db"].copy_(summed_per_channel(tensors["y"]))

    return run_all


def _run_pictures(stack: Stack, runs: Mapping[Problem, Run], tensors: Mapping[str, Tensor]) -> None:
    """Forward pass or input gradient."""
    memory = tensors[stack.side].new_empty(stack.room)
    for phase in stack.phases:
        w = stacked_weights(tensors["w"], phase.taps, stack.axis, stack.side, stack.problem.groups)
        for block, views in _blocks(stack, phase, tensors, memory):
            for call, own in views:
                runs[call.problem]({**own, "w": w, **({"bias": tensors["bias"]} if call.problem.bias else {})})
            if stack.written:
                for sheets, slots in _pieces(stack, block, tensors, memory):
                    sheets.add_(slots)


def _run_weight_gradient(stack: Stack, runs: Mapping[Problem, Run], tensors: Mapping[str, Tensor]) -> None:
    """Weight gradient: sum the gradients of all 2-D problems, then scatter them to the taps."""
    memory = tensors[stack.side].new_empty(stack.room)
    for phase in stack.phases:
        first: Tensor | None = None
        for _, views in _blocks(stack, phase, tensors, memory):
            for call, own in views:
                dw = memory.new_empty(call.problem.w_shape)
                runs[call.problem]({**own, "dw": dw})
                first = dw if first is None else first.add_(dw)
        assert first is not None
        apart = of_taps(first, len(phase.taps), stack.side, stack.problem.groups)
        for tap, of_tap in zip(phase.taps, apart, strict=True):
            tensors["dw"].select(2 + stack.axis, tap).copy_(of_tap)


_Views = Iterator[tuple[StackCall, dict[str, Tensor]]]
"""For each 2-D problem of a block, its tensors except the weight."""


def _blocks(
    stack: Stack, phase: StackedPhase, tensors: Mapping[str, Tensor], memory: Tensor
) -> Iterator[tuple[Block, _Views]]:
    """Blocks with their views, each after its slices are copied to the stack, unless the pass writes the stack."""
    for block in phase.blocks:
        if not stack.written:
            for sheets, slots in _pieces(stack, block, tensors, memory):
                slots.copy_(sheets)
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
    channels, *size = stack.sheet
    own = memory[: images * block.slots * prod(stack.sheet)]
    if groups == 1:
        return own.view(images, block.slots, 1, channels, *size)[:, slots]
    taps = block.apart  # with groups, 2-D problems share no slot
    first, tap = divmod(slots.start, taps)
    pictures = own.view(images, -1, groups, taps, channels // groups, *size)
    return pictures[:, first : ceil_div(slots.stop - tap, taps) : ceil_div(slots.step, taps), :, tap]


def _pieces(
    stack: Stack, block: Block, tensors: Mapping[str, Tensor], memory: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Slices of the tensor and their slots in the stack."""
    images = tensors[stack.side][block.images.start : block.images.stop].movedim(2 + stack.axis, 1)
    for piece in block.pieces:
        yield (
            images[:, piece.sheets].unflatten(2, (stack.problem.groups, -1)),
            _slots(stack, block, memory, piece.slots),
        )


def stacked_weights(w: Tensor, taps: tuple[int, ...], axis: int, side: Side, groups: int) -> Tensor:
    """Weights of some taps in the channel order of the stack; contiguous for any layout of ``w``."""
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
