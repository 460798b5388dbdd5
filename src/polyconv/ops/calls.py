"""What repeated calls share: all that follows from the shapes, the strides, the geometry and the state of the settings.

Such things rarely change between calls. So a call is prepared once, plan included, and found again by what it was made
of: a repeated call costs one lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import choices, epoch
from ..arguments import Geometry
from ..backends import Backend, backend_for
from ..blocks import Block, Stack
from ..problem import Problem
from ..readiness import Run
from ..recent import Recent
from ..reduction import reduce_geometry
from . import racing
from .layouts import Layout
from .pictures import on_pictures
from .problems import dense_strides

CAPACITY = 8192
"""Calls to remember; when there are more, those that were used least recently are forgotten."""

SMALLEST_POOLED = 16 * 2**20
"""Bytes of an output from which on its pages cost more than looking for used ones: see ``cpu/native.py``."""

known: Recent[Hashable, Call] = Recent(CAPACITY)
"""By what they were made of, the number of the state first."""


class Call:
    """One pass on tensors of known shapes, strides and device, as it runs in one state of the settings.

    Never changed once it is made: threads share it.
    """

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
        """Of the output."""
        self.geometry = geometry
        self.inference = inference
        """Whether no gradient is recorded."""
        no_pixels = 0 in problem.in_size  # of a transposed convolution's output
        self.reduction = None if no_pixels else reduce_geometry(problem.kind, problem.in_size, problem.kernel, geometry)
        """How the geometry is made ordinary; None where it is."""
        empty = problem.batch == 0 or problem.in_channels == 0 or no_pixels
        self.run = None if empty or self.reduction is not None else _prepare(problem, inference, device)
        """Lets the backend fill the outputs; None where nothing runs, or other calls do, on parts of the tensors."""
        pooled = prod(layout[0]) * 8 >= SMALLEST_POOLED
        self.dense = None if pooled or no_pixels else (layout[0], dense_strides(*layout))
        """Shape and strides of the output, if it is any new tensor: not one from the pool."""


def recall(
    problem_of: Callable[..., tuple[Problem, Layout]],
    description: tuple[Any, ...],
    device: torch.device,
    *,
    inference: bool = False,
) -> Call:
    """The call for the problem that a description stands for; the geometry is the last of it."""
    number = epoch.now()
    key = (number, problem_of, description, device, inference)
    call = known[key]
    if call is None:
        call = Call(*problem_of(*description), description[-1], device, inference=inference)
        remember(key, number, call)
    return call


def remember(key: Hashable, number: int, call: Call) -> None:
    """For later calls. Not if the state changed while the call was made: what it was made of is not certain then."""
    if epoch.now() == number:
        known.put(key, call)


def are_left_to_torch(problems: Iterable[Problem], device: torch.device, *, inference: bool) -> bool:
    """Whether PyTorch's own convolution runs all of these passes, and nobody wants to be told of each."""
    if _observers.entries or choices.are_watched():
        return False
    backend = backend_for(device)
    return all(
        backend.leaves_to_torch(problem, inference=inference)
        and not racing.is_raced(backend, problem, inference=inference)
        for problem in map(Problem.as_picture, problems)
    )


def _prepare(problem: Problem, inference: bool, device: torch.device) -> Run:
    if problem.rank == 1:
        return on_pictures(_prepare(problem.as_picture(), inference, device))
    backend = backend_for(device)
    run = racing.entered(backend, problem, backend.prepare(problem, inference=inference), inference=inference)
    observers = [entry.value for entry in _observers.entries]
    if not observers:
        return run

    def run_and_tell(tensors: MutableMapping[str, Tensor]) -> None:
        run(tensors)
        for observer in observers:
            observer(Ran(problem, inference, backend, tensors))

    return run_and_tell


# ---- who looks on


class Ran(NamedTuple):
    """One pass that has just run."""

    problem: Problem
    inference: bool
    """Whether no gradient is recorded."""
    backend: Backend
    tensors: Mapping[str, Tensor]
    """What it read and what it wrote, by the names of :class:`~polyconv.backends.Backend`."""


Observer = Callable[[Ran], None]

_observers: Stack[Observer] = Stack()


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` of every pass that runs inside a ``with`` block, in any thread, before its caller goes on.

    Every call is prepared anew in the block: so whoever is not observed pays nothing.
    """
    try:
        # Watched, so that every problem is planned anew, too.
        with choices.watched(), Block(_observers, observer, None):
            yield
    finally:
        known.clear()  # what was prepared in the block knows the observer
