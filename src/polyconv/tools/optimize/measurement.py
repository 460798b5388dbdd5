"""Measurement of one convolution of a model: PyTorch's module against polyconv's, on the model's data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ...activation import Activation
from ...autotune import preferences
from ...autotune.preferences import Decision
from ...autotune.tuning_file import Entry
from ...backend import backend_for, candidate_names
from ...lowering.reshape import as_image
from ...measure.candidate_timing import Outcome, Timer, contest, times_of
from ...measure.operands import Operands
from ...nn import OURS as MODULES
from ...problem import Pass
from ...tuning_key import problem_key
from .recording import Call, Layer
from .swapping import Torchs, frozen_copies

TORCH, OURS, FUSED = "PyTorch", "polyconv", "polyconv, fused"

Passes = Callable[[], object]
"""One call of a module: forward, and in training backward."""
TimerWithin = Callable[[float], Timer]
"""From a time limit [s] to a timer that keeps it if it can."""


@dataclass(frozen=True)
class Measurement:
    """Result for one layer on inputs of one shape. Times are of one call [s]."""

    shape: str
    plan: str
    torch_seconds: float
    seconds: float
    """Time of polyconv's module, with a folded normalisation, followed by the separate activation."""
    fused_seconds: float | None
    """Time of polyconv's module with the fused activation; None if fusion is impossible."""
    error: float
    torch_error: float
    predicted_error: float
    """Largest predicted error of the passes' plans, relative to the scale of the result."""
    same_kernel: bool
    """All passes are passthrough, so that only PyTorch's module was timed."""
    choices: Mapping[str, str]
    """Problem key -> chosen candidate."""
    entries: Mapping[str, Entry]
    """Problem key -> entry of a tuning file."""


class Measurer:
    """Measures layers one by one; candidates' times are cached by problem, for layers with equal problems."""

    def __init__(self, timer: TimerWithin, *, training: bool, candidates: int) -> None:
        self.timer_within = timer
        self.training = training
        self.candidates = candidates
        self._known: dict[str, dict[str, float]] = {}

    def measure(
        self, layer: Layer, call: Call, activation: nn.Module | None, fused: str | None, seconds: float
    ) -> Measurement:
        """Time one layer on one of its inputs.

        ``activation`` is the module that always follows it or its normalisation, ``fused`` the name of that activation.
        Half of ``seconds`` is for the candidates of its problems, unless their times are cached, and half for the
        modules.
        """
        twin = _twin(layer, None)
        decisions = self._decisions(twin, call)
        operands = _operands(twin, call)
        backend = backend_for(call.x.device)
        timer = self.timer_within(seconds / 2 / max(1, len(decisions)))
        outcomes: list[Outcome] = []
        for decision in decisions:
            if decision.key not in self._known:
                self._known[decision.key] = times_of(decision, operands, backend, timer, most=self.candidates)
            known = self._known[decision.key]
            outcomes.append(contest(decision, operands, backend, timer, known=known))
        entries = {outcome.key: outcome.entry for outcome in outcomes}
        if fused is not None:
            entries.update(_fused_entries(outcomes, Activation(fused), partial(candidate_names, backend)))
        chosen = {key: entry.choice for key, entry in entries.items()}
        forced = preferences.Forced(chosen)
        with forced:
            plans = [preferences.plan(backend, one.problem, inference=one.inference) for one in decisions]
            passthrough = bool(plans) and all(plan.passthrough for plan in plans)
            same = passthrough and layer.fold.norm is None
        calls: dict[str, Passes] = {TORCH: self._passes(layer.module, call, layer.fold.norm, activation)}
        if not same:
            calls[OURS] = self._passes(twin, call, activation)
            if fused is not None:
                calls[FUSED] = self._passes(_twin(layer, fused), call)
        within: dict[str, Callable[[], AbstractContextManager[object]]] = dict.fromkeys(calls, lambda: forced)
        within[TORCH] = nullcontext
        with self._mode():
            timings = self.timer_within(seconds / 2)(layer.name, calls, within)
        return Measurement(
            shape=f"{_times(call.x.shape)}: {decisions[0].problem.in_brief}" if decisions else _times(call.x.shape),
            plan=_plan(outcomes),
            torch_seconds=timings[TORCH].best,
            seconds=timings[TORCH if same else OURS].best,
            fused_seconds=timings[FUSED].best if FUSED in timings else None,
            error=max((outcome.error for outcome in outcomes), default=0.0),
            torch_error=max((outcome.torch_error for outcome in outcomes), default=0.0),
            predicted_error=max((plan.predicted_error for plan in plans), default=0.0),
            same_kernel=same,
            choices=chosen,
            entries=entries,
        )

    def _decisions(self, twin: nn.Module, call: Call) -> list[Decision]:
        """The problems that one call of polyconv's module plans, each once."""
        with preferences.watched(alone=True) as seen, self._mode():
            self._passes(twin, call)()
        return list({decision.key: decision for decision in seen}.values())

    def _mode(self) -> AbstractContextManager[object]:
        return torch.enable_grad() if self.training else torch.inference_mode()

    def _passes(self, module: nn.Module, call: Call, *following: nn.Module | None) -> Passes:
        x = call.x.detach()

        def run(x: Tensor) -> Tensor:
            y = _forward(module, x, call)
            for each in following:
                y = y if each is None else type(each).forward(each, y)
            return y

        if not self.training:
            return lambda: run(x)
        x.requires_grad_(call.needs_dx)
        wanted = [tensor for tensor in (x, *module.parameters(recurse=False)) if tensor.requires_grad]
        if not wanted or call.dy is None:
            return lambda: run(x)
        return lambda: torch.autograd.grad(run(x), wanted, call.dy)


def _plan(outcomes: list[Outcome]) -> str:
    """The chosen candidate; of several problems, one per pass."""
    if len(outcomes) == 1:
        return outcomes[0].entry.choice
    return "; ".join(f"{outcome.decision.problem.kind} {outcome.entry.choice}" for outcome in outcomes)


def _forward(module: nn.Module, x: Tensor, call: Call) -> Tensor:
    """Call the module without its hooks."""
    forward: Callable[..., Tensor] = type(module).forward
    return forward(module, x) if call.output_size is None else forward(module, x, call.output_size)


def _twin(layer: Layer, activation: str | None) -> Torchs:
    """Polyconv's module sharing the parameters of a torch module, or with those of a folded normalisation."""
    twin = copy.copy(layer.module)
    twin.__class__ = MODULES[type(layer.module)]
    if layer.fold.norm is not None:
        weight, bias = frozen_copies(layer.module, layer.fold.norm)
        twin.__dict__.update(weight=weight, bias=bias)
    if activation is not None:
        twin.activation = activation  # type: ignore[assignment]
    return twin


def _operands(module: Torchs, call: Call) -> Operands:
    """Operands as backends take them: batched and 2-D; input and output are exchanged if transposed."""
    w = module.weight.detach()

    def shown(tensor: Tensor) -> Tensor:
        return as_image(tensor if tensor.dim() == w.dim() else tensor.unsqueeze(0))

    x, dy = shown(call.x), None if call.dy is None else shown(call.dy)
    if module.transposed:
        if dy is None:  # the result's place, of which only the shape is read
            with torch.no_grad():
                dy = shown(_forward(module, call.x, call))
        return Operands(dy, as_image(w), None, x)
    return Operands(x, as_image(w), None if module.bias is None else module.bias.detach(), dy)


def _fused_entries(
    outcomes: list[Outcome], activation: Activation, candidates: Callable[..., tuple[str, ...]]
) -> dict[str, Entry]:
    """Entries for the problems with a fused activation: the same candidates, since it is applied after the sums."""
    found = {}
    for outcome in outcomes:
        problem, inference = outcome.decision.problem, outcome.decision.inference
        if problem.kind is not Pass.FPROP:
            continue
        fused = replace(problem, activation=activation)
        names, choice = candidates(fused, inference=inference), outcome.entry.choice
        if choice.endswith(", ATen"):  # its name also lists unfused steps, such as the activation
            choice = next((name for name in names if name.endswith(", ATen")), choice)
        if choice in names:
            key = problem_key(fused, kept_weights=inference)
            found[key] = replace(outcome.entry, choice=choice, seconds={choice: outcome.seconds})
    return found


def _times(shape: torch.Size) -> str:
    return "×".join(map(str, shape))
