"""Runs a problem over three axes as the pictures of :mod:`polyconv.stacks`: copies of sheets, side by side, or sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import torch
from torch import Tensor

from .epilogue import apply_epilogue, begun, summed_per_channel
from .problem import RESULTS, Activation, Pass, Problem
from .readiness import Run
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
        w = stacked_weights(tensors["w"], phase.taps, stack.axis, stack.side)
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
        of_taps = _by_tap(first, len(phase.taps), stack.side)
        for i, tap in enumerate(phase.taps):
            tensors["dw"].select(2 + stack.axis, tap).copy_(of_taps[i])


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
                _slots(stack, block, memory)[:, zeros].zero_()
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


def _slots(stack: Stack, block: Block, memory: Tensor) -> Tensor:
    """A stack: images, slots, and what a sheet is."""
    shape = (len(block.images), block.slots, *stack.sheet)
    return memory[: torch.Size(shape).numel()].view(shape)


def _pieces(
    stack: Stack, block: Block, tensors: Mapping[str, Tensor], memory: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Sheets of the tensor, and the slots that they have in the stack."""
    images = tensors[stack.side][block.images.start : block.images.stop].movedim(2 + stack.axis, 1)
    slots = _slots(stack, block, memory)
    for piece in block.pieces:
        yield images[:, piece.sheets], slots[:, piece.slots]


def stacked_weights(w: Tensor, taps: tuple[int, ...], axis: int, side: Side) -> Tensor:
    """Those of some taps, in the order of the stack's channels; dense, whatever the layout of ``w``."""
    own, dim = [w.select(2 + axis, tap) for tap in taps], _DIM_OF_TAPS[side]
    shape = own[0].shape
    dense = w.new_empty(*shape[:dim], len(taps), *shape[dim:])  # left to itself, torch would keep the layout
    return torch.stack(own, dim, out=dense).flatten(dim, dim + 1)


def _by_tap(dw: Tensor, taps: int, side: Side) -> Tensor:
    """A gradient in the order of :func:`stacked_weights`, with the taps apart, and first."""
    dim = _DIM_OF_TAPS[side]
    return dw.reshape(*dw.shape[:dim], taps, -1, *dw.shape[dim + 1 :]).movedim(dim, 0)


_DIM_OF_TAPS: dict[Side, int] = {"x": 1, "y": 0}
"""Of weights, before channels and taps are one: beside the channels that are stacked."""
