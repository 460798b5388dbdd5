"""Bias and epilogue of a forward pass in plain PyTorch: for sums that were computed without them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .problem import Activation


def apply_epilogue(y: Tensor, residual: Tensor | None, activation: Activation) -> Tensor:
    """``y`` with the residual added and the activation applied, in place: a pass over the output for each."""
    if residual is not None:
        y.add_(residual)
    if activation is Activation.RELU:
        torch.relu_(y)
    elif activation is Activation.SILU:
        F.silu(y, inplace=True)
    return y


def per_channel(bias: Tensor, dims: int) -> Tensor:
    """One number per channel, to be added to a tensor of so many dimensions."""
    return bias.reshape(*bias.shape, *(1 for _ in range(dims - 2)))


def summed_per_channel(grad: Tensor) -> Tensor:
    """The gradient of what :func:`per_channel` spread."""
    return grad.sum([0, *range(2, grad.dim())])


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """An output filled with sums of nothing, and the bias."""
    return y.zero_() if bias is None else y.copy_(per_channel(bias, y.dim()).expand(y.shape))


def begun(y: Tensor, bias: Tensor | None, residual: Tensor | None, activation: Activation) -> Tensor:
    """An output of sums of nothing: bias, residual and activation."""
    return apply_epilogue(with_bias(y, bias), residual, activation)
