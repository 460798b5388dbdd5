"""Runs a problem over three axes as the pictures of :mod:`polyconv.stacks`: copies of sheets, side by side, or sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from math import prod

import torch
from torch import Tensor

from .epilogue import apply_epilogue, begun, summed_per_channel
from .problem import RESULTS, Activation, Pass, Problem
from .readiness import Run
from .rounding import ceil_div
from .stacks import Block, Side, Stack, StackCall, StackedPhase


def stacked(stack: Stack, runs: Mapping[Problem, Run]) -> Run:
    """What runs a problem over three axes, from what runs its pictures. All blocks share one piece of memory."""
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
    """Forward, or the gradient of the input."""
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
    """Each problem's gradient is that of some pictures: they are added up, and then go where the taps belong."""
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
"""Of the tensors but the weight, for each problem of a block."""


def _blocks(
    stack: Stack, phase: StackedPhase, tensors: Mapping[str, Tensor], memory: Tensor
) -> Iterator[tuple[Block, _Views]]:
    """Each block, once its sheets lie in the stack, unless they are yet to be computed."""
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
    """Some slots of a stack: images, slots, groups, and what a group has of a sheet."""
    images, groups = len(block.images), stack.problem.groups
    channels, *size = stack.sheet
    own = memory[: images * block.slots * prod(stack.sheet)]
    if groups == 1:
        return own.view(images, block.slots, 1, channels, *size)[:, slots]
    taps = block.apart  # pictures share no slot
    first, tap = divmod(slots.start, taps)
    pictures = own.view(images, -1, groups, taps, channels // groups, *size)
    return pictures[:, first : ceil_div(slots.stop - tap, taps) : ceil_div(slots.step, taps), :, tap]


def _pieces(
    stack: Stack, block: Block, tensors: Mapping[str, Tensor], memory: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Sheets of the tensor, and the slots that they have in the stack."""
    images = tensors[stack.side][block.images.start : block.images.stop].movedim(2 + stack.axis, 1)
    for piece in block.pieces:
        yield (
            images[:, piece.sheets].unflatten(2, (stack.problem.groups, -1)),
            _slots(stack, block, memory, piece.slots),
        )


def stacked_weights(w: Tensor, taps: tuple[int, ...], axis: int, side: Side, groups: int) -> Tensor:
    """Those of some taps, in the order of the stack's channels; dense, whatever the layout of ``w``."""
    first, *others = (_grouped(w.select(2 + axis, tap), side, groups) for tap in taps)
    dense = w.new_empty(first.shape[0], len(taps), *first.shape[1:])  # left to itself, torch would keep the layout
    stacked = torch.stack([first, *others], 1, out=dense)
    return stacked.flatten(1, 2) if side == "x" else stacked.flatten(0, 2)


def of_taps(dw: Tensor, taps: int, side: Side, groups: int) -> Iterator[Tensor]:
    """The reverse of :func:`stacked_weights`, tap by tap."""
    across = dw.unflatten(1, (taps, -1)) if side == "x" else dw.unflatten(0, (groups, taps, -1))
    yield from (one if side == "x" else one.flatten(0, 1) for one in across.unbind(1))


def _grouped(w: Tensor, side: Side, groups: int) -> Tensor:
    """Weights of one tap, with what the taps are beside as the second dimension: channels, of input or output."""
    return w if side == "x" else w.unflatten(0, (groups, -1))
