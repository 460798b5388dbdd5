"""Memory between red zones: out-of-bounds writes are detected, and out-of-bounds reads return NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...cuda.backend import CudaBackend

BAND, CPU_BAND = 64 * 1024, 32 * 1024
"""Red zone on either side [bytes]. Most out-of-bounds writes are close to the tensor. On the CPU, no more than PyTorch
compares on one thread: starting others takes longer than a small convolution."""
NAN_BYTE, LARGE_BYTE = 0xFF, 0x7F
"""Fill bytes before a run. As float32, four of them are NaN and 3.4e38 (finite), respectively."""


class Redzoned:
    """Allocation between two red zones.

    Args:
        size: bytes.
        device: device of the memory.
        shift: offset from the allocator's alignment [bytes].
    """

    def __init__(self, size: int, device: torch.device, shift: int = 0) -> None:
        band = CPU_BAND if device.type == "cpu" else BAND
        self._begin = band + shift
        self._end = self._begin + size
        self._all = torch.full((self._end + band,), NAN_BYTE, dtype=torch.uint8, device=device)

    @property
    def inside(self) -> Tensor:
        return self._all[self._begin : self._end]

    def tensor(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return self.inside.view(dtype).as_strided(shape, strides)

    def fill(self, byte: int) -> None:
        self.inside.fill_(byte)

    def trespasses(self) -> str:
        """Description of writes into the red zones; empty if there are none."""
        before = (self._all[: self._begin] != NAN_BYTE).nonzero().flatten().cpu()
        after = (self._all[self._end :] != NAN_BYTE).nonzero().flatten().cpu()
        found = []
        if len(before):
            found.append(f"{len(before)} bytes before it, the nearest {self._begin - int(before[-1])} away")
        if len(after):
            found.append(f"{len(after)} bytes after it, the nearest {int(after[0]) + 1} away")
        return " and ".join(found)


class RedzoneBackend(CudaBackend):
    """CUDA backend whose workspace lies between red zones and is filled with a byte before each run."""

    def __init__(self, index: int = 0, *, memory: torch.device | None = None, **arguments: Any) -> None:
        super().__init__(index, **arguments)
        self.memory = memory or torch.device("cuda", index)
        self.filled_with = NAN_BYTE
        self.scratch: list[Redzoned] = []
        """Allocations since the list was last taken."""

    def allocate(self, size: int) -> Tensor:
        allocated = Redzoned(size, self.memory)
        allocated.fill(self.filled_with)
        self.scratch.append(allocated)
        return allocated.inside
