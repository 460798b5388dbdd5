"""Fake tensors: shapes, strides, dtype and device of a user's tensors, without data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..runtime.lazy_import import imported


def mode_of(values: Iterable[Any]) -> FakeTensorMode:
    """The mode that fake values already belong to, or a new one."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
    imported("torch._dynamo")  # as the mode would, in the calling thread, where Ctrl-C leaves it half imported
    return FakeTensorMode(allow_non_fake_inputs=True)


def stand_in(value: Any, mode: FakeTensorMode, like: Tensor | None = None) -> Any:
    """Fake counterpart of a tensor, or of a shape if ``like`` gives dtype and device; other values unchanged."""
    if isinstance(value, Tensor):
        return value if isinstance(value, FakeTensor) else mode.from_tensor(value)
    is_shape = isinstance(value, (tuple, list)) and value and all(type(extent) is int for extent in value)
    if like is not None and is_shape:
        return torch.empty(tuple(value), dtype=like.dtype, device=like.device)
    return value


class DispatchRecorder(TorchDispatchMode):
    """Base of modes that record the operators of a call."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.record(func, args, result)
        return result

    def record(self, func: Any, args: Sequence[Any], result: Any) -> None:
        """Record one operator."""
        raise NotImplementedError
