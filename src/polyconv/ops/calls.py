"""What repeated calls share: all that follows from the shapes, the strides and the geometry, worked out once.

Such numbers rarely change between calls, so each of the functions here is cached: a repeated call costs one lookup, and
finds its plan made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from .. import choices, settings
from ..arguments import Geometry, activation_name
from ..backends import Backend, Run, backend_for
from ..blocks import Block, Stack
from ..problem import Activation, Pass, Problem
from ..reduction import reduce_geometry
from .layouts import Layout, Shape, check_gradient, fprop_layout
from .problems import dense_strides, problem_of

SMALLEST_POOLED = 16 * 2**20
"""Bytes of an output from which on its pages cost more than looking for used ones: see ``cpu/native.py``."""


class Call:
    """One pass on tensors of known shapes and strides."""

    __slots__ = ("_prepared", "geometry", "inference", "layout", "problem", "reduction", "small")

    def __init__(self, problem: Problem, layout: Layout, geometry: Geometry, inference: bool = False) -> None:
        self.problem = problem
        self.layout = layout
        """Of the output."""
        self.geometry = geometry
        self.inference = inference
        """Whether no gradient is recorded."""
        self.reduction = reduce_geometry(problem.kind, problem.in_size, problem.kernel, geometry)
        """How the geometry is made ordinary; None where it is."""
        elements = min(prod(layout[0]), prod(problem.x_shape))
        self.small = not layout[1] and elements > 0 and prod(layout[0]) * 8 < SMALLEST_POOLED and self.reduction is None
        """Whether the output is any new tensor: not empty, not channels_last, not from the pool, not in parts."""
        # One tuple, replaced as a whole: threads with tensors on several devices may share this call.
        self._prepared: tuple[Backend | None, settings.Settings | None, int, Run] = (None, None, 0, _never)

    def run(self, device: torch.device, tensors: MutableMapping[str, Tensor]) -> None:
        """Let the backend of a device fill the outputs. It plans at the first call, and when a plan may be another."""
        now, current, version = backend_for(device), settings.current(), choices.version()
        backend, under, chosen, run = self._prepared
        if backend is not now or under is not current or chosen != version:
            run = now.prepare(self.problem, inference=self.inference)
            if _observers.entries:
                run = self._told(run, now)
            self._prepared = (now, current, version, run)
        run(tensors)

    def _told(self, run: Run, backend: Backend) -> Run:
        """The same, and then word to those who observe."""
        observers = [entry.value for entry in _observers.entries]

        def run_and_tell(tensors: MutableMapping[str, Tensor]) -> None:
            run(tensors)
            for observer in observers:
                observer(Ran(self.problem, self.inference, backend, tensors))

        return run_and_tell


def _never(_: MutableMapping[str, Tensor]) -> None:
    raise AssertionError("a call was run before it was prepared")


# ---- who looks on


@dataclass(frozen=True, slots=True)
class Ran:
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

    Every call is prepared anew in the block, and again after it: so whoever is not observed pays nothing.
    """
    # Watched around the rest, so that nothing that is prepared for longer knows the observer.
    with choices.watched(), Block(_observers, observer):
        yield


@lru_cache(maxsize=4096)
def prepare_fprop(
    x: tuple[Shape, Shape],
    w: tuple[Shape, Shape],
    bias_shape: Shape | None,
    dtype: torch.dtype,
    aligned: bool,
    inference: bool,
    geometry: Geometry,
) -> Call:
    layout = fprop_layout(*x, *w, bias_shape, geometry)
    bias = bias_shape is not None
    y_strides = dense_strides(*layout)
    problem = problem_of(Pass.FPROP, x, w, y_strides, geometry, bias=bias, dtype=dtype, vector_aligned=aligned)
    return Call(problem, layout, geometry, inference)


@lru_cache(maxsize=4096)
def prepare_fused(
    x: tuple[Shape, Shape],
    w: tuple[Shape, Shape],
    bias_shape: Shape | None,
    residual: bool,
    activation: str,
    dtype: torch.dtype,
    aligned: bool,
    inference: bool,
    geometry: Geometry,
) -> Call:
    plain = prepare_fprop(x, w, bias_shape, dtype, aligned, inference, geometry)
    problem = replace(plain.problem, residual=residual, activation=Activation(activation_name(activation)))
    return Call(problem, plain.layout, geometry, inference)


@lru_cache(maxsize=4096)
def prepare_dgrad(
    grad: tuple[Shape, Shape],
    w: tuple[Shape, Shape],
    layout: Layout,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> Call:
    check_gradient(grad[0], layout[0], w[0], geometry)
    x = (layout[0], dense_strides(*layout))
    problem = problem_of(Pass.DGRAD, x, w, grad[1], geometry, bias=False, dtype=dtype, vector_aligned=aligned)
    return Call(problem, layout, geometry)


@lru_cache(maxsize=4096)
def prepare_wgrad(
    grad: tuple[Shape, Shape],
    x: tuple[Shape, Shape],
    layout: Layout,
    bias: bool,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> Call:
    check_gradient(grad[0], x[0], layout[0], geometry)
    w = (layout[0], dense_strides(*layout))
    problem = problem_of(Pass.WGRAD, x, w, grad[1], geometry, bias=bias, dtype=dtype, vector_aligned=aligned)
    return Call(problem, layout, geometry)
