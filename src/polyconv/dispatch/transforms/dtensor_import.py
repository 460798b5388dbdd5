"""Lazy import of the DTensor rules, when the first DTensor may exist."""

from __future__ import annotations

import sys

import torch

from ...runtime.lazy_import import imported
from ...util.sharded_params import MODULE

_modules = sys.modules
_ready = not hasattr(torch.library, "register_torch_dispatch")  # before PyTorch 2.5 DTensor rejects the call


def expect_dtensors() -> None:
    """Import the DTensor rules if this process can have DTensors. Called before an operator runs."""
    global _ready
    if not _ready and MODULE in _modules:
        imported("polyconv.dispatch.transforms.dtensor")
        _ready = True
