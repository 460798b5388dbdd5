"""Prepared calls: a pass with its plan, cached by shapes, strides, geometry and state version, found by one lookup."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import settings
from ..arguments import Geometry
from ..autotune import online, preferences
from ..backend import Backend, Run, backend_for, backend_name
from ..lowering import aten
from ..lowering.base import Lowering
from ..lowering.lower import ahead_on, lower
from ..lowering.reshape import Signal
from ..lowering.widen import Widened
from ..problem import TF32, Problem, dense_strides
from ..runtime import state_version
from ..runtime.bypass import is_overridden
from ..runtime.lazy_import import imported
from ..runtime.scopes import Scope, ScopeStack
from ..runtime.warn_once import warn_once
from ..selection import by_cost
from ..util import tf32
from ..util.lru import LruTable
from .operands import Layout, empty

CAPACITY = 8192
"""Most cached calls; the least recently used are evicted."""

LARGE = 16 * 2**20
"""Output size [bytes] from which the backend allocates, which may have a pool."""

known: LruTable[Hashable, Call] = LruTable(CAPACITY)
"""Cached calls. A key is the state version and what the call was prepared from."""


class Call:
    """One pass for given shapes, strides, device and state version. Immutable, because threads share it."""

    __slots__ = ("dense", "geometry", "inference", "layout", "passthrough", "problem", "run")

    def __init__(
        self,
        problem: Problem,
        layout: Layout,
        geometry: Geometry,
        device: torch.device,
        *,
        inference: bool = False,
        gradients: Iterable[Problem] = (),
    ) -> None:
        if problem.torch_format and backend_name(device) != "cuda":
            problem, gradients = _without_format(problem), map(_without_format, gradients)
        self.problem = problem
        self.layout = layout
        self.geometry = geometry
        self.inference = inference
        """Whether no gradient is recorded."""
        self.run, self.passthrough, _ = prepare(problem, device, inference=inference, gradients=gradients)
        large = prod(layout[0]) * 8 >= LARGE
        self.dense = None if large or 0 in layout[0] else (layout[0], dense_strides(*layout))
        """Shape and strides of the output; None if it is empty, or the backend allocates it."""

    def new_output(self, like: Tensor) -> Tensor:
        """Allocate an uninitialised output that is not :attr:`dense`."""
        if 0 in self.layout[0]:
            return empty(self.layout, like)
        return backend_for(like.device).new_output(like, tuple(self.layout[0]), dense_strides(*self.layout))


def _without_format(problem: Problem) -> Problem:
    """The problem for a backend whose plans do not depend on PyTorch's format."""
    return replace(problem, torch_format="")


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


class Prepared(NamedTuple):
    """A problem that is ready to run."""

    run: Run
    passthrough: bool
    """Whether this pass and its gradients are ATen's: planned so, not being autotuned, and not observed."""
    is_atens: bool = False
    """Whether this pass is."""


def prepare(problem: Problem, device: torch.device, *, inference: bool, gradients: Iterable[Problem] = ()) -> Prepared:
    """Lower and plan a problem, and make its plan ready. ``gradients``: problems of its backward pass."""
    lowering = _lowering(problem, device)
    if lowering is not None:
        alike = isinstance(lowering, (Signal, Widened))  # ATen takes the tensors as they are
        later = [part for each in gradients for part in _step(each, device)] if alike else []
        parts = {part: prepare(part, device, inference=inference, gradients=later) for part in lowering.problems}
        run = lowering.adapt({part: prepared.run for part, prepared in parts.items()})
        if isinstance(lowering, Widened) and all(prepared.is_atens for prepared in parts.values()):
            run = partial(aten.run, problem)  # in half precision
        passes = alike and all(prepared.passthrough for prepared in parts.values())
        return Prepared(run, passes, alike and all(prepared.is_atens for prepared in parts.values()))
    backend, gradients = backend_for(device), list(gradients)
    plan = preferences.plan(backend, problem, inference=inference)
    usual = backend.prepare(plan)
    run, settled = online.wrap(backend, problem, usual, inference=inference, gradients=gradients)
    observers = [entry.value for entry in _observers.entries]
    if observers:
        return Prepared(partial(_run_and_tell, observers, Ran(problem, inference, backend, {}), run), False)
    # The override of ATen's convolution would plan it again, with the tolerance of the settings.
    planned_again = is_overridden() and problem.tolerance != settings.current().tolerance
    if not settled or preferences.are_watched() or not plan.passthrough or planned_again:
        return Prepared(run, False, settled and plan.passthrough)
    return Prepared(run, all(preferences.plan(backend, each).passthrough for each in gradients), True)


def _lowering(problem: Problem, device: torch.device) -> Lowering | None:
    """The next lowering on a device, if there is one."""
    return lower(problem, backend_name(device), ahead_on(device))


def _step(problem: Problem, device: torch.device) -> tuple[Problem, ...]:
    """The problems of the next lowering, or the problem if there is none."""
    lowering = _lowering(problem, device)
    return (problem,) if lowering is None else lowering.problems


def tell_if_behind(problem: Problem, device: torch.device) -> None:
    """Warn, once per GPU and class of layers, if PyTorch's TF32 is expected to be faster than a plan in float32."""
    problem = problem.as_2d()
    if problem.dtype != "float32" or not tf32.is_allowed() or _lowering(problem, device) is not None:
        return
    plan = backend_for(device).plan(replace(problem, torch_format=TF32))
    if plan.passthrough and plan.problem.torch_format == TF32 and by_cost(plan.candidates)[0].name == plan.choice:
        class_of = imported("polyconv.cuda.planner.aten").class_of
        warn_once(tf32.advice(torch.cuda.get_device_properties(device).name, class_of(problem)))


# ---- observers


class Ran(NamedTuple):
    """A completed pass, as an observer receives it."""

    problem: Problem
    inference: bool
    backend: Backend[Any]
    tensors: Mapping[str, Tensor]
    """Inputs and outputs, by the names of :class:`~polyconv.backend.Backend`."""


Observer = Callable[[Ran], None]


def _run_and_tell(observers: Sequence[Observer], ran: Ran, run: Run, tensors: MutableMapping[str, Tensor]) -> None:
    run(tensors)
    for observer in observers:
        observer(ran._replace(tensors=tensors))


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
