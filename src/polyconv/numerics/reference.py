"""Float64 reference in plain PyTorch, for tests and benchmarks: pad a copy, call ATen's convolution, differentiate it
with autograd. ``moves`` is a :class:`~polyconv.problem.Problem` or a :class:`~polyconv.arguments.Geometry`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import Geometry
from ..problem import Problem

Moves = Problem | Geometry


def pad(moves: Moves, x: Tensor) -> Tensor:
    """Padded copy of ``x``. Negative sides are cropped before the mode fills the others."""
    mode = str(moves.padding_mode)
    sides = [side for axis in range(len(moves.padding) - 2, -1, -2) for side in moves.padding[axis : axis + 2]]
    x = F.pad(x, [min(side, 0) for side in sides])  # the last axis first
    return F.pad(x, [max(side, 0) for side in sides], mode="constant" if mode == "zeros" else mode)


def fprop(moves: Moves, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Output, in float64."""
    bias = None if bias is None else bias.double()
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(moves.stride)]
    return convolve(pad(moves, x.double()), w.double(), bias, moves.stride, 0, moves.dilation, moves.groups)


def with_epilogue(
    moves: Moves,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Output after residual and activation, in float64."""
    y = fprop(moves, x, w, bias)
    if residual is not None:
        y = y + residual.double()
    if activation == "relu":
        return F.relu(y)
    return F.silu(y) if activation == "silu" else y


def dgrad(moves: Moves, dy: Tensor, w: Tensor, x_shape: Sequence[int]) -> Tensor:
    """Input gradient, in float64. It does not depend on the input, which is therefore zeros of ``x_shape``."""
    with torch.enable_grad():
        x = torch.zeros(tuple(x_shape), dtype=torch.float64, device=dy.device, requires_grad=True)
        return torch.autograd.grad(fprop(moves, x, w.detach()), x, dy.detach().double())[0]


def wgrad(moves: Moves, x: Tensor, dy: Tensor, w_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Weight and bias gradients, in float64."""
    with torch.enable_grad():
        w = torch.zeros(tuple(w_shape), dtype=torch.float64, device=dy.device, requires_grad=True)
        (dw,) = torch.autograd.grad(fprop(moves, x.detach(), w), w, dy.detach().double())
    return dw, dy.detach().double().transpose(0, 1).flatten(1).sum(1)
