"""Tensors without data that stand for a user's: shapes, strides, dtype and device, at no cost of memory or time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """The mode that fake arguments already belong to, or a new one."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def stand_in(value: Any, mode: FakeTensorMode, like: Tensor | None = None) -> Any:
    """The fake twin of a tensor, and of a shape where ``like`` says what it stands for; any other value itself."""
    if isinstance(value, Tensor):
        return value if isinstance(value, FakeTensor) else mode.from_tensor(value)
    is_shape = isinstance(value, (tuple, list)) and value and all(type(extent) is int for extent in value)
    if like is not None and is_shape:
        return torch.empty(tuple(value), dtype=like.dtype, device=like.device)
    return value
