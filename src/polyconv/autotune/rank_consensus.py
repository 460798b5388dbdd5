"""Consensus between the ranks of a process group on one plan per problem.

Different tuning files or measurements would make results differ in the last bits between ranks, and the slowest rank
would delay the rest. The first rank that plans a problem writes its choice to the process group's store, and the others
adopt it. No rank waits: a problem of a single rank (a last, smaller batch) cannot block the others.
"""

from __future__ import annotations

import hashlib
import warnings

import torch.distributed

from ..runtime.state_version import group

PREFIX = "polyconv/plan"


def ranks() -> int:
    """Number of ranks, this one included; 1 without a process group."""
    return torch.distributed.get_world_size() if group() is not None else 1


def agree(device: str, key: str, choice: str) -> str:
    """Choice of the first rank that called this for the problem ``key`` on ``device`` (``cpu`` or ``cuda``).

    Without a process group of several ranks, it is this rank's.
    """
    if ranks() == 1:
        return choice
    name = f"{PREFIX}/{device}/{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        # Sets the key only if it is unset, and returns its value.
        return bytes(store.compare_set(name, "", choice)).decode()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        warnings.warn(
            f"polyconv cannot agree with the other ranks on what to run ({error}); this rank decides by itself",
            RuntimeWarning,
            stacklevel=2,
        )
        return choice
