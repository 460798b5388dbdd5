"""Transformed weights, kept for inference."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from . import native


@dataclass(slots=True)
class _Kept:
    state: tuple[int, int, int, tuple[int, ...], str]
    """Version, address and checksum of the weight, the call's numbers, the instruction set."""
    transformed: Tensor


class TransformedWeights:
    """Keeps the transformed weights of forward passes in inference, at most ``limit`` bytes of them.

    They are dropped with the weight, and made anew when it changed: by its version counter, and by a checksum, because
    writing to ``weight.data`` moves no counter. Reading the weight once costs little beside transforming it.
    """

    def __init__(self, limit: int = 512 * 2**20) -> None:
        self.limit = limit
        self.size = 0
        self._kept = WeakIdKeyDictionary()
        self._lock = Lock()

    def keeps(self, w: Tensor) -> bool:
        """Whether the transformed form of a weight can be kept: a tensor of inference mode has no version counter."""
        return not w.is_inference() and w.is_contiguous()

    def of(self, x: Tensor, w: Tensor, y: Tensor, geometry: list[int], plan: list[int]) -> Tensor | None:
        """The transformed weights for this call, or None where they should be made for it alone."""
        if not self.keeps(w):
            return None
        checksum = torch.ops.polyconv_cpu.checksum(w)
        state = (w._version, w.data_ptr(), checksum, (*geometry, *plan), native.instruction_set())
        with self._lock:
            kept: _Kept | None = self._kept.get(w)
        if kept is not None and kept.state == state:
            return kept.transformed
        transformed: Tensor = torch.ops.polyconv_cpu.transform_weights(x, w, y, geometry, plan)
        with self._lock:
            self._kept[w] = _Kept(state, transformed)
            self.size = sum(_bytes(entry) for entry in self._kept.values())
            if self.size > self.limit:
                self._kept = WeakIdKeyDictionary()
                self.size = 0
        return transformed


def _bytes(kept: _Kept) -> int:
    return kept.transformed.numel() * kept.transformed.element_size()
