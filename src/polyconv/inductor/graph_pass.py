"""The pass over Inductor's frozen graph that gives layers to polyconv's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..activation import Activation
from ..autotune.online import trim_memory
from .choice import ONEDNN, Choice, Chooser, Outcomes
from .layer import C_SHIM, Layer, layer_of, operator
from .private import frozen_options


@dataclass(frozen=True, slots=True)
class CompiledLayer:
    """What runs for one convolution of a compiled graph."""

    text: str
    """Describes the layer: shapes, geometry and epilogue."""
    choice: Choice

    def __str__(self) -> str:
        times = ", ".join(
            f"{name} {1e3 * s:.3f} ms" for name, s in sorted(self.choice.seconds.items(), key=itemgetter(1))
        )
        runs = "Inductor's oneDNN convolution" if self.choice.name == ONEDNN else self.choice.name
        return f"{self.text}\n  runs {runs}: {self.choice.source}" + (f" ({times})" if times else "")


@dataclass(slots=True)
class LayerPass:
    """Replaces convolutions and their epilogues by ``polyconv_cpu::compiled_convolution`` where that is faster."""

    outcomes: Outcomes
    layers: list[CompiledLayer] = field(default_factory=list)
    """All convolutions that were considered, in the order of the graph."""

    def options(self) -> dict[str, Any]:
        """Settings of Inductor that run the pass."""
        return frozen_options(self, {operator(): C_SHIM})

    def __call__(self, graph: Graph) -> None:
        gm = graph.owning_module
        assert gm is not None
        with _disable_current_modes(), torch.no_grad():
            operator()
            chooser = Chooser(self.outcomes, sum(4 * value.numel() for value in _constants(gm, graph)))
            for node in list(graph.nodes):
                layer = layer_of(gm, node)  # after earlier layers were replaced: one may be the residual of this one
                if layer is None:
                    continue
                choice = chooser.choose(layer, at_the_end=_reaches_an_output(layer.epilogue.last))
                self.layers.append(CompiledLayer(_in_words(layer), choice))
                if choice.candidate is not None:
                    _replace(gm, graph, layer, choice, len(self.layers))
                del layer
                trim_memory()  # of the trials, and of the weight that was packed for oneDNN
        self.outcomes.save()
        graph.eliminate_dead_code()


def _replace(gm: GraphModule, graph: Graph, layer: Layer, choice: Choice, number: int) -> None:
    assert choice.candidate is not None
    weights, epilogue = layer.weights_for(choice.candidate), layer.epilogue
    prologue = layer.prologue if layer.joins(choice.candidate) else None
    fake_mode = layer.x.meta["val"].fake_mode
    with graph.inserting_before(epilogue.last):
        constant = _constant(gm, graph, f"_polyconv_weights_{number}", weights)
        inputs: tuple[Any, ...] = ([layer.x], None)
        if prologue is not None:
            normalisation = _constant(gm, graph, f"_polyconv_normalisation_{number}", prologue.normalisation)
            inputs = (prologue.parts, normalisation)
        arguments = (inputs[0], constant, layer.bias, epilogue.residual, inputs[1], layer.numbers(choice.candidate))
        call = graph.call_function(operator(), (*arguments, *epilogue.activation.ab))
    call.meta.update(epilogue.last.meta)
    with fake_mode:
        call.meta["val"] = epilogue.last.meta["val"].to(memory_format=torch.channels_last)
    epilogue.last.replace_all_uses_with(call)
    graph.eliminate_dead_code()
    packed = layer.node.args[1]
    if isinstance(packed, Node) and not packed.users and isinstance(packed.target, str) and hasattr(gm, packed.target):
        delattr(gm, packed.target)  # packed for oneDNN, and used no more


def _reaches_an_output(node: Node) -> bool:
    """True if a value of the graph's output depends on ``node`` without a sum of products between them."""
    level, seen = [node], {node}
    while level:
        users = {user for each in level for user in each.users} - seen
        if any(user.op == "output" for user in users):
            return True
        seen |= users
        level = [user for user in users if not any(part in str(user.target) for part in _SUMS_OF_PRODUCTS)]
    return False


_SUMS_OF_PRODUCTS = ("convolution", "linear", "mm", "attention")
"""Parts of the names of operators."""


def _constants(gm: GraphModule, graph: Graph) -> Iterator[Tensor]:
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(gm, node.target, None)
        if isinstance(value, Tensor):
            yield value


def _constant(gm: GraphModule, graph: Graph, name: str, value: Tensor) -> Node:
    gm.register_buffer(name, value)
    node = graph.get_attr(name)
    node.meta["val"] = value
    return node


def _in_words(layer: Layer) -> str:
    epilogue = layer.epilogue
    fused = ["residual"] if epilogue.residual is not None else []
    fused += [epilogue.activation] if epilogue.activation is not Activation.NONE else []
    joined = "" if layer.prologue is None else f" of {len(layer.prologue.parts)} normalised tensors"
    return f"{layer.problem}{joined}" + (f" with {' and '.join(fused)}" if fused else "")
