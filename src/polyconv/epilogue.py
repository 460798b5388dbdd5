"""The epilogue of a forward pass in plain PyTorch: for sums that were computed without it."""

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
