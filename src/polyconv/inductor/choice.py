"""The kernel of each layer: polyconv's candidates against Inductor's own call, timed when the graph is compiled.

Both sides compute the whole layer, epilogue included, on channels_last tensors with packed weights. The default tuning
file keeps the outcomes, so the next compilation of the same layer on the same machine times nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from .. import settings
from ..activation import Activation
from ..autotune import preferences, tuning_lookup
from ..autotune.elimination import MIN_SPEEDUP, Elimination
from ..autotune.online import clock
from ..autotune.tuning_file import Entry, Tuning, TuningError, update
from ..cpu import native, planner
from ..cpu.costs import Costs
from ..cpu.plan import CpuCandidate
from ..runtime.bypass import bypassing
from ..runtime.warn_once import warn_once
from ..selection import Preference
from ..tuning_key import Environment, problem_key
from .chain import Link, chain_call
from .layer import MOST_BYTES, Layer
from .private import hint

ONEDNN = "oneDNN"
"""Name of Inductor's own convolution among the candidates."""
CHAIN, SEPARATE = "in a chain", "separate layers"
"""Names of the two ways to run a chain."""
ROUNDS = 5
"""Trials of a candidate."""
RUNS = 2
"""Runs of a trial, of which the best counts: with several threads, a preempted run must not drop a candidate."""
PER_ENGINE, MOST = 2, 4
"""Candidates that are timed: of one engine, and of all."""
AS_FAST = 1.08
"""Ratio of times up to which the more accurate of two candidates is chosen."""
TIMES_DIRECT = 10.0
"""Largest predicted error of a layer at the end of a graph, as a multiple of that of direct summation. What follows
averages the errors of other layers; these reach the output as they are."""
CACHE_BYTES = 32 * 2**20
"""Memory touched before a trial: in a network the weights of a layer have left the caches since the last call."""


@dataclass(slots=True)
class Choice:
    """The outcome for a layer."""

    name: str
    """Name of the candidate; :data:`ONEDNN` for Inductor's own call."""
    candidate: CpuCandidate | None
    seconds: Mapping[str, float]
    """Best time of each candidate [s]; empty if nothing was timed."""
    source: str
    """How it was decided."""


@dataclass(slots=True)
class Outcomes:
    """Measured choices on this machine: those of tuning files, and new ones."""

    environment: Environment
    measured: dict[str, Entry] = field(default_factory=dict)
    """New outcomes, by key."""

    def find(self, key: str) -> tuple[Entry | None, str]:
        """Look up a measured choice. Returns None instead of an entry if there is none; the text names the source."""
        if key not in self.measured and (found := tuning_lookup.find(key, self.environment)) is not None:
            return found.entry, f"measured earlier, in {found.path.name}"
        return self.measured.get(key), "measured"

    def save(self) -> None:
        """Add new outcomes to the default tuning file. Whatever measures calls it: a graph may be compiled again."""
        if not self.measured or settings.current().cache_dir is None or settings.current().tuning_file == ():
            return
        try:
            update(tuning_lookup.default_file(), Tuning.of(self.environment, self.measured))
        except (TuningError, OSError) as error:
            warn_once(f"the outcomes of autotuning are not kept: {error}")


@dataclass(slots=True)
class Chooser:
    """Chooses kernels for the layers of one graph."""

    outcomes: Outcomes
    weight_bytes: int
    """Size of all weights of the graph."""

    def choose(self, layer: Layer, *, at_the_end: bool = False) -> Choice:
        """The kernel of a layer. ``at_the_end``: its errors reach an output of the graph (:data:`TIMES_DIRECT`)."""
        able = {one.name: one for one in _candidates(layer, TIMES_DIRECT if at_the_end else inf)}
        if not able:
            return Choice(ONEDNN, None, {}, "polyconv has no kernel for it")
        if preferences.determinism_is_asked_for():
            plan = planner.plan_cpu(layer.problem, inference=True)
            name = plan.chosen.name if plan.chosen.name in able else ONEDNN
            return Choice(name, able.get(name), {}, "cost model, because PyTorch is in deterministic mode")
        key = _key(layer) + (", at the end" if at_the_end else "")
        entry, source = self.outcomes.find(key)
        if entry is None or (entry.choice != ONEDNN and entry.choice not in able):
            entry, source = self._trials(layer, able), "measured"
            self.outcomes.measured[key] = entry
        return Choice(entry.choice, able.get(entry.choice), dict(entry.seconds), source)

    def choose_chain(self, chain: Sequence[Link]) -> Choice:
        """:data:`CHAIN` if one call for a chain of layers is faster than the calls that were chosen for each."""
        if preferences.determinism_is_asked_for():
            return Choice(SEPARATE, None, {}, "PyTorch is in deterministic mode, so nothing is timed")
        key = "chain: " + " -> ".join(_key(link.layer) for link in chain)
        entry, source = self.outcomes.find(key)
        if entry is None:
            entry, source = self._chain_trials(chain), "measured"
            self.outcomes.measured[key] = entry
        return Choice(entry.choice, None, dict(entry.seconds), source)

    def _chain_trials(self, chain: Sequence[Link]) -> Entry:
        inputs, calls = _inputs(chain[0].layer), [_call(link.layer, link.runs) for link in chain]
        residual, whole = _residual(chain[-1].layer), chain_call(chain)

        def separate() -> Tensor:
            y = inputs
            for call in calls:
                y = [call(y)]
            return y[0]

        def together() -> Any:
            return _operator()(inputs, whole.weights, whole.bias, residual, None, whole.numbers, *whole.ab)

        best = self._session({SEPARATE: separate, CHAIN: together}, inputs, SEPARATE, CHAIN).best
        return Entry(CHAIN if MIN_SPEEDUP * best[CHAIN] < best[SEPARATE] else SEPARATE, best, best[SEPARATE])

    def _session(self, calls: Mapping[str, Callable[[], Any]], inputs: list[Tensor], *stays: str) -> Elimination:
        """Trials with cold weights; the input is in the cache as far as it fits, as the layer before has written it."""
        flush = torch.zeros(max(1, min(self.weight_bytes, CACHE_BYTES) // 4), dtype=torch.float32)

        def before() -> None:
            flush.add_(1.0)
            for x in inputs:
                x.add_(0.0)

        with torch.inference_mode():
            return run_trials(calls, ROUNDS, *stays, before=before)

    def _trials(self, layer: Layer, able: dict[str, CpuCandidate]) -> Entry:
        inputs = _inputs(layer)
        calls = {ONEDNN: _call(layer, None), **{name: _call(layer, one) for name, one in able.items()}}
        best = self._session({name: partial(call, inputs) for name, call in calls.items()}, inputs, ONEDNN).best
        fastest = min(best, key=best.__getitem__)
        ahead = MIN_SPEEDUP * best[fastest] < best[ONEDNN]
        return Entry(_most_accurate(fastest, best, able) if ahead else ONEDNN, best, best[ONEDNN])


def run_trials(
    calls: Mapping[str, Callable[[], object]], rounds: int, *stays: str, before: Callable[[], object] = lambda: None
) -> Elimination:
    """Time calls in turn until one is decided on; each first runs once untimed, and ``before`` runs before each run.
    Calls named in ``stays`` are never dropped."""
    session = Elimination(list(calls), rounds, stays)
    for call in calls.values():
        call()

    def run(call: Callable[[], object]) -> float:
        before()
        began = clock()
        call()
        return clock() - began

    while not session.decided:
        name = session.next
        session.note(name, min(run(calls[name]) for _ in range(RUNS)))
    native.free_idle_outputs()  # outputs of the next layer have other sizes
    return session


def _most_accurate(winner: str, best: dict[str, float], able: dict[str, CpuCandidate]) -> str:
    """The candidate with the least predicted error among those that are about as fast as the winner; direct ones first,
    whose weights are smaller, because other programs may keep the memory busy."""
    limit = min(AS_FAST * best[winner], best[ONEDNN] / MIN_SPEEDUP)
    close = [name for name in able if best.get(name, inf) <= limit]
    return min(close, key=lambda name: (not able[name].direct, able[name].error), default=winner)


def _candidates(layer: Layer, times_direct: float = inf) -> list[CpuCandidate]:
    """Candidates that keep the tolerance for the layer's weight, the cheapest by the cost model first."""
    problem, device = layer.problem, planner.here()
    costs = Costs(problem, device, inference=True)
    able = [one for one in planner.offered(problem, device) if one.refusal is None and layer.runs(one)]
    limit = times_direct * min((one.error for one in able if one.direct), default=inf)
    able = sorted((one for one in able if one.direct or limit == inf or one.error <= limit), key=costs.counted)
    kept: list[CpuCandidate] = []
    most = min(MOST, max(1, MOST_BYTES // layer.w.nbytes))  # all hold a packed weight until the trials end
    for one in able:
        if len(kept) < most and [each.engine for each in kept].count(one.engine) < PER_ENGINE and _keeps(layer, one):
            kept.append(one)
    return kept


def _keeps(layer: Layer, one: CpuCandidate) -> bool:
    """True if the candidate keeps the tolerance, for the layer's weight too."""
    problem = layer.problem
    if one.direct:
        return True
    if one.error > problem.tolerance or native.normalised(layer.w)[1]:  # the transform flushes denormal weights
        return False
    plan = planner.plan_cpu(problem, inference=True, prefer=Preference(one.name))
    return plan.for_weights(layer.w) is plan


def _call(layer: Layer, one: CpuCandidate | None) -> Callable[[list[Tensor]], Any]:
    """The layer by a candidate, or by Inductor's own call: of its input, or of the tensors that its prologue joins. All
    but a kernel that joins them first write what they read to memory, as Inductor would. A residual is random."""
    residual, bias, prologue = _residual(layer), layer.bias_value, layer.prologue

    def written(inputs: list[Tensor]) -> Tensor:
        if prologue is None:
            return inputs[0]
        if prologue.gate is not None:
            return inputs[0] * prologue.normalisation.view(-1, 1, 1)
        return torch.cat(inputs, 1).relu_() if len(inputs) > 1 else inputs[0].relu()

    if one is None:
        onednn = _onednn(layer, residual)
        return lambda inputs: onednn(written(inputs))
    weights, rest = layer.weights_for(one), (layer.numbers(one), *layer.epilogue.activation.ab)
    if prologue is not None and layer.joins(one):
        normalisation = prologue.normalisation
        return lambda inputs: _operator()(inputs, weights, bias, residual, normalisation, *rest)
    return lambda inputs: _operator()([written(inputs)], weights, bias, residual, None, *rest)


def _inputs(layer: Layer) -> list[Tensor]:
    """Random inputs: one, or those that a prologue joins."""
    batch, channels, *sizes = layer.x_shape
    parts = [channels]
    if layer.prologue is not None:
        parts = [hint(part.meta["val"].shape[1]) for part in layer.prologue.parts]
    return [_random((batch, count, *sizes)) for count in parts]


def _onednn(layer: Layer, residual: Tensor | None) -> Callable[[Tensor], Any]:
    """Inductor's call: oneDNN's packed convolution with the epilogue as far as Inductor fuses it."""
    activation, w, bias = layer.epilogue.activation, layer.packed, layer.bias_value
    then = activation.in_place
    assert w is not None
    if not w.is_mkldnn:
        plain = torch.ops.aten.convolution.default
        moves: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)
        return lambda x: then(bypassing(plain, x, w, bias, *moves).add_(0.0 if residual is None else residual))
    moves = (layer.padding, layer.stride, layer.dilation, layer.groups)
    operators = torch.ops.mkldnn._convolution_pointwise
    if layer.output_padding is not None:
        operators, moves = (
            torch.ops.mkldnn._convolution_transpose_pointwise,
            (moves[0], layer.output_padding, *moves[1:]),
        )
    if residual is None:
        name = "swish" if activation is Activation.SILU else activation.function
        algorithm = "none" if activation == "gelu" else ""
        return lambda x: operators.default(x, w, bias, *moves, name, activation.parameters, algorithm)
    if activation.is_saved_by_output:
        last = "relu" if activation is Activation.RELU else None
        return lambda x: operators.binary(x, residual, w, bias, *moves, "add", 1.0, last, [], "")
    return lambda x: then(operators.binary(x, residual, w, bias, *moves, "add", 1.0, None, [], ""))


def _operator() -> Any:
    return torch.ops.polyconv_cpu.compiled_convolution.default


def _residual(layer: Layer) -> Tensor | None:
    return None if layer.epilogue.residual is None else _random(layer.problem.y_shape)


def _random(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(shape[0], *shape[2:], shape[1], generator=generator, dtype=torch.float32)
    return dense.permute(0, 3, 1, 2)


def _key(layer: Layer) -> str:
    parts = [f"compiled {problem_key(layer.problem, kept_weights=True)}"]
    if layer.packed is not None and not layer.packed.is_mkldnn:
        parts.append("against an unpacked weight")
    if layer.prologue is not None:
        parts.append(f"of {layer.prologue}")
    return ", ".join(parts)


def outcomes_here() -> Outcomes:
    """Outcomes for this processor and number of threads."""
    return Outcomes(Environment.of_cpu(native.instruction_set()))
