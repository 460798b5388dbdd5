"""Transformed weights, kept for inference."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, UntypedStorage

from ..forking import whole
from ..vouching import Promise, promise_of
from . import native


@dataclass(slots=True)
class _Kept:
    state: tuple[object, ...]
    """Version of the weight, the call's numbers, the instruction set."""
    bits: int
    """A hash of the weight."""
    transformed: Tensor
    storage: weakref.ref[UntypedStorage]
    """The weight's memory: forgets all this with it. Later memory at the same address is another."""
    promise: Promise | None
    """Under which the bits were seen last; None if nobody vouched for the weight. Another one after each freeze."""


class TransformedWeights:
    """Keeps the transformed weights of forward passes in inference, at most ``limit`` bytes of them.

    They are dropped with the weight's memory, and made anew when it changed: by its version counter, and, unless it is
    frozen, by a hash of its bits, because writing to ``weight.data`` moves no counter. Where reading the weight would
    cost much beside the call, the planner has nothing kept.
    """

    def __init__(self, limit: int = 512 * 2**20) -> None:
        self.limit = limit
        self.size = 0
        self._kept: dict[tuple[object, ...], _Kept] = {}
        """By the weight's address, shape and strides: one for each weight, also where it is a new view at each call."""

    def of(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        geometry: list[int],
        plan: list[int],
        frozen: bool = False,
        owner: Tensor | None = None,
    ) -> Tensor | None:
        """The transformed weights for this call, or None where they should be made for it alone.

        ``owner``: the weight itself where ``w`` is a view of it. Promises are about that.
        """
        dense = _dense(w)
        if dense is None or w.is_inference():  # a tensor of inference mode has no version counter
            return None
        key, storage = _key(w), w.untyped_storage()
        state = (w._version, *geometry, *plan, native.instruction_set())
        kept, promise = self._kept.get(key), promise_of(w if owner is None else owner) if frozen else None
        if (
            promise is not None
            and kept is not None
            and kept.promise is promise
            and kept.storage() is storage
            and kept.state == state
        ):
            return kept.transformed
        bits: int = _operator("hash")(dense)
        if kept is not None and kept.state == state and kept.bits == bits and kept.storage() is storage:
            kept.promise = promise
            return kept.transformed
        transformed: Tensor = _operator("transform_weights")(x, w, y, geometry, plan)
        new = _Kept(state, bits, transformed, weakref.ref(storage, lambda _: self._kept.pop(key, None)), promise)
        with whole:
            self._kept.pop(key, None)
            self.size = sum(map(_bytes, tuple(self._kept.values())))
            # Whoever comes first stays: a model runs its layers in turn, and would push each out before its next call.
            if self.size + _bytes(new) <= self.limit:
                self._kept[key] = new
                self.size += _bytes(new)
        return transformed

    def holds(self, w: Tensor, transformed: Tensor) -> bool:
        """Whether the transform of a weight stays for later calls."""
        kept = self._kept.get(_key(w))
        return kept is not None and kept.transformed is transformed


_operator = lru_cache(maxsize=8)(native.operator)


def _key(w: Tensor) -> tuple[object, ...]:
    return w.data_ptr(), w.shape, w.stride()


def _dense(w: Tensor) -> Tensor | None:
    """The same numbers in the order of their addresses: of a contiguous weight or a channels_last one."""
    if w.is_contiguous():
        return w
    return w.permute(0, 2, 3, 1) if w.is_contiguous(memory_format=torch.channels_last) else None


def _bytes(kept: _Kept) -> int:
    return kept.transformed.numel() * kept.transformed.element_size()
