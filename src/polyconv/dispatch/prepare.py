"""Prepared calls: a pass with its plan, cached by shapes, strides, geometry and state version, found by one lookup."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import Geometry
from ..autotune import online, preferences
from ..backend import Backend, Run, backend_for
from ..lowering.extreme_geometry import reduce_geometry
from ..lowering.signal import on_pictures
from ..problem import Problem
from ..runtime import state_version
from ..runtime.scopes import Scope, ScopeStack
from ..util.lru import LruTable
from .operands import Layout, dense_strides

CAPACITY = 8192
"""Most cached calls; the least recently used are evicted."""

SMALLEST_POOLED = 16 * 2**20
"""Output size [bytes] from which new pages cost more than a search in the output pool (``cpu/native.py``)."""

known: LruTable[Hashable, Call] = LruTable(CAPACITY)
"""Cached calls. A key is the state version and what the call was prepared from."""


class Call:
    """One pass for given shapes, strides, device and state version. Immutable, because threads share it."""

    __slots__ = ("dense", "geometry", "inference", "layout", "problem", "reduction", "run")

    def __init__(
        self,
        problem: Problem,
        layout: Layout,
        geometry: Geometry,
        device: torch.device,
        *,
        inference: bool = False,
    ) -> None:
        self.problem = problem
        self.layout = layout
        self.geometry = geometry
        self.inference = inference
        """Whether no gradient is recorded."""
        no_pixels = 0 in problem.in_size  # an empty output of a transposed convolution
        self.reduction = None if no_pixels else reduce_geometry(problem.kind, problem.in_size, problem.kernel, geometry)
        """Reduction of an extreme geometry; None if it is ordinary."""
        empty = problem.batch == 0 or problem.in_channels == 0 or no_pixels
        self.run = None if empty or self.reduction is not None else _prepare(problem, inference, device)
        """Backend call that fills the outputs; None if nothing runs, or other calls run on parts of the tensors."""
        pooled = prod(layout[0]) * 8 >= SMALLEST_POOLED
        self.dense = None if pooled or no_pixels else (layout[0], dense_strides(*layout))
        """Shape and strides of the output; None if it may come from the output pool."""


def recall(
    problem_of: Callable[..., tuple[Problem, Layout]],
    description: tuple[Any, ...],
    device: torch.device,
    *,
    inference: bool = False,
) -> Call:
    """Cached or new call for ``problem_of(*description)``; the description ends with the geometry."""
    number = state_version.current()
    key = (number, problem_of, description, device, inference)
    call = known[key]
    if call is None:
        call = Call(*problem_of(*description), description[-1], device, inference=inference)
        remember(key, number, call)
    return call


def remember(key: Hashable, number: int, call: Call) -> None:
    """Cache a call, unless the state changed since version ``number``: it may have been prepared in either state."""
    if state_version.current() == number:
        known.put(key, call)


def are_passthrough(problems: Iterable[Problem], device: torch.device, *, inference: bool) -> bool:
    """Whether all passes are passthrough: planned as ATen, not being autotuned, and not observed."""
    if _observers.entries or preferences.are_watched():
        return False
    backend = backend_for(device)
    return all(
        backend.is_passthrough(problem, inference=inference)
        and not online.is_autotuned(backend, problem, inference=inference)
        for problem in map(Problem.as_2d, problems)
    )


def _prepare(problem: Problem, inference: bool, device: torch.device) -> Run:
    if problem.rank == 1:
        return on_pictures(_prepare(problem.as_2d(), inference, device))
    backend = backend_for(device)
    run = online.entered(backend, problem, backend.prepare(problem, inference=inference), inference=inference)
    observers = [entry.value for entry in _observers.entries]
    if not observers:
        return run

    def run_and_tell(tensors: MutableMapping[str, Tensor]) -> None:
        run(tensors)
        for observer in observers:
            observer(Ran(problem, inference, backend, tensors))

    return run_and_tell


# ---- observers


class Ran(NamedTuple):
    """A completed pass, as an observer receives it."""

    problem: Problem
    inference: bool
    backend: Backend
    tensors: Mapping[str, Tensor]
    """Inputs and outputs, by the names of :class:`~polyconv.backend.Backend`."""


Observer = Callable[[Ran], None]

_observers: ScopeStack[Observer] = ScopeStack()


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call ``observer`` at the end of every pass in a ``with`` block, in any thread. Costs nothing outside of it."""
    try:
        # Calls are prepared anew in the block; `watched`, so that problems are planned anew, too.
        with preferences.watched(), Scope(_observers, observer, None):
            yield
    finally:
        known.clear()  # calls that were prepared in the block hold the observer
