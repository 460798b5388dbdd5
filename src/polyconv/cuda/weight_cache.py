"""Weight cache: packed and transformed frozen weights, for inference on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, UntypedStorage

from ..backend import Run
from ..problem import Problem
from ..runtime.fork_safety import STATE_LOCK
from ..runtime.frozen_weights import FrozenMark, mark_of
from ..util.lru import LruTable

Memory = Tensor | UntypedStorage
"""GPU memory from :meth:`polyconv.cuda.backend.CudaBackend.allocate`."""

MOST_JUDGED = 4096
"""Most problems whose plan was checked for a weight; the least recently used are checked again."""


@dataclass(frozen=True, slots=True)
class State:
    """State of a weight when it was prepared."""

    version: int
    address: int
    storage: weakref.ref[UntypedStorage]
    """Distinguishes later memory at the same address."""
    promise: FrozenMark
    """Registration as frozen, i.e. not written without its version counter; new after each :func:`polyconv.freeze`."""

    @classmethod
    def of(cls, w: Tensor) -> State | None:
        """State of a weight, to be read before it is prepared; None if the weight is not frozen."""
        promise = mark_of(w)
        if promise is None:
            return None
        return cls(w._version, w.data_ptr(), weakref.ref(w.untyped_storage()), promise)

    def is_of(self, w: Tensor) -> bool:
        return (
            self.version == w._version
            and self.address == w.data_ptr()
            and self.storage() is w.untyped_storage()
            and self.promise is mark_of(w)
        )


@dataclass(frozen=True, slots=True)
class _Judged:
    state: State
    instead: Run | None
    storage: weakref.ref[UntypedStorage]
    """Its callback drops the entry with the weight's memory."""


@dataclass(frozen=True, slots=True)
class _Kept:
    state: State
    memory: Memory
    size: int
    storage: weakref.ref[UntypedStorage]
    """Its callback drops the entry with the weight's memory."""


class PreparedWeights:
    """Cache of at most ``limit`` bytes for the results of weight-preparing launches of forward plans.

    The CPU compares weights that are not frozen at each call. On a GPU that would need a synchronisation, so only
    frozen weights are cached, validated by version counter and memory. An entry is used only on the stream that made
    it, which orders writing before reading. Nothing is cached during graph capture: the launches run at replay, in the
    graph's memory.
    """

    def __init__(self, limit: int = 512 * 2**20) -> None:
        self.limit = limit
        self.size = 0
        self._kept: dict[tuple[int, int, bytes], _Kept] = {}
        """By ``id`` of the weight, stream and recipe (the launches)."""
        self._judged: LruTable[tuple[int, bytes, Problem], _Judged] = LruTable(MOST_JUDGED)
        """By ``id`` of the weight, recipe, and problem, because a replacement is a plan for one problem. Valid on any
        stream, and during capture, when no weight can be read."""

    def find(self, w: Tensor, stream: int, recipe: bytes) -> Memory | None:
        """Cached result of the recipe for the weight's current state on this stream; None if there is none."""
        kept = self._kept.get((id(w), stream, recipe))
        return kept.memory if kept is not None and kept.state.is_of(w) else None

    def judge(self, w: Tensor, recipe: bytes, problem: Problem, judge: Callable[[], Run | None] | None) -> Run | None:
        """Replacement for a plan that exceeds its tolerance for the weight; None if the plan is fine or not checked.

        ``judge`` is called once per state of the weight; None if it cannot be called now.
        """
        key = id(w), recipe, problem
        found = self._judged[key]
        if found is None or not found.state.is_of(w):
            state, storage = State.of(w), w.untyped_storage()
            if state is None or judge is None:
                return None
            found = _Judged(state, judge(), weakref.ref(storage, lambda _: self._judged.drop(key)))
            self._judged.put(key, found)
        return found.instead

    def keep(self, w: Tensor, stream: int, recipe: bytes, state: State, memory: Memory, size: int) -> None:
        """Cache the result of launches on this stream for a weight in this state, if it fits into the limit."""
        key, storage = (id(w), stream, recipe), state.storage()
        if storage is None:  # another thread has replaced the weight's memory
            return
        new = _Kept(state, memory, size, weakref.ref(storage, lambda _: self._kept.pop(key, None)))
        with STATE_LOCK:
            self._kept.pop(key, None)
            # A list, as in the CPU's weight cache: making a tuple may start a collection, which drops entries.
            self.size = sum(kept.size for kept in list(self._kept.values()))
            # No eviction: a model runs its layers in turn, and would evict each one before its next call.
            if self.size + size <= self.limit:
                self._kept[key] = new
                self.size += size
