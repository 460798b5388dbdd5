"""The backend that ``torch.compile(model, backend="polyconv")`` finds by its entry point.

Without gradients a graph is compiled with its parameters as constants. Inductor checks no constants; here each call
compares the parameters with those that were compiled, so a loaded state dict or a moved parameter compiles again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..cpu import native
from ..runtime.warn_once import warn_once
from . import private
from .graph_pass import CompiledLayer, LayerPass

_version = attrgetter("_version")


def polyconv(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's. ``options``: settings of ``torch._inductor.config``, as for Inductor."""
    settings = dict(options or {})
    if mode not in (None, "default"):
        settings = {**torch._inductor.list_mode_options(mode), **settings}
    reason = private.missing() or native.why_absent()
    if reason is not None:
        warn_once(f'torch.compile(backend="polyconv") compiles with Inductor alone: {reason}')
        return private.compile_graph(gm, example_inputs, settings)
    if torch.is_grad_enabled() or not _is_on_cpu(example_inputs):
        return private.compile_graph(gm, example_inputs, settings)
    return FrozenGraph(gm, example_inputs, settings)


def _is_on_cpu(inputs: Sequence[Any]) -> bool:
    return all(value.device.type == "cpu" for value in inputs if isinstance(value, Tensor))


class FrozenGraph:
    """A compiled graph with its parameters as constants, compiled again when they change."""

    def __init__(self, gm: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> None:
        self._gm = gm
        self._options = options
        self._static = private.static_inputs(gm, inputs)
        self._others = [position for position in range(len(inputs)) if position not in set(self._static)]
        self._freeze(inputs)

    def _freeze(self, inputs: Sequence[Any]) -> None:
        self._constants = [inputs[position] for position in self._static]
        self._versions = self._now(self._constants)
        self._pass = LayerPass()
        constant = private.with_constants(self._gm, inputs, self._static)
        options = {**private.frozen_options(self._pass), **self._options}
        self._compiled = private.compile_graph(constant, [inputs[position] for position in self._others], options)

    @property
    def layers(self) -> Sequence[CompiledLayer]:
        """What runs for each convolution."""
        return self._pass.layers

    def __call__(self, *inputs: Any) -> Any:
        constants = [inputs[position] for position in self._static]
        if not all(map(is_, constants, self._constants)) or self._now(constants) != self._versions:
            self._freeze(inputs)
        for listener in _listeners:
            listener.extend(self.layers)
        return self._compiled(*(inputs[position] for position in self._others))

    @staticmethod
    def _now(constants: Sequence[Tensor]) -> list[int]:
        """Versions of the constants; inference tensors have none."""
        return [0 if value.is_inference() else value._version for value in constants]


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
