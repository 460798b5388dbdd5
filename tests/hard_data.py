"""Data that is hard for FP16: far from one, of many magnitudes, or all zeros."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _heavy(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) / torch.rand(shape).square()


def _one_hot(shape: tuple[int, ...]) -> Tensor:
    x = torch.zeros(shape)
    x[:, 3, 2, 5] = -3.7e-5
    return x


HARD: dict[str, tuple[Callable[[tuple[int, ...]], Tensor], float, float]] = {
    "large times small": (torch.randn, 2.0**60, 2.0**-60),
    "small times large": (torch.randn, 2.0**-60, 2.0**60),
    "small times small": (torch.randn, 2.0**-60, 2.0**-60),
    "near the end of the range": (torch.rand, 2.0**120, 2.0**-100),
    "heavy-tailed": (_heavy, 1.0, 1.0),
    "one-hot": (_one_hot, 1.0, 1.0),
    "zeros": (torch.zeros, 1.0, 1.0),
}
"""Generator of one operand, and factors of it and of the other."""
