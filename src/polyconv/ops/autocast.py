"""Autocast: a convolution of polyconv computes in float32, whatever the region's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .schema import library


def register_autocast(name: str, op: Callable[..., Any], device_type: str, key: str) -> None:
    def up(value: Any) -> Any:
        cast = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(torch.float32) if cast else value

    def run(*args: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return op(*map(up, args))

    library.impl(name, run, key)
