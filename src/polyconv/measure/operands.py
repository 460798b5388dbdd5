"""Who is timed: polyconv and PyTorch, both in both memory layouts, on the same numbers.

Everything a candidate may prepare once is prepared here, outside the timing: the channels_last candidates get their
input, weight and gradient in that layout, so that no conversion counts against them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..arguments import Geometry
from ..cpu import aten
from ..cpu.aten import convolution_backward, takes_padding
from ..ops.pictures import HEIGHT, picture
from ..problem import Pass, Problem

OURS, OURS_CHANNELS_LAST = "ours", "ours_channels_last"
NCHW, CHANNELS_LAST = "torch_nchw", "torch_channels_last"

Call = Callable[[], Tensor]
"""One pass of one candidate: the output, the input's gradient, or the weight's."""


@dataclass(frozen=True)
class Operands:
    """The tensors of a convolution, dense NCHW; ``dy`` is the incoming gradient, which only gradients need."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    dy: Tensor | None

    @classmethod
    def random(cls, problem: Problem, seed: int = 0) -> Operands:
        """Normal inputs and gradients; weights and bias as ``torch.nn.Conv2d`` draws them."""
        draw = torch.Generator().manual_seed(seed)
        bound = (problem.channels_per_group[0] * prod(problem.kernel)) ** -0.5
        return cls(
            x=torch.randn(problem.x_shape, generator=draw),
            w=torch.empty(problem.w_shape).uniform_(-bound, bound, generator=draw),
            bias=torch.empty(problem.out_channels).uniform_(-bound, bound, generator=draw) if problem.bias else None,
            dy=None if problem.kind is Pass.FPROP else torch.randn(problem.y_shape, generator=draw),
        )

    def to(self, device: torch.device) -> Operands:
        """The same on another device."""
        moved = [None if tensor is None else tensor.to(device) for tensor in (self.bias, self.dy)]
        return Operands(self.x.to(device), self.w.to(device), *moved)

    def channels_last(self) -> Operands:
        """The same in that layout. All are new tensors: what is kept of a weight is kept for one layout at a time."""
        dy = None if self.dy is None else _channels_last(self.dy)
        return Operands(_channels_last(self.x), _channels_last(self.w), self.bias, dy)

    def pictures(self) -> Operands:
        """The same memory, over height and width."""
        return Operands(picture(self.x), picture(self.w), self.bias, None if self.dy is None else picture(self.dy))


def _channels_last(tensor: Tensor) -> Tensor:
    """A copy in that layout: that of the picture, if the tensor has one axis, because torch has a name for no other."""
    copy = picture(tensor).clone(memory_format=torch.channels_last)
    return copy if copy.dim() == tensor.dim() else copy.squeeze(HEIGHT)


def candidates(
    problem: Problem, operands: Operands, *, transposed: bool = False, fresh_weights: bool = False
) -> dict[str, Call]:
    """Each candidate's call, by name.

    ``transposed``: the problem is a pass of a transposed convolution, and that is what is asked of PyTorch.
    ``fresh_weights``: ours gets a weight that it has never seen, every time.
    """
    last = operands.channels_last()
    theirs = pytorch_transposed if transposed else pytorch
    return {
        OURS: ours(problem, operands, fresh_weights=fresh_weights),
        NCHW: theirs(problem, operands),
        OURS_CHANNELS_LAST: ours(problem, last, fresh_weights=fresh_weights),
        CHANNELS_LAST: theirs(problem, last),
    }


def ours(problem: Problem, operands: Operands, *, fresh_weights: bool = False) -> Call:
    """The operator of the pass, as it is called by a program, and by a backward pass."""
    geometry = Geometry(
        problem.stride,
        problem.padding,
        problem.dilation,
        problem.groups,
        str(problem.padding_mode),
        problem.tolerance,
    )
    x, w, bias, dy = operands.x, operands.w, operands.bias, operands.dy
    if problem.kind is Pass.FPROP:
        if fresh_weights:
            return lambda: ops.fprop(x, w.clone(), bias, *geometry)
        return lambda: ops.fprop(x, w, bias, *geometry)
    assert dy is not None  # both gradients read it
    if problem.kind is Pass.DGRAD:
        if fresh_weights:
            return lambda: ops.input_gradient(dy, w.clone(), x, geometry)
        return lambda: ops.input_gradient(dy, w, x, geometry)
    return lambda: ops.weight_gradient(dy, x, w, problem.bias, geometry)[0]


def pytorch(problem: Problem, operands: Operands) -> Call:
    """PyTorch's convolution, or of its backward pass only the gradient that is asked for.

    A padding that its kernels do not know is done as ``torch.nn.Conv2d`` does it, on a padded copy.
    """
    x, w, bias, dy = operands.x, operands.w, operands.bias, operands.dy
    if not takes_padding(problem):
        return _padded(problem, operands)
    if problem.kind is Pass.FPROP:
        convolve: Any = getattr(F, f"conv{problem.rank}d")
        numbers = problem.stride, problem.padding[::2], problem.dilation, problem.groups
        return lambda: convolve(x, w, bias, *numbers)
    assert dy is not None  # both gradients read it
    if problem.kind is Pass.DGRAD:
        return lambda: convolution_backward(problem, dy, x, w, (True, False, False))[0]
    return lambda: convolution_backward(problem, dy, x, w, (False, True, problem.bias))[1]


def pytorch_transposed(problem: Problem, operands: Operands) -> Call:
    """The same of the transposed convolution that the problem belongs to: it reads ``dy`` and writes ``x``."""
    grad, w = operands.x, operands.w
    padding = problem.padding[::2]
    extra = [
        extent - ((outputs - 1) * step - 2 * before + reach * (taps - 1) + 1)
        for extent, outputs, step, before, reach, taps in zip(
            problem.in_size, problem.out_size, problem.stride, padding, problem.dilation, problem.kernel, strict=True
        )
    ]
    if problem.kind is Pass.DGRAD:
        x = operands.dy
        transpose: Any = getattr(F, f"conv_transpose{problem.rank}d")
        return lambda: transpose(x, w, None, problem.stride, padding, extra, problem.groups, problem.dilation)
    wants_x = problem.kind is Pass.FPROP
    x = operands.dy
    if wants_x:  # then nothing but the shape and the layout of the input is looked at
        x = grad.new_empty(problem.y_shape)
        x = _channels_last(x) if picture(grad).is_contiguous(memory_format=torch.channels_last) else x
    numbers = [*problem.stride], [*padding], [*problem.dilation], True, extra, problem.groups
    wanted = [wants_x, not wants_x, False]
    backward: Any = torch.ops.aten.convolution_backward
    return lambda: backward(grad, x, w, None, *numbers, wanted)[0 if wants_x else 1]


def _padded(problem: Problem, operands: Operands) -> Call:
    name = {Pass.FPROP: "y", Pass.DGRAD: "x", Pass.WGRAD: "dw"}[problem.kind]
    inputs: dict[str, Tensor | None] = {"x": operands.x, "w": operands.w, "bias": operands.bias, "y": operands.dy}
    like = {"y": problem.y_shape, "x": problem.x_shape, "dw": problem.w_shape}[name]

    def call() -> Tensor:
        tensors = {key: tensor for key, tensor in inputs.items() if tensor is not None}
        tensors[name] = operands.x.new_empty(like)
        aten.run(problem, tensors)
        return tensors[name]

    return call
