"""Weight cache: transformed weights kept between forward passes of inference."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, UntypedStorage

from ..runtime.fork_safety import STATE_LOCK
from ..runtime.frozen_weights import FrozenMark, mark_of
from . import native

MOST_PLANS = 4
"""Plans of a weight that are kept: of a layer that is called with images of several sizes, each may have another."""


@dataclass(slots=True)
class _Kept:
    state: tuple[object, ...]
    """Version counter and type of the weight, and instruction set."""
    bits: int
    """Hash of the weight."""
    transformed: Tensor
    storage: weakref.ref[UntypedStorage]
    """The weight's storage: its end drops the entry, its identity excludes later memory at that address."""
    promise: FrozenMark | None
    """Mark under which ``bits`` was last checked; None if the weight was not frozen. Each freeze makes another."""
    holding: set[object] = field(default_factory=set)
    """Predicted errors that were compared with those for these weights, and hold. They serve calls of other sizes."""


class TransformedWeights:
    """Keeps at most ``limit`` bytes of transformed weights. An entry lives as long as the weight's storage and is
    replaced when the weight changes. Changes show in the version counter and, unless the weight is frozen, in a hash,
    since writes to ``weight.data`` do not increment the counter. Where hashing would be a large part of the call, the
    planner does not use the cache."""

    def __init__(self, limit: int = 512 * 2**20) -> None:
        self.limit = limit
        self.size = 0
        self._kept: dict[tuple[object, ...], _Kept] = {}
        """By address, shape and strides of the weight, so that a new view in each call finds its entry; and by whether
        the input is channels_last, the numbers of geometry and plan, so that a layer that alternates between layouts or
        sizes keeps one for each."""

    def of(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        geometry: list[int],
        plan: list[int],
        frozen: bool = False,
        owner: Tensor | None = None,
        transform: Callable[[], Tensor] | None = None,
    ) -> Tensor | None:
        """The transformed weight for this call, or None if it cannot be cached. A weight in half precision is widened;
        a tiny one is not cached, because kernels scale it and so need its values. ``owner``: the weight, and holder of
        the promise, if ``w`` is a view of it. ``transform``: makes it in place of the native kernels."""
        dense = _dense(w)
        if dense is None or w.is_inference():  # an inference tensor has no version counter
            return None
        weight = w.data_ptr(), w.shape, w.stride()
        key, storage = (*weight, x.stride()[1:2] == (1,), *geometry, *plan), w.untyped_storage()
        state = w._version, w.dtype, native.instruction_set()
        kept, promise = self._kept.get(key), mark_of(w if owner is None else owner) if frozen else None
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
        wide = w.float()
        if wide is not w and native.normalised(wide)[1]:
            return None
        transformed = transform() if transform else _operator("transform_weights")(x, wide, y, geometry, plan)
        new = _Kept(state, bits, transformed, weakref.ref(storage, lambda _: self._kept.pop(key, None)), promise)
        with STATE_LOCK:
            self._kept.pop(key, None)
            # Lists: making a tuple may start a collection after the iteration has begun, which drops entries.
            others = [other for other in list(self._kept) if other[: len(weight)] == weight]
            current = [other for other in others if (its := self._kept.get(other)) is not None and its.state == state]
            for other in {*others} - {*current[1 - MOST_PLANS :]}:
                self._kept.pop(other, None)
            self.size = sum(map(_bytes, list(self._kept.values())))
            # No eviction of other weights: a model runs its layers in a cycle, so LRU would drop each entry before its
            # next use. Other plans of this one are dropped if that makes room.
            rest = [(other, its) for other in current if (its := self._kept.get(other)) is not None]
            if self.size + _bytes(new) > self.limit >= self.size + _bytes(new) - sum(_bytes(its) for _, its in rest):
                for other, its in rest:
                    self._kept.pop(other, None)
                    self.size -= _bytes(its)
            if self.size + _bytes(new) <= self.limit:
                self._kept[key] = new
                self.size += _bytes(new)
        return transformed

    def holding(self, transformed: Tensor) -> set[object] | None:
        """The predictions known to hold for a weight whose ``transformed`` is cached for later calls; else None."""
        return next((kept.holding for kept in list(self._kept.values()) if kept.transformed is transformed), None)


_operator = lru_cache(maxsize=8)(native.operator)


def _dense(w: Tensor) -> Tensor | None:
    """The weight in memory order if it is contiguous or channels_last, else None."""
    if w.is_contiguous():
        return w
    return w.permute(0, 2, 3, 1) if w.is_contiguous(memory_format=torch.channels_last) else None


def _bytes(kept: _Kept) -> int:
    return kept.transformed.numel() * kept.transformed.element_size()
