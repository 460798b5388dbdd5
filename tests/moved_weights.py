"""Ways to move a weight to new memory, possibly at the old address."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor


def replaced_twice(weight: Tensor) -> None:
    for _ in range(2):
        weight.data = torch.randn(weight.shape)


def offloaded_and_loaded(weight: Tensor) -> None:
    shape = weight.shape
    weight.data = torch.empty(0)
    weight.data = torch.randn(shape)


@lru_cache
def _memory(shape: tuple[int, ...]) -> Any:
    return np.empty(shape, np.float32)


def offloaded_and_loaded_there(weight: Tensor) -> None:
    """The program owns the weights' memory and puts a new tensor on it each time."""
    memory = _memory(weight.shape)
    weight.data = torch.empty(0)
    memory[...] = np.random.default_rng().standard_normal(memory.shape)
    weight.data = torch.from_numpy(memory)


MOVES = [replaced_twice, offloaded_and_loaded, offloaded_and_loaded_there]
