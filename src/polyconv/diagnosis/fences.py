"""Memory with fences around it: what a kernel writes beside its tensors is seen, and what it reads there is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..cuda.backend import CudaBackend

BAND = 64 * 1024
"""Bytes on either side. A kernel that is lost writes near its tensors more often than far from them."""
NAN_BYTE, LARGE_BYTE = 0xFF, 0x7F
"""What memory is filled with before a kernel runs: four of these bytes are NaN, or 3.4e38, which is a number."""


class Fenced:
    """A piece of memory between two bands that nobody has any business in.

    Args:
        size: bytes.
        device: where.
        shift: bytes by which its address misses the alignment that new memory has.
    """

    def __init__(self, size: int, device: torch.device, shift: int = 0) -> None:
        self._begin = BAND + shift
        self._end = self._begin + size
        self._all = torch.full((self._end + BAND,), NAN_BYTE, dtype=torch.uint8, device=device)

    @property
    def inside(self) -> Tensor:
        """The bytes between the bands."""
        return self._all[self._begin : self._end]

    def tensor(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """The same as numbers, laid out."""
        return self.inside.view(dtype).as_strided(shape, strides)

    def fill(self, byte: int) -> None:
        self.inside.fill_(byte)

    def trespasses(self) -> str:
        """Where the bands were written to; empty if nowhere."""
        before = (self._all[: self._begin] != NAN_BYTE).nonzero().flatten().cpu()
        after = (self._all[self._end :] != NAN_BYTE).nonzero().flatten().cpu()
        found = []
        if len(before):
            found.append(f"{len(before)} bytes before it, the nearest {self._begin - int(before[-1])} away")
        if len(after):
            found.append(f"{len(after)} bytes after it, the nearest {int(after[0]) + 1} away")
        return " and ".join(found)


class FencedBackend(CudaBackend):
    """The CUDA backend with fences around its scratch memory, which is filled with a byte before each run."""

    def __init__(self, index: int = 0, *, memory: torch.device | None = None, **arguments: Any) -> None:
        super().__init__(index, **arguments)
        self.memory = memory or torch.device("cuda", index)
        self.filled_with = NAN_BYTE
        self.scratch: list[Fenced] = []
        """What was allocated since last looked at."""

    def allocate(self, size: int) -> Tensor:
        fenced = Fenced(size, self.memory)
        fenced.fill(self.filled_with)
        self.scratch.append(fenced)
        return fenced.inside
