"""Convolutions of a graph that run as polyconv's operators: all of a training graph, and those of an inference graph
that are not 2-D or are transposed.

Each is timed against PyTorch's when the graph is compiled, in training with its gradients; in inference polyconv's
candidates are first timed against each other. Inductor keeps its own convolutions in channels_last, so polyconv's pay
for a change of layout before and after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import le
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..autotune import online, preferences
from ..autotune.tuning_file import Entry
from ..cpu.engines import aten
from ..dispatch.op import FORWARD, PUBLIC, TRANSPOSED, Op
from .choice import Choice, Outcomes, run_trials
from .graph_pass import CompiledLayer
from .private import copied, hint

PYTORCH, POLYCONV = "PyTorch's convolution", "polyconv's operator"
ROUNDS = 3
MARGIN = 1.05
"""Required speed-up: neighbours that Inductor would fuse are not part of the trial."""

_OPS: dict[Any, Op] = {op.aten: op for op in (*FORWARD.values(), *TRANSPOSED.values())}


def swapped(gm: GraphModule, outcomes: Outcomes, *, training: bool) -> tuple[GraphModule, list[CompiledLayer]]:
    """A copy of a graph of Dynamo's with calls swapped where polyconv is faster, and what was decided."""
    result, layers = copied(gm), []
    earlier = online.entries(outcomes.environment)
    for node in result.graph.nodes:
        call = _call_of(node)
        if call is None or (not training and call.has_packed_form):
            continue
        choice = _choose(call, outcomes, training)
        layers.append(CompiledLayer(call.key, choice))
        if choice.name == POLYCONV:
            node.target = PUBLIC[call.op]
    tuned = online.entries(outcomes.environment)
    outcomes.measured.update((key, entry) for key, entry in tuned.items() if key not in earlier)
    outcomes.save()
    result.recompile()
    return result, layers


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
    def key(self) -> str:
        sizes = ["x".join(map(str, shape)) for shape in self.shapes if shape is not None]
        return f"{self.op.name} {', '.join(sizes)}, {self.rest}"

    def tensors(self, *, training: bool, channels_last: bool) -> list[Tensor | None]:
        generator = torch.Generator().manual_seed(0)
        made: list[Tensor | None] = []
        for place, (shape, needs_grad) in enumerate(zip(self.shapes, self.needs_grad, strict=True)):
            if shape is None:
                made.append(None)
                continue
            value = torch.randn(shape, generator=generator)
            if channels_last and place < 2 and len(shape) in _FORMATS:
                value = value.to(memory_format=_FORMATS[len(shape)])
            made.append(value.requires_grad_(training and needs_grad))
        return made


_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _call_of(node: Node) -> _Call | None:
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
    is_dynamic = any(isinstance(size, torch.SymInt) for size in values[0].shape)
    return _Call(op, shapes, needs_grad, tuple(node.args[3:]), is_dynamic)


def _choose(call: _Call, outcomes: Outcomes, training: bool) -> Choice:
    if preferences.determinism_is_asked_for():
        return Choice(PYTORCH, None, {}, "PyTorch is in deterministic mode, so nothing is timed")
    key = f"compiled {'training' if training else 'inference'} {call.key}"
    entry, source = outcomes.find(key)
    if entry is None:
        if not training:
            tensors = call.tensors(training=False, channels_last=False)
            online.autotune(_timed(PUBLIC[call.op], tensors, call.rest, False))
        if not _has_kernels(call, training):
            return Choice(PYTORCH, None, {}, "polyconv's operator would run it, too")
        entry = outcomes.measured[key] = _trials(call, training)
    return Choice(entry.choice, None, dict(entry.seconds), source)


def _has_kernels(call: _Call, training: bool) -> bool:
    """True if the planner chooses a native kernel, not ATen's, for any pass."""
    tensors = call.tensors(training=training, channels_last=False)
    with preferences.watched(alone=True) as seen:
        _timed(PUBLIC[call.op], tensors, call.rest, training)()
    return any(not decision.choice.endswith(aten.NAME) for decision in seen)


def _trials(call: _Call, training: bool) -> Entry:
    best = run_trials(dict(_calls(call, training)), ROUNDS, POLYCONV).best
    theirs = min(seconds for name, seconds in best.items() if name != POLYCONV)
    winner = POLYCONV if MARGIN * best[POLYCONV] < theirs else PYTORCH
    return Entry(winner, best, theirs)


def _calls(call: _Call, training: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    layouts = (False, True) if call.op.rank > 1 else (False,)
    for channels_last in layouts:
        tensors = call.tensors(training=training, channels_last=channels_last)
        name = PYTORCH + (", channels_last" if channels_last else "")
        yield name, _timed(call.op.aten, tensors, call.rest, training)
    tensors = call.tensors(training=training, channels_last=call.op.rank > 1)
    ours = PUBLIC[call.op]

    def converted(x: Tensor, *rest: Any) -> Tensor:
        y = ours(x.contiguous(), *rest)
        return y.contiguous(memory_format=_FORMATS[y.dim()]) if y.dim() in _FORMATS else y

    yield POLYCONV, _timed(converted, tensors, call.rest, training)


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
            return torch.autograd.grad(y, leaves, torch.ones_like(y)) if leaves else y

    return step
