"""DTensors have rules of their own, which are imported where one may be met for the first time."""

from __future__ import annotations

import sys

import torch

from ..importing import imported
from ..sharded import MODULE

_modules = sys.modules
_ready = not hasattr(torch.library, "register_torch_dispatch")  # before PyTorch 2.5 they are refused, by DTensor


def expect_dtensors() -> None:
    """To be asked before an operator runs: lets DTensors be given to it, if there can be any in this process."""
    global _ready
    if not _ready and MODULE in _modules:
        imported("polyconv.ops.sharding")
        _ready = True
