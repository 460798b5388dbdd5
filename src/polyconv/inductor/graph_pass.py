"""The pass over Inductor's frozen graph that gives layers to polyconv's kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..activation import Activation
from ..autotune.online import trim_memory
from ..cpu import native
from ..cpu.engines import pointwise
from .chain import Link, chain_call, chains, link_of
from .choice import CHAIN, ONEDNN, Choice, Chooser, Outcomes
from .layer import (
    C_SHIM,
    FIRST,
    FLAGS,
    LAYER,
    NUMBERS,
    OVERWRITES,
    RESIDUAL,
    WHOLE,
    Layer,
    layer_of,
    operator,
    placed,
)
from .private import frozen_options, hint, value_of
from .shuffles import PixelShuffle, interleave_channels, pixel_shuffle_of


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
    """Replaces convolutions and their epilogues by ``polyconv_cpu::compiled_convolution`` where that is faster, and
    then chains of them by one call."""

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
            interleave_channels(graph)
            chooser = Chooser(self.outcomes, sum(4 * value.numel() for value in _constants(gm, graph)))
            links: list[Link] = []
            replaced: dict[Node, Node] = {}
            for node in list(graph.nodes):
                layer = layer_of(gm, node)  # after earlier layers were replaced: one may be the residual of this one
                if layer is None:
                    continue
                choice = chooser.choose(layer, at_the_end=_reaches_an_output(layer.epilogue.last))
                self.layers.append(CompiledLayer(_in_words(layer), choice))
                out = last = layer.epilogue.last
                if choice.candidate is not None:
                    shuffle = _shuffle_behind(layer)
                    if shuffle is not None:  # in a chain, too, the layer has the order of channels that the graph gets
                        layer = _with_order_of(shuffle, layer)
                    out = replaced[last] = _replace(gm, graph, layer, choice, len(self.layers), shuffle)
                    layer = replace(layer, packed=None)
                if (link := link_of(len(self.layers) - 1, layer, out, choice.candidate)) is not None:
                    if links and not any(each.is_depthwise for each in (*links[-2:], link)):
                        links.pop()  # it is in no chain, and holds its weights
                    links.append(link)
                    self._chain(gm, graph, chooser, links, replaced)
                del layer, link
                trim_memory()  # of the trials, and of the weight that was packed for oneDNN
            self._chain(gm, graph, chooser, links, replaced, at_the_end=True)
        self.outcomes.save()
        graph.eliminate_dead_code()
        _write_parts_in_place(graph)
        _overwrite_residuals(graph)

    def _chain(
        self,
        gm: GraphModule,
        graph: Graph,
        chooser: Chooser,
        links: list[Link],
        replaced: dict[Node, Node],
        *,
        at_the_end: bool = False,
    ) -> None:
        """Replaces chains of layers by one call where that is faster. Decided chains leave ``links``, which frees their
        weights. Before the end of the graph, a chain that may get another layer stays. ``replaced``: nodes, and the
        calls that stand for them."""

        def now(node: Node) -> Node:
            while node in replaced:
                node = replaced[node]
            return node

        for chain in list(chains(links)):
            if chain[-1].is_depthwise and not at_the_end:
                continue
            decided = [link.out for link in chain]
            links[:] = [link for link in links if link.out not in decided]
            out, residual = chain[-1].out, chain[-1].layer.epilogue.residual
            if out in replaced:  # an addition of two convolutions ends both layers, and the other one has it
                continue
            choice = chooser.choose_chain(chain)
            if choice.name != CHAIN:
                continue
            residual = None if residual is None else now(residual)
            replaced[out] = _insert_chain(gm, graph, chain, now(chain[0].layer.x), residual)
            for link in chain:
                name = f"{link.linked.name}, {CHAIN} of {len(chain)} layers"
                self.layers[link.number] = replace(self.layers[link.number], choice=replace(choice, name=name))


def _insert_chain(gm: GraphModule, graph: Graph, chain: Sequence[Link], x: Node, residual: Node | None) -> Node:
    call, out = chain_call(chain), chain[-1].out
    constants = [link.layer.node.args[1] if link.runs is None else link.out.args[1] for link in chain]
    with graph.inserting_before(out):
        made = [
            _constant(gm, graph, f"_polyconv_chain_{name}_{chain[0].number}", value)
            for name, value in (("weights", call.weights), ("bias", call.bias))
        ]
        node = graph.call_function(operator(), ([x], *made, residual, None, call.numbers, *call.ab))
    node.meta.update(out.meta)
    with x.meta["val"].fake_mode:
        node.meta["val"] = out.meta["val"].to(memory_format=torch.channels_last)
    out.replace_all_uses_with(node)
    graph.eliminate_dead_code()
    for constant in constants:
        _drop(gm, constant)
    return node


def _shuffle_behind(layer: Layer) -> PixelShuffle | None:
    return pixel_shuffle_of(layer.epilogue.last) if layer.groups == 1 and layer.epilogue.residual is None else None


def _with_order_of(shuffle: PixelShuffle, layer: Layer) -> Layer:
    bias = layer.bias_value
    return replace(layer, w=shuffle.reordered(layer.w), bias_value=None if bias is None else shuffle.reordered(bias))


def _replace(
    gm: GraphModule, graph: Graph, layer: Layer, choice: Choice, number: int, shuffle: PixelShuffle | None
) -> Node:
    """Insert the call of a layer, whose weights have the order of channels of the shuffle behind it, if any."""
    assert choice.candidate is not None
    epilogue, bias = layer.epilogue, layer.bias
    weights = layer.weights_for(choice.candidate)
    prologue = layer.prologue if layer.joins(choice.candidate) else None
    fake_mode = layer.x.meta["val"].fake_mode
    with graph.inserting_before(epilogue.last):
        constant = _constant(gm, graph, f"_polyconv_weights_{number}", weights)
        if bias is not None and (shuffle is not None or not value_of(gm, bias).is_contiguous()):
            assert layer.bias_value is not None
            bias = _constant(gm, graph, f"_polyconv_bias_{number}", layer.bias_value)
        inputs: tuple[Any, ...] = ([layer.x], None)
        if prologue is not None:
            normalisation = prologue.gate
            if normalisation is None:
                normalisation = _constant(gm, graph, f"_polyconv_normalisation_{number}", prologue.normalisation)
            inputs = (prologue.parts, normalisation)
        arguments = (inputs[0], constant, bias, epilogue.residual, inputs[1], layer.numbers(choice.candidate))
        call = graph.call_function(operator(), (*arguments, *epilogue.activation.ab))
    call.meta.update(epilogue.last.meta)
    with fake_mode:
        call.meta["val"] = epilogue.last.meta["val"].to(memory_format=torch.channels_last)
    epilogue.last.replace_all_uses_with(call)
    if shuffle is not None:
        shuffle.insert(graph, call)
    graph.eliminate_dead_code()
    _drop(gm, layer.node.args[1])  # packed for oneDNN
    return call


def _write_parts_in_place(graph: Graph) -> None:
    """Lets layers write their part of a concatenated tensor, which is then not copied.

    Each call passes the tensor on to the next one, which writes other channels of the same memory. Other readers of the
    parts must be inputs of the last call, direct or not: once Inductor counts the tensor as read, it reuses its memory.
    """
    for cat in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        parts = placed(cat)
        calls = [node for node in graph.nodes if node in parts]
        if not calls or not _readers(calls[:-1]) - {cat} <= _needed_for(calls[-1]) | set(calls):
            continue
        channels = [hint(part.meta["val"].shape[1]) for part in parts]
        starts = dict(zip(parts, accumulate(channels, initial=0), strict=False))
        with calls[0].meta["val"].fake_mode:
            whole = cat.meta["val"].to(memory_format=torch.channels_last)
        for call, earlier in zip(calls, [None, *calls], strict=False):
            own, start = call.meta["val"], starts[call]
            numbers = list(call.args[LAYER])
            numbers[WHOLE], numbers[FIRST] = sum(channels), start
            with graph.inserting_after(call):
                part = graph.call_function(torch.ops.aten.slice.Tensor, (call, 1, start, start + own.shape[1]))
            part.meta["val"], call.meta["val"] = torch.ops.aten.slice.Tensor(whole, *part.args[1:]), whole
            call.replace_all_uses_with(part, lambda user, but=(part, cat): user not in but)
            call.update_arg(LAYER, numbers)
            call.update_arg(RESIDUAL, earlier)
        cat.replace_all_uses_with(calls[-1])
        graph.eliminate_dead_code()


def _readers(nodes: Sequence[Node]) -> set[Node]:
    return {user for node in nodes for user in node.users}


def _overwrite_residuals(graph: Graph) -> None:
    """Lets pointwise layers write over their residual where no later operator can read it.

    Inductor may change the order of operators: all other readers must be inputs of the layer, direct or not. They must
    be convolutions, because Inductor computes simple operators again wherever their values are used.
    """
    convolutions = (operator(), torch.ops.mkldnn._convolution_pointwise.default)
    engine = native.plan_numbers(pointwise.NAME, 0)[0]
    for node in graph.find_nodes(op="call_function", target=operator()):
        residual, numbers = node.args[RESIDUAL], node.args[LAYER]
        if residual is None or residual.target is not operator() or numbers[-NUMBERS] != engine:
            continue
        others = set(residual.users) - {node}
        if (
            numbers[WHOLE - NUMBERS] > 0
            or residual in node.args[0]
            or any(user.target not in convolutions for user in others)
        ):
            continue
        if others <= _needed_for(node):
            changed = list(numbers)
            changed[FLAGS - NUMBERS] |= OVERWRITES
            node.update_arg(LAYER, changed)


def _needed_for(node: Node) -> set[Node]:
    """All nodes that a node's value depends on."""
    found: set[Node] = set()
    level = {node}
    while level:
        level = {each for one in level for each in one.all_input_nodes} - found
        found |= level
    return found


def _drop(gm: GraphModule, constant: Any) -> None:
    """Deletes a constant that is used no more."""
    name = constant.target if isinstance(constant, Node) and not constant.users else None
    if isinstance(name, str) and hasattr(gm, name):
        delattr(gm, name)


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
        value = value_of(gm, node)
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
    joined = "" if layer.prologue is None else f" of {layer.prologue}"
    return f"{layer.problem}{joined}" + (f" with {' and '.join(fused)}" if fused else "")
