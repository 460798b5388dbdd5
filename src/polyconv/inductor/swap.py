"""Convolutions of a graph that run as polyconv's operators: all of a training graph, and those of an inference graph
that are not 2-D or are transposed. Transposed ones with few channels may become convolutions of all phases at once.

Each is timed against PyTorch's when the graph is compiled, in training with its gradients, after polyconv's candidates
were timed against each other. Inductor keeps its own convolutions in channels_last, so in inference polyconv's pay for
a change of layout before and after them. A training graph runs in the layout in which its convolutions take less time,
each by the faster operator. In the graphs of its forward and its backward pass, operators whose sizes are known become
calls of the kernels (:mod:`.training.kernel_calls`): the operators' Python code takes longer than a small layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from math import prod
from operator import le
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..arguments import normalise
from ..autotune import online, preferences
from ..autotune.tuning_file import Entry
from ..cpu.engines import aten
from ..dispatch.op import FORWARD, PUBLIC, TRANSPOSED, Op
from .choice import Choice, Outcomes, run_trials
from .graph_pass import CompiledLayer
from .private import copied, hint, in_layout_of_graph, strides_as_traced
from .shuffles import by_phases, weights_of_phases
from .training.kernel_calls import training_graph

PYTORCH, POLYCONV, PHASES = "PyTorch's convolution", "polyconv's operator", "all phases at once"
LAST = ", channels_last"
"""Behind the name of an operator that reads and writes this layout."""
_CONVERTED = "polyconv_converted"
"""Name of the metadata of a node that converts the input of an operator."""
ROUNDS = 3
_VECTOR = 16
"""Elements of a vector of AVX-512."""
MARGIN = 1.05
"""Required speed-up: neighbours that Inductor would fuse, or write in another layout, are not part of the trial."""
COLD, COLD_OPERATORS = 0.03e-3, 0.5e-3
"""Time of a training layer beyond that of trials [s], because its calls are no longer in the caches between other
layers: of kernels in place of operators, and of the operators' Python code."""

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
    _call_operators(chosen)
    converted = any(choice.name == POLYCONV + LAST for _, _, choice in chosen)
    if converted and not strides_as_traced(result):  # a view of a result
        options = _one_layout([(call, choice) for _, call, choice in chosen], converts=False)
        _call_operators(chosen)
    result.recompile()
    return result, [CompiledLayer(call.key, choice) for _, call, choice in chosen], options


def _call_operators(chosen: Sequence[tuple[Node, _Call, Choice]]) -> None:
    """Call the chosen operators, in the chosen layout."""
    for node, call, choice in chosen:
        x, *rest = node.args
        if isinstance(x, Node) and _CONVERTED in x.meta:
            node.args = (x.args[0], *rest)
            node.graph.erase_node(x)
        ours = choice.name.startswith(POLYCONV)
        node.target = PUBLIC[call.op] if ours else call.op.aten
        if ours and choice.name.endswith(LAST):
            _convert_input(node, _FORMATS[call.op.rank + 2])


def _convert_input(node: Node, layout: torch.memory_format) -> None:
    """Convert the input of a convolution to a layout; one that has it stays as it is."""
    x, *rest = node.args
    with node.graph.inserting_before(node):
        converted = node.graph.call_method("contiguous", (x,), {"memory_format": layout})
    converted.meta[_CONVERTED] = True
    node.args = (converted, *rest)


def _one_layout(layers: Sequence[tuple[_Call, Choice]], *, converts: bool = True) -> dict[str, Any]:
    """Name the faster operator of each convolution in the layout in which all together take less time, or which the
    graph has (``converts``: False). Returns settings of Inductor that keep the layout."""
    timed = [choice for _, choice in layers if choice.seconds]
    named = {
        last: [_faster(choice.seconds, last, call.cold) for call, choice in layers if choice.seconds]
        for last in (False, True)
    }
    total = {
        last: sum(choice.seconds[name] for choice, name in zip(timed, names, strict=True))
        for last, names in named.items()
    }
    keeps = not converts or MARGIN * total[False] < total[True]
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
        if self.is_dynamic or self.shapes[1] is None:
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
            value = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            is_last = self.channels_last if training and place == 1 else channels_last and place < 2
            if is_last and len(shape) in _FORMATS:
                value = value.to(memory_format=_FORMATS[len(shape)])
            made.append(value.requires_grad_(training and needs_grad))
        return made


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _call_of(node: Node, training: bool) -> _Call | None:
    """The convolution of a node, in float32 on the CPU, with arguments that can be read from the graph. All of them are
    then passed by position."""
    op = _OPS.get(node.target) if node.op == "call_function" else None
    if op is None:
        return None
    given = signature(PUBLIC[op]).bind(*node.args, **node.kwargs)
    given.apply_defaults()
    node.args, node.kwargs = given.args, {}
    values = [each.meta.get("example_value") if isinstance(each, Node) else None for each in node.args[:3]]
    if values[0] is None or values[1] is None or values[0].dim() != op.rank + 2:
        return None
    if any(value is not None and (value.dtype != torch.float32 or value.device.type != "cpu") for value in values):
        return None
    if not set(node.all_input_nodes) <= set(node.args[:3]):  # symbolic numbers, also in tuples
        return None
    if training and node.meta["example_value"].dtype != torch.float32:  # autocast
        return None
    shapes = tuple(None if value is None else tuple(map(hint, value.shape)) for value in values)
    needs_grad = tuple(value is not None and value.requires_grad for value in values)
    x = values[0]
    is_dynamic = any(isinstance(size, torch.SymInt) for size in x.shape)
    # Read from hints: a question to the tensor itself would restrict sizes that may change.
    _, channels, *sizes = map(hint, x.shape)
    last = training and x.dim() in _FORMATS and hint(x.stride(1)) == 1 and channels > 1 < prod(sizes)
    rest = [(each,) * op.rank if isinstance(each, int) else each for each in node.args[3:]]
    rest[3] = node.args[6]  # groups
    return _Call(op, shapes, needs_grad, tuple(rest), is_dynamic, last)


def _choose(call: _Call, outcomes: Outcomes, training: bool) -> Choice:
    if preferences.determinism_is_asked_for():
        return Choice(PYTORCH, None, {}, "PyTorch is in deterministic mode, so nothing is timed")
    step = "training kernels" if call.calls_kernels else "training step"
    key = f"compiled {step if training else 'inference'} {call.key}"
    entry, source = outcomes.find(key)
    if entry is None:
        with torch.autocast("cpu", enabled=False):
            entry = _step_trials(call) if training else _inference_trials(call)
        if entry is None:
            return Choice(PYTORCH, None, {}, "polyconv's operator would run it, too")
        outcomes.measured[key] = entry
    return Choice(entry.choice, None, dict(entry.seconds), source)


def _inference_trials(call: _Call) -> Entry | None:
    """None if polyconv's operator would run PyTorch's kernel."""
    if call.has_few_phases:
        return _phase_trials(call)
    tensors = call.tensors(training=False, channels_last=False)
    online.autotune(_timed(PUBLIC[call.op], tensors, call.rest, False))
    return _trials(call) if _has_kernels(call) else None


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
    stride, padding, dilation, groups = call.rest
    geometry = normalise(w.shape[2:], stride, padding, dilation, groups, "zeros", None, rank=2)
    with torch.no_grad():
        dy = torch.ones_like(call.op.aten(x, w, bias, *call.rest))
    given = [each for each in (x, w, bias, dy) if each is not None]
    run: Callable[..., Sequence[Tensor | None]]
    if ours:
        run = training_graph(x, w, bias, dy, wanted, geometry).forward
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
