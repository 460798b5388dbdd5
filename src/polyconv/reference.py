"""What a convolution is, in plain PyTorch and float64: the yardstick of the tests and the benchmarks.

Written to be obviously right and nothing else: pad a copy, call torch's convolution, let autograd find the gradients.
Each function takes either a :class:`~polyconv.problem.Problem` or a :class:`~polyconv.arguments.Geometry`; both have
the same names for how the kernel moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import Geometry
from .problem import Problem

Moves = Problem | Geometry


def pad(moves: Moves, x: Tensor) -> Tensor:
    """A copy of the image with its padding around it. Negative sides crop first; then the mode fills the others."""
    mode = str(moves.padding_mode)
    sides = [side for axis in range(len(moves.padding) - 2, -1, -2) for side in moves.padding[axis : axis + 2]]
    x = F.pad(x, [min(side, 0) for side in sides])  # the last axis first
    return F.pad(x, [max(side, 0) for side in sides], mode="constant" if mode == "zeros" else mode)


def fprop(moves: Moves, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """The output, in float64."""
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
    """The output with a residual added and an activation applied, in float64."""
    y = fprop(moves, x, w, bias)
    if residual is not None:
        y = y + residual.double()
    if activation == "relu":
        return F.relu(y)
    return F.silu(y) if activation == "silu" else y


def dgrad(moves: Moves, dy: Tensor, w: Tensor, x_shape: Sequence[int]) -> Tensor:
    """The gradient of an input of ``x_shape``, in float64. The output is linear in the input, so any input will do."""
    with torch.enable_grad():
        x = torch.zeros(tuple(x_shape), dtype=torch.float64, device=dy.device, requires_grad=True)
        return torch.autograd.grad(fprop(moves, x, w.detach()), x, dy.detach().double())[0]


def wgrad(moves: Moves, x: Tensor, dy: Tensor, w_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The gradients of a weight of ``w_shape`` and of the bias, in float64."""
    with torch.enable_grad():
        w = torch.zeros(tuple(w_shape), dtype=torch.float64, device=dy.device, requires_grad=True)
        (dw,) = torch.autograd.grad(fprop(moves, x.detach(), w), w, dy.detach().double())
    return dw, dy.detach().double().transpose(0, 1).flatten(1).sum(1)
