"""Kernel calls in place of polyconv's operators, in both graphs of a compiled training step: one per layer forward, one
for all its gradients. The operators' Python code takes longer than a small layer.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ... import settings
from ...arguments import Geometry, suggests_channels_last
from ...autotune import preferences
from ...backend import backend_for
from ...cpu import native
from ...cpu.engines import channel_lanes, depthwise, pointwise, tile_lanes
from ...dispatch.operands import Layout, described, dgrad_problem, fprop_problem, geometry_of, wgrad_problem
from ...dispatch.schema import dgrad, fprop, split_bias, split_epilogue, wgrad
from ...lowering.aten import backward_arguments
from ...lowering.lower import ahead_on, lower
from ...problem import Pass, Problem, Shape
from ..layer import DEPTHWISE
from ..private import TRACED, needs_traced_strides

_PASSES: dict[Any, Pass] = {fprop: Pass.FPROP, dgrad: Pass.DGRAD, wgrad: Pass.WGRAD}
_SHARED = tile_lanes, channel_lanes, pointwise
"""Engines whose kernels share operators: all of native code but the depthwise one."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A pass of a training graph that is planned when the graph is compiled."""

    node: Node
    problem: Problem
    numbers: tuple[int, ...]
    """Kernel and output, as ``polyconv_cpu::planned_fprop`` takes them; empty if the plan is ATen's convolution."""

    @property
    def layer(self) -> tuple[Any, ...]:
        """What the gradients of one layer have in common."""
        p = self.problem
        return self.node.args[0], p.x_shape, p.w_shape, p.stride, p.padding, p.dilation, p.groups


@torch.no_grad()
def call_kernels(graph: Graph, weights: Container[Shape] | None = None) -> None:
    """Call kernels in place of polyconv's operators: once per layer of a forward graph, and of a backward graph, for
    all gradients. Where the plan is ATen's convolution, call that. ``weights``: sizes of the weights to which it
    applies, if not to all."""
    gradients: list[_Planned] = []
    for node in list(graph.nodes):
        planned = _planned(node)
        if planned is not None and weights is not None and planned.problem.w_shape not in weights:
            continue
        if planned is not None and planned.problem.kind is Pass.FPROP:
            _replace_forward(graph, planned)
        elif planned is not None:
            gradients.append(planned)
    places = {node: place for place, node in enumerate(graph.nodes)}
    while gradients:
        one = gradients.pop(0)
        other = next((each for each in gradients if _are_together(places, one, each)), None)
        if other is not None:
            gradients.remove(other)
        _replace_gradients(graph, *((one,) if other is None else (one, other)))


def _planned(node: Node) -> _Planned | None:
    """The plan of an operator's call. None for other nodes, and where the operator stays: its sizes may change, it
    times candidates, or no single kernel runs."""
    kind = _PASSES.get(node.target) if node.op == "call_function" else None
    if kind is None or not all(_is_fixed(each.meta.get("val")) for each in node.all_input_nodes):
        return None
    described_as = _problem_of(kind, node.args, node.kwargs)
    if described_as is None:
        return None
    problem, (sizes, channels_last) = described_as
    device = torch.device("cpu")
    backend: Any = backend_for(device)
    if problem.rank != 2 or problem.dtype != "float32" or 0 in (*problem.y_shape, *sizes):
        return None
    if lower(problem, backend.name, ahead_on(device)) is not None:
        return None
    if preferences.may_autotune(preferences.key_of(backend, problem), backend.environment()):
        return None
    plan = preferences.plan(backend, problem)
    if plan.passthrough:  # by the override of `polyconv.enable`, it would have the tolerance of the settings
        return _Planned(node, problem, ()) if problem.tolerance == settings.current().tolerance else None
    if plan.folded or plan.engine not in (*_SHARED, depthwise):
        return None
    engine = DEPTHWISE if plan.engine is depthwise else native.plan_numbers(plan.engine.NAME, 0)[0]
    return _Planned(node, problem, (engine, plan.chosen.algorithm, int(channels_last), *sizes))


def _problem_of(kind: Pass, arguments: Any, more: Any) -> tuple[Problem, Layout] | None:
    """The problem of an operator's call, and the layout of its output. None if it depends on sizes that may change, or
    has an epilogue."""
    one, other = (each.meta["val"] for each in arguments[:2])
    if kind is Pass.FPROP:
        bias = None if arguments[2] is None else arguments[2].meta["val"]
        geometry, residual, activation = split_epilogue(*arguments[3:], **more)
        if residual is not None or activation != "none" or not (bias is None or bias.is_contiguous()):
            return None
        how = None if bias is None else bias.shape, False, activation, False, one.dtype, True
        return fprop_problem(described(one), described(other), *how, geometry_of(*geometry))
    layout = tuple(arguments[2]), arguments[3]
    if not all(isinstance(size, int) for size in layout[0]):
        return None
    if kind is Pass.WGRAD:
        with_bias, *rest = arguments[4:]
        geometry = geometry_of(*rest, **more)
        return wgrad_problem(described(one), described(other), layout, with_bias, one.dtype, True, geometry)
    geometry, added = split_bias(*arguments[4:], **more)
    if added is not None:
        return None
    return dgrad_problem(described(one), described(other), layout, None, one.dtype, True, geometry_of(*geometry))


def _is_fixed(value: Any) -> bool:
    """True for a plain tensor on the CPU whose sizes are known."""
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
        return False
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


def _are_together(places: Mapping[Node, int], one: _Planned, other: _Planned) -> bool:
    """True if two gradients, the first one earlier in the graph, are those of a layer and can be computed where the
    second one is."""
    if one.problem.kind is other.problem.kind or one.layer != other.layer:
        return False
    results = [result for user in one.node.users for result in (user.users if user.target is getitem else (user,))]
    return all(places.get(result, -1) > places[other.node] for result in results)


def _replace_forward(graph: Graph, planned: _Planned) -> None:
    node, p = planned.node, planned.problem
    with graph.inserting_before(node):
        if planned.numbers:
            rest: tuple[Any, ...] = native.geometry_numbers(p), list(planned.numbers)
            y = _call(graph, _operators()[0], *node.args[:3], *rest)
        else:
            moves = list(p.stride), list(p.padding[::2]), list(p.dilation)
            y = _call(graph, torch.ops.aten.convolution.default, *node.args[:3], *moves, False, [0, 0], p.groups)
    node.replace_all_uses_with(y)
    graph.erase_node(node)


def _replace_gradients(graph: Graph, *passes: _Planned) -> None:
    """Compute gradients of one layer in place of the last one."""
    p, grad = passes[0].problem, passes[0].node.args[0]
    by_kind = {each.problem.kind: each for each in passes}
    x, w = (by_kind[kind].node.args[1] if kind in by_kind else None for kind in (Pass.WGRAD, Pass.DGRAD))
    ours = {kind: list(each.numbers) for kind, each in by_kind.items() if each.numbers}
    with_bias = any(each.problem.bias for each in passes)
    with graph.inserting_before(passes[-1].node):
        if ours:
            numbers = ours.get(Pass.DGRAD, []), ours.get(Pass.WGRAD, [])
            tensors = grad, x if numbers[1] else None, w if numbers[0] else None
            call = _call(graph, _operators()[1], *tensors, native.geometry_numbers(p), *numbers, with_bias)
            _replace_results(graph, call, [by_kind[kind] for kind in ours])
        theirs = [each for each in passes if not each.numbers]
        if theirs:  # of a tensor that is not differentiated, only the size is read
            x, w = (
                _call(graph, torch.ops.aten.new_empty_strided.default, grad, shape, strides)
                if tensor is None
                else tensor
                for tensor, shape, strides in ((x, p.x_shape, p.x_strides), (w, p.w_shape, p.w_strides))
            )
            of_x, of_w = (any(each.problem.kind is kind for each in theirs) for kind in (Pass.DGRAD, Pass.WGRAD))
            wanted = of_x, of_w, of_w and with_bias
            call = _call(graph, torch.ops.aten.convolution_backward.default, grad, x, w, *backward_arguments(p, wanted))
            _replace_results(graph, call, theirs)
    for each in passes:
        for result in list(each.node.users):
            graph.erase_node(result)
        graph.erase_node(each.node)


def _replace_results(graph: Graph, call: Node, passes: Sequence[_Planned]) -> None:
    for each in passes:
        if each.problem.kind is Pass.DGRAD:
            each.node.replace_all_uses_with(_call(graph, getitem, call, 0))
        for result in [user for user in each.node.users if user.target is getitem]:
            result.replace_all_uses_with(_call(graph, getitem, call, result.args[1] + 1))  # type: ignore[operator]


def _call(graph: Graph, function: Any, *arguments: Any) -> Node:
    node = graph.call_function(function, arguments)
    values = [each.meta["val"] if isinstance(each, Node) else each for each in arguments]
    node.meta |= {"val": function(*values), TRACED: (values, {})}  # the plan is for these strides
    return node


@lru_cache(maxsize=1)
def _operators() -> tuple[Any, Any]:
    """``planned_fprop`` and ``planned_gradients`` of ``polyconv_cpu``, known to fake tensors and to Inductor."""
    native.is_available()  # defines them
    empty = partial(torch.empty, dtype=torch.float32, device="cpu")

    def made(numbers: Sequence[int]) -> Tensor:
        return empty(numbers[3:], memory_format=(torch.contiguous_format, torch.channels_last)[numbers[2]])

    def gradients(
        grad: Tensor,
        x: Tensor | None,
        w: Tensor | None,
        geometry: list[int],
        for_x: list[int],
        for_w: list[int],
        bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx, dw = (made(numbers) if numbers else empty(0) for numbers in (for_x, for_w))
        return dx, dw, empty(for_w[3] if for_w and bias else 0)

    torch.library.register_fake("polyconv_cpu::planned_fprop", lambda x, w, bias, geometry, plan: made(plan))
    torch.library.register_fake("polyconv_cpu::planned_gradients", gradients)
    ops = torch.ops.polyconv_cpu.planned_fprop.default, torch.ops.polyconv_cpu.planned_gradients.default
    for each in ops:
        needs_traced_strides(each)
    return ops


def training_graph(
    x: Tensor, w: Tensor, bias: Tensor | None, dy: Tensor, wanted: Sequence[bool], geometry: Geometry
) -> GraphModule:
    """The forward pass and the gradients as a compiled graph calls them, of input, weight, bias and output gradient."""
    graph, nodes = Graph(), []
    for name, value in (("x", x), ("w", w), ("bias", bias), ("dy", dy)):
        nodes.append(None if value is None else graph.placeholder(name))
        if nodes[-1] is not None:
            nodes[-1].meta["val"] = value
    settled = list(geometry.stride), list(geometry.padding), list(geometry.dilation), geometry.groups, "zeros"
    layouts = [(list(each.shape), suggests_channels_last(each.shape, each.stride())) for each in (x, w)]
    y = graph.call_function(fprop, (*nodes[:3], *settled))
    dx = graph.call_function(dgrad, (nodes[3], nodes[1], *layouts[0], *settled)) if wanted[0] else None
    both = graph.call_function(wgrad, (nodes[3], nodes[0], *layouts[1], wanted[2], *settled))
    dw, db = graph.call_function(getitem, (both, 0)), graph.call_function(getitem, (both, 1)) if wanted[2] else None
    graph.output((y, dx, dw, db))
    call_kernels(graph)
    return GraphModule({}, graph)
