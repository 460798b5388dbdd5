"""Transformed weights, kept for inference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..forking import whole


@dataclass(slots=True)
class _Kept:
    state: tuple[object, ...]
    """Version, address, hash and layout of the weight, the call's numbers, the instruction set."""
    transformed: Tensor


class TransformedWeights:
    """Keeps the transformed weights of forward passes in inference, at most ``limit`` bytes of them.

    They are dropped with the weight, and made anew when it changed: by its version counter, and by a hash of its bits,
    because writing to ``weight.data`` moves no counter. Reading the weight once costs little beside transforming it.
    """

    def __init__(self, limit: int = 512 * 2**20) -> None:
        self.limit = limit
        self.size = 0
        self._kept = WeakIdKeyDictionary()

    def of(self, x: Tensor, w: Tensor, y: Tensor, geometry: list[int], plan: list[int]) -> Tensor | None:
        """The transformed weights for this call, or None where they should be made for it alone."""
        dense = _dense(w)
        if dense is None or w.is_inference():  # a tensor of inference mode has no version counter
            return None
        ops, layout = torch.ops.polyconv_cpu, (w.shape, w.stride())
        state = (w._version, w.data_ptr(), ops.hash(dense), layout, *geometry, *plan, ops.instruction_set(""))
        kept: _Kept | None = self._kept.get(w)
        if kept is not None and kept.state == state:
            return kept.transformed
        transformed: Tensor = ops.transform_weights(x, w, y, geometry, plan)
        new = _Kept(state, transformed)
        with whole:
            self._kept.pop(w, None)
            self.size = sum(_bytes(entry) for entry in self._kept.values())
            # Whoever comes first stays: a model runs its layers in turn, and would push each out before its next call.
            if self.size + _bytes(new) <= self.limit:
                self._kept[w] = new
                self.size += _bytes(new)
        return transformed


def _dense(w: Tensor) -> Tensor | None:
    """The same numbers in the order of their addresses: of a contiguous weight or a channels_last one."""
    if w.is_contiguous():
        return w
    return w.permute(0, 2, 3, 1) if w.is_contiguous(memory_format=torch.channels_last) else None


def _bytes(kept: _Kept) -> int:
    return kept.transformed.numel() * kept.transformed.element_size()
