"""Convolutions of a graph that run as polyconv's operators: all of a training graph, and those of an inference graph
that are not 2-D or are transposed. Transposed ones with few channels may become convolutions of all phases at once.

Each is timed against PyTorch's when the graph is compiled, in training with its gradients, after polyconv's candidates
were timed against each other. Inductor keeps its own convolutions in channels_last, so in inference polyconv's pay for
a change of layout before and after them. A training graph runs in the layout in which its convolutions take less time,
each by the faster operator. In the graphs of its forward and its backward pass, operators whose sizes are known become
calls of the kernels (:func:`call_kernels`): the operators' Python code takes longer than a small layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from operator import getitem, le
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .. import settings
from ..arguments import Geometry, normalise, suggests_channels_last
from ..autotune import online, preferences
from ..autotune.tuning_file import Entry
from ..backend import backend_for
from ..cpu import native
from ..cpu.engines import aten, channel_lanes, depthwise, pointwise, tile_lanes
from ..dispatch.op import FORWARD, PUBLIC, TRANSPOSED, Op
from ..dispatch.operands import Layout, described, dgrad_problem, fprop_problem, geometry_of, wgrad_problem
from ..dispatch.schema import dgrad, fprop, split_bias, split_epilogue, wgrad
from ..lowering.aten import backward_arguments
from ..lowering.lower import ahead_on, lower
from ..problem import Pass, Problem
from .choice import Choice, Outcomes, run_trials
from .graph_pass import CompiledLayer
from .layer import DEPTHWISE
from .private import TRACED, copied, hint, in_layout_of_graph, needs_traced_strides
from .shuffles import by_phases, weights_of_phases

PYTORCH, POLYCONV, PHASES = "PyTorch's convolution", "polyconv's operator", "all phases at once"
LAST = ", channels_last"
"""Behind the name of an operator that reads and writes this layout."""
ROUNDS = 3
_VECTOR = 16
"""Elements of a vector of AVX-512."""
MARGIN = 1.05
"""Required speed-up: neighbours that Inductor would fuse, or write in another layout, are not part of the trial."""
COLD, COLD_OPERATORS = 0.03e-3, 0.5e-3
"""Time of a training layer beyond that of trials [s], because its calls are no longer in the caches between other
layers: of kernels in place of operators (:func:`call_kernels`), and of the operators' Python code."""

_PASSES: dict[Any, Pass] = {fprop: Pass.FPROP, dgrad: Pass.DGRAD, wgrad: Pass.WGRAD}
_SHARED = tile_lanes, channel_lanes, pointwise
"""Engines whose kernels share operators: all of native code but the depthwise one."""

_OPS: dict[Any, Op] = {op.aten: op for op in (*FORWARD.values(), *TRANSPOSED.values())}


def swapped(
    gm: GraphModule, outcomes: Outcomes, *, training: bool
) -> tuple[GraphModule, list[CompiledLayer], dict[str, Any]]:
    """A copy of a graph of Dynamo's with calls swapped where polyconv is faster, what was decided, and settings of
    Inductor."""
    result, chosen = copied(gm), []
    earlier = online.entries(outcomes.environment)
    for node in result.graph.nodes:
        call = _call_of(node, training)
        if call is None:
            continue
        if training or not call.has_packed_form:
            chosen.append((node, call, _choose(call, outcomes, training)))
        elif (
            call.has_few_phases
            and node.args[1].op == "placeholder"  # a parameter, rearranged once
            and _choose(call, outcomes, training).name == PHASES
        ):
            node.target, node.args = by_phases, (*node.args[:3], *call.rest)  # the pass chooses a kernel for it
    tuned = online.entries(outcomes.environment)
    outcomes.measured.update((key, entry) for key, entry in tuned.items() if key not in earlier)
    outcomes.save()
    options = _one_layout([(call, choice) for _, call, choice in chosen]) if training else {}
    for node, call, choice in chosen:
        if choice.name.startswith(POLYCONV):
            node.target = PUBLIC[call.op]
            if choice.name.endswith(LAST):
                _convert_input(node, _FORMATS[call.op.rank + 2])
    result.recompile()
    return result, [CompiledLayer(call.key, choice) for _, call, choice in chosen], options


# ---- kernels in place of operators


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
def call_kernels(graph: Graph) -> None:
    """Call kernels in place of polyconv's operators: once per layer of a forward graph, and of a backward graph, for
    all gradients. Where the plan is ATen's convolution, call that."""
    gradients: list[_Planned] = []
    for node in list(graph.nodes):
        planned = _planned(node)
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

    def made(numbers: Sequence[int]) -> Tensor:
        return torch.empty(*numbers[3:], memory_format=(torch.contiguous_format, torch.channels_last)[numbers[2]])

    def gradients(
        grad: Tensor,
        x: Tensor | None,
        w: Tensor | None,
        geometry: list[int],
        for_x: list[int],
        for_w: list[int],
        bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx, dw = (made(numbers) if numbers else torch.empty(0) for numbers in (for_x, for_w))
        return dx, dw, torch.empty(for_w[3] if for_w and bias else 0)

    torch.library.register_fake("polyconv_cpu::planned_fprop", lambda x, w, bias, geometry, plan: made(plan))
    torch.library.register_fake("polyconv_cpu::planned_gradients", gradients)
    ops = torch.ops.polyconv_cpu.planned_fprop.default, torch.ops.polyconv_cpu.planned_gradients.default
    for each in ops:
        needs_traced_strides(each)
    return ops


def _convert_input(node: Node, layout: torch.memory_format) -> None:
    """Convert the input of a convolution to a layout; one that has it stays as it is."""
    x, *rest = node.args
    with node.graph.inserting_before(node):
        converted = node.graph.call_method("contiguous", (x,), {"memory_format": layout})
    node.args = (converted, *rest)


def _one_layout(layers: Sequence[tuple[_Call, Choice]]) -> dict[str, Any]:
    """Name the faster operator of each convolution in the layout in which all together take less time. Returns settings
    of Inductor that keep the layout."""
    timed = [choice for _, choice in layers if choice.seconds]
    named = {
        last: [_faster(choice.seconds, last, call.cold) for call, choice in layers if choice.seconds]
        for last in (False, True)
    }
    total = {
        last: sum(choice.seconds[name] for choice, name in zip(timed, names, strict=True))
        for last, names in named.items()
    }
    keeps = MARGIN * total[False] < total[True]
    for choice, name in zip(timed, named[not keeps], strict=True):
        choice.name = name
    return in_layout_of_graph() if keeps else {}


def _faster(seconds: Mapping[str, float], channels_last: bool, cold: float) -> str:
    """PyTorch's operator or polyconv's in a layout, or in the only one that was timed."""
    names = [name for name in seconds if name.endswith(LAST) == channels_last] or list(seconds)
    best = {name: seconds[name] * MARGIN + cold if name.startswith(POLYCONV) else seconds[name] for name in names}
    return min(best, key=best.__getitem__)


@dataclass(frozen=True, slots=True)
class _Call:
    """A convolution of the graph."""

    op: Op
    shapes: tuple[tuple[int, ...] | None, ...]
    """Sizes of input, weight and bias."""
    needs_grad: tuple[bool, ...]
    rest: tuple[Any, ...]
    """Geometry, in the order of torch's arguments."""
    is_dynamic: bool = False
    """True if the input has sizes that may change."""
    channels_last: bool = False
    """True if the input arrives in this layout. Only training graphs ask."""

    @property
    def cold(self) -> float:
        """Time of polyconv's calls beyond that of trials [s]."""
        return COLD if self.calls_kernels else COLD_OPERATORS

    @property
    def calls_kernels(self) -> bool:
        """True if a training graph calls kernels, or ATen's convolution, in place of its operators."""
        fixed = not self.is_dynamic and not any(isinstance(each, str) for each in self.rest)
        return fixed and self.op.rank == 2 and not self.op.transposed and self.needs_grad[1]

    @property
    def has_packed_form(self) -> bool:
        """True if the pass over a frozen graph considers it: a 2-D one, transposed without groups and dilation."""
        if self.op.rank != 2 or not self.op.transposed:
            return self.op.rank == 2
        if self.is_dynamic or self.shapes[1] is None or len(self.rest) != 5:
            return False
        stride, *_, groups, dilation = self.rest
        return groups == 1 and set(dilation) == {1} and all(map(le, stride, self.shapes[1][2:]))

    @property
    def has_few_phases(self) -> bool:
        """True if a vector holds the outputs of all phases of a transposed convolution, whose image is a multiple of
        its input's, and none of them reads more than 3x3 pixels."""
        if not (self.op.transposed and self.has_packed_form) or self.shapes[1] is None:
            return False
        _, outputs, *taps = self.shapes[1]
        (stride, *more), (padding, *_), (extra, *_) = self.rest[:3]
        square = more == [stride] and all(len({*each}) == 1 for each in (taps, *self.rest[1:3]))
        fits = 1 <= padding <= stride and taps[0] <= 2 * stride + padding
        return square and fits and taps[0] + extra == stride + 2 * padding and outputs * stride**2 <= _VECTOR

    @property
    def key(self) -> str:
        sizes = ["x".join(map(str, shape)) for shape in self.shapes if shape is not None]
        return f"{self.op.name} {', '.join(sizes)}, {self.rest}" + (LAST if self.channels_last else "")

    def tensors(self, *, training: bool, channels_last: bool) -> list[Tensor | None]:
        """Random tensors. In training the weight has the layout of the graph, whose optimizer keeps it."""
        generator = torch.Generator().manual_seed(0)
        made: list[Tensor | None] = []
        for place, (shape, needs_grad) in enumerate(zip(self.shapes, self.needs_grad, strict=True)):
            if shape is None:
                made.append(None)
                continue
            value = torch.randn(shape, generator=generator)
            is_last = self.channels_last if training and place == 1 else channels_last and place < 2
            if is_last and len(shape) in _FORMATS:
                value = value.to(memory_format=_FORMATS[len(shape)])
            made.append(value.requires_grad_(training and needs_grad))
        return made


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _call_of(node: Node, training: bool) -> _Call | None:
    """The convolution of a node, in float32 on the CPU, with arguments that can be read from the graph."""
    op = _OPS.get(node.target) if node.op == "call_function" else None
    if op is None or node.kwargs or len(node.args) < 2:
        return None
    tensors = [*node.args[:3], *([None] if len(node.args) < 3 else [])]
    values = [each.meta.get("example_value") if isinstance(each, Node) else None for each in tensors]
    if values[0] is None or values[1] is None or values[0].dim() != op.rank + 2:
        return None
    if any(value is not None and (value.dtype != torch.float32 or value.device.type != "cpu") for value in values):
        return None
    if any(isinstance(each, Node) for each in node.args[3:]):
        return None
    shapes = tuple(None if value is None else tuple(map(hint, value.shape)) for value in values)
    needs_grad = tuple(value is not None and value.requires_grad for value in values)
    x = values[0]
    is_dynamic = any(isinstance(size, torch.SymInt) for size in x.shape)
    # Read from hints: a question to the tensor itself would restrict sizes that may change.
    _, channels, *sizes = map(hint, x.shape)
    last = training and x.dim() in _FORMATS and hint(x.stride(1)) == 1 and channels > 1 < prod(sizes)
    rest = [(each,) * op.rank if isinstance(each, int) else each for each in node.args[3:]]
    rest[3:4] = node.args[6:7]  # groups
    return _Call(op, shapes, needs_grad, tuple(rest), is_dynamic, last)


def _choose(call: _Call, outcomes: Outcomes, training: bool) -> Choice:
    if preferences.determinism_is_asked_for():
        return Choice(PYTORCH, None, {}, "PyTorch is in deterministic mode, so nothing is timed")
    step = "training kernels" if call.calls_kernels else "training step"
    key = f"compiled {step if training else 'inference'} {call.key}"
    entry, source = outcomes.find(key)
    if entry is None:
        if training:
            entry = _step_trials(call)
        elif call.has_few_phases:
            entry = _phase_trials(call)
        else:
            tensors = call.tensors(training=False, channels_last=False)
            online.autotune(_timed(PUBLIC[call.op], tensors, call.rest, False))
            if not _has_kernels(call):
                return Choice(PYTORCH, None, {}, "polyconv's operator would run it, too")
            entry = _trials(call)
        outcomes.measured[key] = entry
    return Choice(entry.choice, None, dict(entry.seconds), source)


def _has_kernels(call: _Call) -> bool:
    """True if the planner chooses a native kernel, not ATen's."""
    tensors = call.tensors(training=False, channels_last=False)
    with preferences.watched(alone=True) as seen:
        _timed(PUBLIC[call.op], tensors, call.rest, False)()
    return any(not decision.choice.endswith(aten.NAME) for decision in seen)


def _trials(call: _Call) -> Entry:
    best = run_trials(dict(_calls(call)), ROUNDS, POLYCONV).best
    theirs = min(seconds for name, seconds in best.items() if name != POLYCONV)
    winner = POLYCONV if MARGIN * best[POLYCONV] < theirs else PYTORCH
    return Entry(winner, best, theirs)


def _phase_trials(call: _Call) -> Entry:
    x, w, bias = call.tensors(training=False, channels_last=True)
    assert w is not None
    stride, padding = (numbers[0] for numbers in call.rest[:2])
    weights = weights_of_phases(w, bias, stride, padding)

    def phases(x: Tensor, *_: Any) -> Tensor:
        return torch.pixel_shuffle(torch.conv2d(x, *weights, padding=1), stride)

    calls = {
        name: _timed(run, (x, w, bias), call.rest, False) for name, run in ((PYTORCH, call.op.aten), (PHASES, phases))
    }
    best = run_trials(calls, ROUNDS, PHASES).best
    return Entry(PHASES if MARGIN * best[PHASES] < best[PYTORCH] else PYTORCH, best, best[PYTORCH])


def _step_trials(call: _Call) -> Entry:
    """Times of both operators in each layout that the graph may have; none is dropped, because all convolutions of the
    graph decide on the layout (:func:`_one_layout`), and only then on the operator."""
    calls = dict(_steps(call))
    best = run_trials(calls, ROUNDS, *calls).best
    theirs = min(seconds for name, seconds in best.items() if name.startswith(PYTORCH))
    return Entry(min(best, key=best.__getitem__), best, theirs)


def _steps(call: _Call) -> Iterator[tuple[str, Callable[[], object]]]:
    both = call.op.rank == 2 and not call.channels_last  # Inductor moves only these to channels_last
    for channels_last in (False, True) if both else (call.channels_last,):
        tensors = call.tensors(training=True, channels_last=channels_last)
        suffix = LAST if channels_last else ""
        ours = _timed(PUBLIC[call.op], tensors, call.rest, True)
        online.autotune(ours)
        if call.calls_kernels:
            yield PYTORCH + suffix, _direct(call, tensors, ours=False, copies=both and channels_last)
            yield POLYCONV + suffix, _direct(call, tensors, ours=True)
            continue
        theirs = partial(_of_weight_in_layout, call.op.aten) if both and channels_last else call.op.aten
        yield PYTORCH + suffix, _timed(theirs, tensors, call.rest, True)
        yield POLYCONV + suffix, ours


def _direct(call: _Call, tensors: Sequence[Tensor | None], *, ours: bool, copies: bool = False) -> Callable[[], object]:
    """A training step by the calls of a compiled graph, polyconv's or PyTorch's. Operators and autograd would take
    longer than a small layer. ``copies``: Inductor copies the weight into the layout of the input."""
    x, w, bias = (None if each is None else each.detach() for each in tensors)
    assert x is not None
    assert w is not None
    leaves = [each.detach() for each in tensors if each is not None and each.requires_grad]
    wanted = call.needs_grad[0], True, bias is not None and call.needs_grad[2]
    numbers: list[Any] = [*call.rest, *(1, 0, 1, 1)[len(call.rest) :]]
    stride, padding, dilation, groups = numbers
    geometry = normalise(w.shape[2:], stride, padding, dilation, groups, "zeros", None, rank=2)
    with torch.no_grad():
        dy = torch.ones_like(call.op.aten(x, w, bias, *call.rest))
    given = [each for each in (x, w, bias, dy) if each is not None]
    run: Callable[..., Sequence[Tensor | None]]
    if ours:
        run = _training_graph(x, w, bias, dy, wanted, geometry).forward
    else:
        moves = geometry.stride, geometry.padding[::2], geometry.dilation, False, (0, 0), geometry.groups

        def run(x: Tensor, w: Tensor, *_: Tensor) -> Sequence[Tensor | None]:
            w = w.contiguous(memory_format=torch.channels_last) if copies else w
            y = torch.ops.aten.convolution.default(x, w, bias, *moves)
            return y, *torch.ops.aten.convolution_backward.default(dy, x, w, [w.shape[0]], *moves, list(wanted))

    def step() -> object:
        with torch.no_grad():
            y, *gradients = run(*given)
            return y, _accumulated(leaves, [each for each in gradients if each is not None])

    return step


def _training_graph(
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


def _accumulated(leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in the layout of the leaves, as AccumulateGrad keeps them."""
    return [
        torch.empty_like(leaf).copy_(its) if its.stride() != leaf.stride() else its
        for leaf, its in zip(leaves, gradients, strict=True)
    ]


def _of_weight_in_layout(function: Callable[..., Tensor], x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    """As Inductor calls PyTorch's convolution: a copy of the weight has the layout of the input."""
    return function(x, w.contiguous(memory_format=torch.channels_last), *rest)


def _calls(call: _Call) -> Iterator[tuple[str, Callable[[], object]]]:
    layouts = (False, True) if call.op.rank > 1 else (False,)
    for channels_last in layouts:
        tensors = call.tensors(training=False, channels_last=channels_last)
        yield PYTORCH + (LAST if channels_last else ""), _timed(call.op.aten, tensors, call.rest, False)
    tensors = call.tensors(training=False, channels_last=call.op.rank > 1)
    ours = PUBLIC[call.op]

    def converted(x: Tensor, *rest: Any) -> Tensor:
        y = ours(x.contiguous(), *rest)
        return y.contiguous(memory_format=_FORMATS[y.dim()]) if y.dim() in _FORMATS else y

    yield POLYCONV, _timed(converted, tensors, call.rest, False)


def _timed(
    function: Callable[..., Tensor], tensors: Sequence[Tensor | None], rest: Sequence[Any], training: bool
) -> Callable[[], object]:
    if not training:

        def forward() -> object:
            with torch.inference_mode():
                return function(*tensors, *rest)

        return forward
    leaves = [value for value in tensors if value is not None and value.requires_grad]

    def step() -> object:
        with torch.enable_grad():
            y = function(*tensors, *rest)
            if not leaves:
                return y
            gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
            return _accumulated(leaves, gradients)

    return step
