"""Bias and epilogue of a forward pass in plain PyTorch, for kernels that do not fuse them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..activation import Activation

if TYPE_CHECKING:  # planners import this module, and need no torch
    from torch import Tensor


def apply_epilogue(y: Tensor, residual: Tensor | None, activation: Activation) -> Tensor:
    """Add the residual and apply the activation in place, one pass over ``y`` for each."""
    if residual is not None:
        y.add_(residual)
    return activation.in_place(y)


def per_channel(bias: Tensor, dims: int) -> Tensor:
    """``bias`` reshaped to broadcast over a tensor of ``dims`` dimensions."""
    return bias.reshape(*bias.shape, *(1 for _ in range(dims - 2)))


def summed_per_channel(grad: Tensor) -> Tensor:
    """Gradient of :func:`per_channel`: the sum over batch and space."""
    return grad.sum([0, *range(2, grad.dim())])


def with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    """Fill ``y`` with the bias, or zeros."""
    return y.zero_() if bias is None else y.copy_(per_channel(bias, y.dim()).expand(y.shape))


def begun(y: Tensor, bias: Tensor | None, residual: Tensor | None, activation: Activation) -> Tensor:
    """Fill ``y`` with the output of an empty sum: bias, residual and activation."""
    return apply_epilogue(with_bias(y, bias), residual, activation)
