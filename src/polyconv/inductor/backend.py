"""The backend that ``torch.compile(model, backend="polyconv")`` finds by its entry point.

Without gradients a graph is compiled with its parameters as constants. Inductor's own freezing does not notice when
they change; here each call compares the parameters with those that were compiled, and compiles again after a change.
A change of settings that plans depend on, or of the number of threads, makes Dynamo compile any graph again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from .. import settings as process
from ..autotune.online import trim_memory
from ..cpu import native as kernels
from ..dispatch.op import PUBLIC
from ..dispatch.override import MODULE, why_not_native
from ..runtime.warn_once import warn_once
from . import private
from .choice import Outcomes, outcomes_here
from .graph_pass import CompiledLayer, LayerPass
from .swap import POLYCONV, swapped
from .training.graph_key import key_of_plans, sizes_of_tensors
from .training.kernel_calls import call_kernels

MOST_TIMES = 3
"""Compilations of one graph for changed parameters, before it is compiled without constant parameters."""


def polyconv(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's. ``mode`` and ``options`` as for Inductor."""
    settings = dict(options or {})
    if mode not in (None, "default"):
        settings = {**private.mode_options(mode), **settings}
    reason = private.missing() or kernels.why_absent() or _why_not_here(example_inputs)
    if reason is not None:
        warn_once(f'torch.compile(backend="polyconv") compiles a graph with Inductor alone: {reason}')
        return private.compile_graph(gm, example_inputs, settings)
    private.compile_again_after_a_change(process.__name__, "planned_with")
    outcomes, training = outcomes_here(), torch.is_grad_enabled()
    gm, layers, options = swapped(gm, outcomes, training=training)
    if training:
        if any(layer.choice.name.startswith(POLYCONV) for layer in layers):
            weights = sizes_of_tensors(gm)
            calls, key = partial(call_kernels, weights=weights), partial(key_of_plans, weights)
            settings = {**settings, **private.pass_options(calls, settings, key, PUBLIC.values())}
        return _training(private.compile_graph(gm, example_inputs, {**options, **settings}), layers)
    return FrozenGraph(gm, example_inputs, settings, outcomes, layers)


def _why_not_here(inputs: Sequence[Any]) -> str | None:
    elsewhere = {str(value.device) for value in inputs if isinstance(value, Tensor) and value.device.type != "cpu"}
    return f"it has tensors on {', '.join(sorted(elsewhere))}, not on the CPU alone" if elsewhere else None


class FrozenGraph:
    """A compiled graph with its parameters as constants, compiled again when they change."""

    def __init__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        options: Mapping[str, Any],
        outcomes: Outcomes,
        layers: Sequence[CompiledLayer] = (),
    ) -> None:
        self._gm, self._options, self._outcomes, self._layers = gm, options, outcomes, layers
        self._static = private.static_inputs(inputs)
        self._lock = threading.Lock()
        self._times = 0
        self._has_run: _Frozen | None = None
        self._changing: Callable[..., Any] | None = None
        """The graph without constant parameters, if they change too often."""
        self._frozen = self._freeze(inputs)

    def __call__(self, *inputs: Any) -> Any:
        if self._changing is not None:
            return self._changing(*inputs)
        frozen = self._frozen
        if not frozen.holds(inputs):
            return self._again(inputs)
        for listener in _listeners:
            listener.extend(frozen.layers)
        result = frozen.compiled(*(inputs[position] for position in frozen.others))
        if self._has_run is not frozen:
            self._has_run = frozen
            if not frozen.holds(inputs):
                self._leave_written(inputs, frozen)
        return result

    def _leave_written(self, inputs: Sequence[Any], frozen: _Frozen) -> None:
        """Buffers that a call of the graph writes are no constants from the next compilation on."""
        written = {
            position
            for position, version in zip(frozen.static, frozen.versions, strict=True)
            if not isinstance(inputs[position], torch.nn.Parameter) and _versions([inputs[position]]) != [version]
        }
        self._static = [position for position in self._static if position not in written]

    def _freeze(self, inputs: Sequence[Any]) -> _Frozen:
        static = self._static
        others = [position for position in range(len(inputs)) if position not in {*static}]
        constants = [inputs[position] for position in static]
        versions, layer_pass = _versions(constants), LayerPass(self._outcomes)

        def compiled_with(options: Mapping[str, Any]) -> Callable[..., Any]:
            gm = private.with_constants(self._gm, inputs, static)
            return private.compile_graph(gm, [inputs[position] for position in others], options)

        try:
            passes = private.pass_options(layer_pass, self._options)
            compiled = compiled_with({**layer_pass.options(), **self._options, **passes})
        except private.compilation_error() as error:  # in the pass, or because of what it changed
            layer_pass.layers.clear()
            compiled = compiled_with({"freezing": True, **self._options})
            reason = str(error).partition("\n")[0]
            warn_once(f'torch.compile(backend="polyconv") compiles a graph with Inductor alone: {reason}')
        self._times += 1
        trim_memory()
        holds = _unchanged(constants, static, versions)
        return _Frozen(holds, static, versions, others, compiled, [*self._layers, *layer_pass.layers])

    def _again(self, inputs: tuple[Any, ...]) -> Any:
        """Compile for changed parameters, and run."""
        with self._lock:
            if not self._frozen.holds(inputs) and self._changing is None:
                if self._times < MOST_TIMES:
                    self._frozen = self._freeze(inputs)
                else:
                    warn_once(
                        f'a graph compiled with backend="polyconv" was called with {self._times + 1} states of its '
                        "parameters: they changed, or several modules share the graph. Inductor now compiles it "
                        "without constant parameters, which is slower to run. To keep polyconv's kernels, compile "
                        "after the last change, and modules of one class together: their parent, not each of them"
                    )
                    self._changing = private.compile_graph(self._gm, inputs, self._options)
        return self(*inputs)


class _Frozen(NamedTuple):
    """A graph that is compiled with its parameters."""

    holds: Callable[[tuple[Any, ...]], bool]
    """True if inputs have the parameters that it was compiled with, unchanged."""
    static: Sequence[int]
    versions: Sequence[int]
    """Positions of these parameters among the inputs, and their versions."""
    others: Sequence[int]
    """Positions of the inputs of :attr:`compiled`."""
    compiled: Callable[..., Any]
    layers: Sequence[CompiledLayer]


def _unchanged(constants: list[Tensor], positions: list[int], versions: list[int]) -> Callable[[tuple[Any, ...]], bool]:
    """A function that tells if the inputs at some positions are these tensors, at these versions, and in the same
    memory: ``weight.data = other`` moves no version."""
    if why_not_native() is None:
        native = import_module(MODULE)
        if (parameters := native.parameters(constants, positions, versions)) is not None:
            return partial(native.is_unchanged, parameters)

    memory = [(weakref.ref(_memory(value)), _place(value)) for value in constants]

    def holds(inputs: tuple[Any, ...]) -> bool:
        found = [inputs[position] for position in positions]
        if not all(map(is_, found, constants)) or _versions(found) != versions:
            return False
        return all(
            known() is _memory(value) and place == _place(value)
            for (known, place), value in zip(memory, found, strict=True)
        )

    return holds


def _memory(value: Tensor) -> object:
    return value.untyped_storage() if value.layout is torch.strided else value


def _place(value: Tensor) -> object:
    return (value.storage_offset(), value.shape, value.stride()) if value.layout is torch.strided else None


def _versions(constants: list[Tensor]) -> list[int]:
    """Versions of tensors, which every write in place moves. Inference tensors have none."""
    try:
        return list(map(_VERSION, constants))
    except RuntimeError:
        return [0 if value.is_inference() else value._version for value in constants]


_VERSION = attrgetter("_version")


def _training(compiled: Callable[..., Any], layers: Sequence[CompiledLayer]) -> Callable[..., Any]:
    """A compiled training graph that shows its layers to :func:`layers_that_run`."""

    def call(*inputs: Any) -> Any:
        for listener in _listeners:
            listener.extend(layers)
        return compiled(*inputs)

    return call


_listeners: list[list[CompiledLayer]] = []


@contextmanager
def layers_that_run() -> Iterator[list[CompiledLayer]]:
    """Collect the layers of compiled graphs that run in a ``with`` block."""
    seen: list[CompiledLayer] = []
    _listeners.append(seen)
    try:
        yield seen
    finally:
        _listeners.remove(seen)
