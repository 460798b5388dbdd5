"""Parameters that are spread over ranks, told apart without importing what only those who spread them have imported."""

from __future__ import annotations

import sys
from typing import Any

MODULE = "torch.distributed.tensor"
"""Takes a while to import, and not everybody's training is distributed. Where it is not there, nobody has a DTensor."""


def is_dtensor(value: object) -> bool:
    """Whether a tensor is one of several ranks: a part of it here, or a copy."""
    kind = getattr(sys.modules.get(MODULE), "DTensor", None)  # PyTorch 2.4 has it elsewhere
    return kind is not None and isinstance(value, kind)


def is_gathered(module: Any) -> bool:
    """Whether FSDP, of either generation, gathers the parameters of a module before it is called.

    It writes them into the same tensors each time, and takes care that no version counter moves.
    """
    return getattr(module, "_is_fsdp_managed_module", False) is True


def placements_of(value: Any) -> tuple[Any, ...]:
    """How a DTensor lies on the ranks, along each dimension of their mesh; nothing for any other tensor."""
    return tuple(value.placements) if is_dtensor(value) else ()


def is_split(value: object) -> bool:
    """Whether a tensor is a DTensor of which this rank has not the whole."""
    return not all(placement.is_replicate() for placement in placements_of(value))
