"""Timed calls: polyconv and PyTorch, each in both memory layouts, on the same data.

One-time preparation is outside the timing: channels_last candidates get input, weight and gradient in that layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .. import dispatch
from ..arguments import CHANNELS_LAST as CHANNELS_LAST_OF
from ..arguments import Geometry
from ..cpu.engines import aten
from ..lowering.aten import convolution, convolution_backward
from ..lowering.reshape import HEIGHT, as_image
from ..lowering.volume_sum import result_shape
from ..nn import OURS as OF_TORCHS
from ..problem import RESULTS, Pass, Problem, Shape

OURS, OURS_CHANNELS_LAST = "ours", "ours_channels_last"
NCHW, CHANNELS_LAST = "torch_nchw", "torch_channels_last"
CPU = torch.device("cpu")

Call = Callable[[], Tensor]
"""One pass of one candidate: returns the output, the input gradient or the weight gradient."""


@dataclass(frozen=True)
class Operands:
    """Tensors of a convolution, dense NCHW; ``dy`` is the incoming gradient, for gradient passes only."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    dy: Tensor | None

    @classmethod
    def random(cls, problem: Problem, seed: int = 0, device: torch.device = CPU) -> Operands:
        """Normal inputs and gradients; weights and bias distributed as in ``torch.nn.Conv2d``. Drawn on the device."""
        draw = torch.Generator(device).manual_seed(seed)
        bound = (problem.channels_per_group[0] * prod(problem.kernel)) ** -0.5

        def normal(shape: Shape) -> Tensor:
            return torch.randn(shape, generator=draw, device=device)

        def uniform(*shape: int) -> Tensor:
            return torch.empty(shape, device=device).uniform_(-bound, bound, generator=draw)

        return cls(
            x=normal(problem.x_shape),
            w=uniform(*problem.w_shape),
            bias=uniform(problem.out_channels) if problem.bias else None,
            dy=None if problem.kind is Pass.FPROP else normal(problem.y_shape),
        )

    def named(self) -> dict[str, Tensor]:
        """The tensors by the names of :class:`~polyconv.backend.Backend`."""
        every = {"x": self.x, "w": self.w, "bias": self.bias, "y": self.dy}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def channels_last(self) -> Operands:
        """Copies in channels_last. All are new tensors: a weight is prepared for one layout at a time."""
        dy = None if self.dy is None else _channels_last(self.dy)
        return Operands(_channels_last(self.x), _channels_last(self.w), self.bias, dy)

    def as_images(self) -> Operands:
        """Views of 1-D tensors with height 1."""
        return Operands(as_image(self.x), as_image(self.w), self.bias, None if self.dy is None else as_image(self.dy))


def _channels_last(tensor: Tensor) -> Tensor:
    """Copy in channels_last; a signal by way of its 2-D view, because torch has no such format for 1-D tensors."""
    seen = as_image(tensor)
    copy = seen.clone(memory_format=CHANNELS_LAST_OF[seen.dim()])
    return copy if copy.dim() == tensor.dim() else copy.squeeze(HEIGHT)


def candidates(
    problem: Problem, operands: Operands, *, transposed: bool = False, fresh_weights: bool = False
) -> dict[str, Call]:
    """Each candidate's call, by name.

    Calls go through modules, as in a program: if all passes choose ATen, polyconv's module is a passthrough. Padding
    that PyTorch does not support, and fresh weights, call the operators instead. Calls are timed in this order, with
    alternating layouts, so that none finds its own tensors in the caches.

    Args:
        problem: a pass.
        operands: its tensors.
        transposed: the pass belongs to a transposed convolution, which PyTorch is to compute.
        fresh_weights: polyconv gets a new weight in every call.
    """
    last = operands.channels_last()
    module: Any = getattr(nn, f"Conv{'Transpose' * transposed}{problem.rank}d")
    as_modules = problem.has_aten_padding
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
    """A module's forward pass, or one gradient of its backward pass."""
    channels, sources = [problem.in_channels, problem.out_channels], [operands.x, operands.dy]
    forward, of_input, extra = Pass.FPROP, Pass.DGRAD, {}
    if transposed:
        # A transposed convolution is an input gradient: it reads ``dy`` and writes ``x``.
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
    if read is None:  # only its shape and layout are read
        read = operands.x.new_empty(problem.y_shape)
        read = _channels_last(read) if operands.x.stride(1) == 1 else read
    x = read.detach().requires_grad_(problem.kind is of_input)
    wanted = list(module.parameters()) if of_weight else [x]
    with torch.enable_grad():
        y = module(x)
    return lambda: torch.autograd.grad(y, wanted, grad, retain_graph=True)[0]


def _output_padding(problem: Problem) -> tuple[int, ...]:
    """Output padding of the transposed convolution: the result's extent beyond the least possible one."""
    padding = problem.padding[::2]
    axes = problem.in_size, problem.out_size, problem.stride, padding, problem.dilation, problem.kernel
    return tuple(
        extent - ((outputs - 1) * step - 2 * before + reach * (taps - 1) + 1)
        for extent, outputs, step, before, reach, taps in zip(*axes, strict=True)
    )


def ours(problem: Problem, operands: Operands, *, fresh_weights: bool = False) -> Call:
    """The operator of the pass, as called by a program or by a backward pass."""
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
        return lambda: dispatch.fprop(x, w.clone() if fresh_weights else w, bias, *geometry)
    assert dy is not None  # both gradients read it
    if problem.kind is Pass.DGRAD:
        return lambda: dispatch.input_gradient(dy, w.clone() if fresh_weights else w, x, geometry)
    return lambda: dispatch.weight_gradient(dy, x, w, problem.bias, geometry)[0]


def pytorch(problem: Problem, operands: Operands) -> Call:
    """PyTorch's convolution, or one gradient of its backward pass. An unsupported padding is applied to a copy first,
    as in ``torch.nn.Conv2d``."""
    x, w, bias, dy = operands.x, operands.w, operands.bias, operands.dy
    if not problem.has_aten_padding:
        return _padded(problem, operands)
    padding = problem.padding[::2]
    if problem.kind is Pass.FPROP:
        return lambda: convolution(x, w, bias, problem.stride, padding, problem.dilation, problem.groups)
    assert dy is not None  # both gradients read it
    if problem.kind is Pass.DGRAD:
        return lambda: convolution_backward(problem, dy, x, w, (True, False, False))[0]
    return lambda: convolution_backward(problem, dy, x, w, (False, True, problem.bias))[1]


def _padded(problem: Problem, operands: Operands) -> Call:
    name, like = RESULTS[problem.kind], result_shape(problem)

    def call() -> Tensor:
        tensors = {**operands.named(), name: operands.x.new_empty(like)}
        aten.run(problem, tensors)
        return tensors[name]

    return call
