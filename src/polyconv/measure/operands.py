"""Who is timed: polyconv and PyTorch, both in both memory layouts, on the same numbers.

Everything a candidate may prepare once is prepared here, outside the timing: the channels_last candidates get their
input, weight and gradient in that layout, so that no conversion counts against them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..arguments import CHANNELS_LAST as CHANNELS_LAST_OF
from ..arguments import Geometry
from ..cpu import aten
from ..cpu.aten import takes_padding
from ..cpu.convolutions import CONVOLUTIONS, convolution_backward
from ..nn import OURS as OF_TORCHS
from ..ops.pictures import HEIGHT, picture
from ..problem import RESULTS, Pass, Problem
from ..sheets import result_shape

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
        """The same memory, of signals over height and width."""
        return Operands(picture(self.x), picture(self.w), self.bias, None if self.dy is None else picture(self.dy))


def _channels_last(tensor: Tensor) -> Tensor:
    """A copy in that layout: that of the picture, if the tensor is a signal, because torch has no name for its own."""
    seen = picture(tensor)
    copy = seen.clone(memory_format=CHANNELS_LAST_OF[seen.dim()])
    return copy if copy.dim() == tensor.dim() else copy.squeeze(HEIGHT)


def candidates(
    problem: Problem, operands: Operands, *, transposed: bool = False, fresh_weights: bool = False
) -> dict[str, Call]:
    """Each candidate's call, by name.

    They are modules, as programs have them: where PyTorch's convolution is the plan of all passes, ours is nothing but
    a call of it. What PyTorch cannot pad, and fresh weights, are calls of the operators.

    Layouts alternate. Calls are timed in this order: none comes after one that left its own tensors in the caches.

    Args:
        problem: a pass.
        operands: its tensors.
        transposed: the pass is one of a transposed convolution, and that is what is asked of PyTorch.
        fresh_weights: ours gets a weight that it has never seen, every time.
    """
    last = operands.channels_last()
    module: Any = getattr(nn, f"Conv{'Transpose' * transposed}{problem.rank}d")
    as_modules = takes_padding(problem)
    mine: Callable[[Operands], Call] = partial(ours, problem, fresh_weights=fresh_weights)
    if as_modules and not fresh_weights:
        counterpart: Any = OF_TORCHS[module]
        mine = partial(_by_module, problem, partial(counterpart, tolerance=problem.tolerance), transposed)
    theirs: Callable[[Operands], Call] = partial(pytorch, problem)
    if as_modules:
        theirs = partial(_by_module, problem, module, transposed)
    return {
        OURS: mine(operands),
        OURS_CHANNELS_LAST: mine(last),
        NCHW: theirs(operands),
        CHANNELS_LAST: theirs(last),
    }


def _by_module(problem: Problem, kind: Callable[..., Any], transposed: bool, operands: Operands) -> Call:
    """The forward pass of a module, or of its backward pass the gradient that is asked for."""
    channels, sources = [problem.in_channels, problem.out_channels], [operands.x, operands.dy]
    forward, of_input, extra = Pass.FPROP, Pass.DGRAD, {}
    if transposed:
        # An input gradient: it reads the gradient and writes the input.
        channels.reverse()
        sources.reverse()
        forward, of_input, extra = of_input, forward, {"output_padding": _output_padding(problem)}
    of_weight = problem.kind is Pass.WGRAD
    module = kind(
        *channels,
        problem.kernel,
        stride=problem.stride,
        padding=problem.padding[::2],
        dilation=problem.dilation,
        groups=problem.groups,
        bias=operands.bias is not None,
        device="meta",
        **extra,
    )
    module.weight = nn.Parameter(operands.w, requires_grad=of_weight)
    if operands.bias is not None:
        module.bias = nn.Parameter(operands.bias, requires_grad=of_weight)
    read, grad = sources
    if problem.kind is forward:
        return lambda: module(read)
    if read is None:  # nothing but its shape and layout is looked at
        read = operands.x.new_empty(problem.y_shape)
        read = _channels_last(read) if operands.x.stride(1) == 1 else read
    x = read.detach().requires_grad_(problem.kind is of_input)
    wanted = list(module.parameters()) if of_weight else [x]
    with torch.enable_grad():
        y = module(x)
    return lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True)[0]


def _output_padding(problem: Problem) -> tuple[int, ...]:
    """Of the transposed convolution that a problem is a pass of: what its result has more than the least."""
    padding = problem.padding[::2]
    axes = problem.in_size, problem.out_size, problem.stride, padding, problem.dilation, problem.kernel
    return tuple(
        extent - ((outputs - 1) * step - 2 * before + reach * (taps - 1) + 1)
        for extent, outputs, step, before, reach, taps in zip(*axes, strict=True)
    )


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
    padding, convolve = problem.padding[::2], CONVOLUTIONS[problem.rank]
    if problem.kind is Pass.FPROP:
        return lambda: convolve(x, w, bias, problem.stride, padding, problem.dilation, problem.groups)
    assert dy is not None  # both gradients read it
    if problem.kind is Pass.DGRAD:
        return lambda: convolution_backward(problem, dy, x, w, (True, False, False))[0]
    return lambda: convolution_backward(problem, dy, x, w, (False, True, problem.bias))[1]


def _padded(problem: Problem, operands: Operands) -> Call:
    name, like = RESULTS[problem.kind], result_shape(problem)
    inputs: dict[str, Tensor | None] = {"x": operands.x, "w": operands.w, "bias": operands.bias, "y": operands.dy}

    def call() -> Tensor:
        tensors = {key: tensor for key, tensor in inputs.items() if tensor is not None}
        tensors[name] = operands.x.new_empty(like)
        aten.run(problem, tensors)
        return tensors[name]

    return call
