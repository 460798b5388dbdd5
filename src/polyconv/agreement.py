"""Training on several processes: every rank runs the same plan for the same problem.

Ranks may come to different choices: their tuning files differ, or one of them measured. Results then differ in the last
bits between ranks, and the slowest holds up the rest. So the first rank that plans a problem writes its choice into the
process group's store, and all others adopt it. Nobody waits for anybody: a problem that only one rank meets (the last,
smaller batch) cannot block the others.
"""

from __future__ import annotations

import hashlib
import warnings

import torch.distributed

from .epoch import group

PREFIX = "polyconv/plan"


def ranks() -> int:
    """How many processes there are to agree with, this one included."""
    return torch.distributed.get_world_size() if group() is not None else 1


def agree(device: str, key: str, choice: str) -> str:
    """What all ranks run for a problem: the choice of the first that got here, which may be this one's.

    Args:
        device: the kind of device, ``cpu`` or ``cuda``.
        key: the problem (:func:`polyconv.tuning.problem_key`).
        choice: what this rank would run.
    """
    name = f"{PREFIX}/{device}/{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        # Sets the key if it has no value yet, and gives the value that it has then.
        return bytes(store.compare_set(name, "", choice)).decode()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        warnings.warn(
            f"polyconv cannot agree with the other ranks on what to run ({error}); this rank decides by itself",
            RuntimeWarning,
            stacklevel=2,
        )
        return choice
