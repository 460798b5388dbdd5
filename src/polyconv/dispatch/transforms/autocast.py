"""Autocast: a convolution computes in the region's dtype; on a CPU in float32 if low precision is not allowed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import settings
from ..schema import library

HOW_TO_ALLOW = "polyconv.allow_low_precision() or POLYCONV_ALLOW_LOW_PRECISION=1"


class _Overruled(threading.local):
    dtype: torch.dtype | None = None


_overruled = _Overruled()


def overruled_dtype() -> torch.dtype | None:
    """Autocast dtype that the call being dispatched does not follow; None if it follows autocast."""
    return _overruled.dtype


def autocast_kernel(op: Callable[..., Any], device_type: str, key: str) -> Callable[..., Any]:
    """Autocast kernel: casts tensors to one dtype (not float64, as in torch) and calls ``op`` without autocast."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def run(*args: Any) -> Any:
        region = torch.get_autocast_dtype(device_type)
        dtype = region if settings.follows_autocast(device_type) else torch.float32

        def cast(value: Any) -> Any:
            eligible = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
            return value.to(dtype) if eligible else value

        outer, _overruled.dtype = _overruled.dtype, None if dtype == region else region
        try:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return op(*map(cast, args))
        finally:
            _overruled.dtype = outer

    return run


def register_autocast(name: str, op: Callable[..., Any]) -> None:
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        library.impl(name, autocast_kernel(op, device_type, key), key)
