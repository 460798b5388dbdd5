"""Packed and transformed weights, kept for inference on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, UntypedStorage

from ..forking import whole
from ..readiness import Run
from ..vouching import Promise, promise_of

Memory = Tensor | UntypedStorage
"""Bytes on the GPU: whatever :meth:`polyconv.cuda.backend.CudaBackend.allocate` gives."""


@dataclass(frozen=True, slots=True)
class State:
    """How a weight was when something was made of it."""

    version: int
    address: int
    storage: weakref.ref[UntypedStorage]
    """Its memory: later memory at the same address is another."""
    promise: Promise
    """Under which nobody writes to it behind its version counter: another one after each :func:`polyconv.freeze`."""

    @classmethod
    def of(cls, w: Tensor) -> State | None:
        """To be asked before anything is made of it; None if nobody vouches for it."""
        promise = promise_of(w)
        if promise is None:
            return None
        return cls(w._version, w.data_ptr(), weakref.ref(w.untyped_storage()), promise)

    def is_of(self, w: Tensor) -> bool:
        """Whether a weight is in this state."""
        return (
            self.version == w._version
            and self.address == w.data_ptr()
            and self.storage() is w.untyped_storage()
            and self.promise is promise_of(w)
        )


@dataclass(frozen=True, slots=True)
class _Judged:
    state: State
    instead: Run | None
    storage: weakref.ref[UntypedStorage]
    """Forgets the verdict with the weight's memory."""


@dataclass(frozen=True, slots=True)
class _Kept:
    state: State
    memory: Memory
    size: int
    storage: weakref.ref[UntypedStorage]
    """Forgets all this with the weight's memory."""


class PreparedWeights:
    """Keeps what the first launches of forward plans make of frozen weights, at most ``limit`` bytes of it.

    On the CPU a weight that nobody vouches for is read at each call, to see whether it changed. On a GPU to look is to
    wait for it; so only frozen weights are kept, by their version counter and memory. What was made on one stream is
    used on that stream alone, where it is made before it is read. And nothing is kept of what is captured in a graph:
    it is made when the graph runs, not now, in memory that is the graph's.
    """

    def __init__(self, limit: int = 512 * 2**20) -> None:
        self.limit = limit
        self.size = 0
        self._kept: dict[tuple[int, int, bytes], _Kept] = {}
        """By the ``id`` of the weight, the stream, and the launches that made it."""
        self._judged: dict[tuple[int, bytes], _Judged] = {}
        """Whether weights suit a plan, by their ``id`` and its launches: on whatever stream, and while a graph is
        captured, when no weight can be read."""

    def find(self, w: Tensor, stream: int, recipe: bytes) -> Memory | None:
        """What these launches made of the weight as it is now, on this stream; None if that is not kept."""
        kept = self._kept.get((id(w), stream, recipe))
        return kept.memory if kept is not None and kept.state.is_of(w) else None

    def judge(self, w: Tensor, recipe: bytes, judge: Callable[[], Run | None] | None) -> Run | None:
        """What runs for the weight in the place of a plan that does not suit it; None where the plan does.

        ``judge`` is asked once for each state of the weight; None where it cannot be asked now.
        """
        key = id(w), recipe
        found = self._judged.get(key)
        if found is None or not found.state.is_of(w):
            state, storage = State.of(w), w.untyped_storage()
            if state is None or judge is None:
                return None
            found = _Judged(state, judge(), weakref.ref(storage, lambda _: self._judged.pop(key, None)))
            self._judged[key] = found
        return found.instead

    def keep(self, w: Tensor, stream: int, recipe: bytes, state: State, memory: Memory, size: int) -> None:
        """What was launched, on this stream, for a weight in this state."""
        key, storage = (id(w), stream, recipe), state.storage()
        if storage is None:  # another thread gave the weight other memory meanwhile
            return
        new = _Kept(state, memory, size, weakref.ref(storage, lambda _: self._kept.pop(key, None)))
        with whole:
            self._kept.pop(key, None)
            self.size = sum(kept.size for kept in tuple(self._kept.values()))
            # Whoever comes first stays: a model runs its layers in turn, and would push each out before its next call.
            if self.size + size <= self.limit:
                self._kept[key] = new
                self.size += size
