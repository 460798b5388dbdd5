"""Detection of parameters sharded over ranks, without importing ``torch.distributed.tensor``."""

from __future__ import annotations

import sys
from typing import Any

MODULE = "torch.distributed.tensor"
"""Slow to import and not always needed. Unless the program has imported it, there are no DTensors."""


def is_dtensor(value: object) -> bool:
    """Whether a tensor is a DTensor, sharded or replicated."""
    kind = getattr(sys.modules.get(MODULE), "DTensor", None)  # PyTorch 2.4 has it elsewhere
    return kind is not None and isinstance(value, kind)


def is_gathered(module: Any) -> bool:
    """Whether FSDP, of either generation, rewrites the parameters before each call. It moves no version counter."""
    return getattr(module, "_is_fsdp_managed_module", False) is True


def placements_of(value: Any) -> tuple[Any, ...]:
    """Placements of a DTensor, one per dimension of the device mesh; empty for other tensors."""
    return tuple(value.placements) if is_dtensor(value) else ()


def is_split(value: object) -> bool:
    """Whether a tensor is a DTensor that this rank does not hold completely."""
    return not all(placement.is_replicate() for placement in placements_of(value))
