"""Driver of :func:`polyconv.optimize`: record, measure, select, time the whole model, report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ...autotune import preferences, tuning_file
from ...backend import backend_for
from ...measure.candidate_timing import PATIENCE, InexactError, Stopwatch, Timer
from ...measure.timing import Timing
from ...model.example_run import Example, Loss, preserved
from ...model.replace import why_not_replace
from ...nn import OURS, TORCHS, Convolution
from ...runtime.frozen_weights import mark_frozen, unmark_frozen
from ...selection import TRIALS
from ...util import tf32
from ...util.console import Progress, progress
from ...util.cpuinfo import cpu_limit
from ...util.sharded_params import is_dtensor, is_gathered
from .budget import SECONDS, Budget
from .comparison import why_different
from .gains import Gains, Measurements, agreed_word, gains_of
from .measurement import TORCH, Measurement, Measurer
from .recording import Layer, Recording, record, runner
from .report import OptimizationReport, Row
from .swapping import Fold, Fusion, Swap, Torchs

MARGIN = 0.03
"""Share of PyTorch's time that a swap must save, because of measurement noise."""

LARGE = 0.15
"""Share of a large saving; the model is also timed with these swaps only, if there are smaller ones."""

BEFORE, AGAIN = "before", "before, again"
"""The original model, timed twice in each round to estimate the measurement noise."""

M = TypeVar("M", bound=nn.Module)


def optimize(
    model: M,
    example_inputs: Example,
    *,
    loss: Loss | None = None,
    margin: float = MARGIN,
    candidates: int = TRIALS,
    seconds: float = SECONDS,
    fuse: bool = True,
    tuning_file: str | PathLike[str] | None = None,
    quiet: bool = False,
    timer: Timer | None = None,
) -> tuple[M, OptimizationReport]:
    """Replace a model's convolutions by polyconv's, in place, where they are faster; returns the model and a report.

    Examples::

        model, report = polyconv.optimize(model.eval(), torch.randn(8, 3, 224, 224))
        print(report)
        report.undo()

    A model in evaluation mode is timed in inference, one in training mode forward and backward. Buffers, gradients and
    random generators are restored afterwards.

    An activation module (``nn.ReLU``, ``nn.GELU``) is fused into the convolution before it, and becomes an
    ``nn.Identity``, if the example run proves that nothing else reads the tensor in between
    (:mod:`polyconv.tools.optimize.fusion_trace`). In evaluation, so is a batch normalisation with running statistics;
    parameters and buffers stay as they are, and writes to them take effect. The example should therefore take every
    path that the model will take. In the other mode, training or evaluation, the fusion is suspended.

    Nothing is swapped if outputs, or in training gradients, deviate by more than the predicted errors explain, or if
    the gain is within the measurement noise, which is estimated by timing the original model twice. The report gives
    the reason.

    In evaluation mode the weights of swapped convolutions are frozen, as by :func:`polyconv.freeze`: call
    :func:`polyconv.unfreeze` before writing to them, or to the bias or normalisation of a layer with a folded
    normalisation, behind their version counters. ``report.undo()`` unfreezes them.

    Args:
        model: any module on a CPU or a CUDA device. Convolutions in float32 are considered.
        example_inputs: arguments of the model: a tensor, a tuple of positional arguments, or a dict of named ones.
            Their shapes, strides and values should resemble those of real use.
        loss: in training, from the output to the scalar whose gradient is computed; by default the sum of all outputs
            with random weights.
        margin: share of PyTorch's time that a swap must save.
        candidates: number of plans to time per problem, in the cost model's order.
        seconds: approximate time limit of the measurements [s], divided among the convolutions by their share of the
            model's time. Convolutions for which no time is left are not swapped, and the report says so.
        fuse: fuse activations and batch normalisations into the convolutions before them.
        tuning_file: tuning file to merge the measurements into, for other processes.
        quiet: show no progress on standard error.
        timer: replacement for the clock that times the calls.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    stopwatch = Stopwatch(device, stays=(TORCH, BEFORE, AGAIN))

    def timer_within(patience: float) -> Timer:
        return timer or replace(stopwatch, patience=min(PATIENCE, patience))

    convolutions, left_alone = _convolutions(model)
    weights = [] if model.training else [convolution.weight for convolution in convolutions.values()]
    with preserved(model, example_inputs), _frozen(weights), progress(quiet=quiet) as shown:
        recording = record(model, convolutions, example_inputs, loss)
        budget = Budget(recording, seconds)
        shown.expect(sum(len(layer.calls) for layer in recording.layers) + 1)
        fusable = _fusable(recording) if fuse else []
        not_fused = _not_fused(recording) if fuse else {}
        measurer = Measurer(timer_within, training=model.training, candidates=candidates)
        measurements, unmeasured = _measure(recording, budget, fusable, measurer, shown)
        left_alone.update(unmeasured)
        fusable = [fusion for fusion in fusable if {layer.module for layer in measurements} >= set(fusion.convolutions)]
        proposals = _proposals(measurements, fusable, margin)
        run = runner(model, example_inputs, loss)
        before, again, after = _time_whole(timer_within(budget.for_model()), proposals, run, training=model.training)
        spread = _spread(before, again)
        kept = _decide(proposals, before, after, spread)
        different = "" if kept is None else _why_different(kept, model, example_inputs, loss, measurements)
        if different:
            kept = None
        shown.step("timed the model")
    if tuning_file is not None:  # first: if the file cannot be written, the model stays unchanged
        _save(Path(tuning_file), device, measurements)
    undo = _nothing if kept is None else _keep(kept, device, freeze=not model.training)
    return model, OptimizationReport(
        mode="training" if model.training else "inference",
        device=str(device),
        rows=tuple(_rows(measurements, proposals[0].gains, kept, different)),
        left_alone={**left_alone, **dict.fromkeys(recording.idle, "it does not run on these inputs")},
        not_fused=not_fused,
        before=before,
        after=before if kept is None else after[kept.name],
        spread=spread,
        verdict=_verdict(before, after, kept, spread, different) if measurements else "there was nothing to compare",
        choices={} if kept is None else kept.choices,
        torch_computes_in=tf32.torchs_format(device),
        too_many_threads=cpu_limit().too_many(torch.get_num_threads()) if device.type == "cpu" else "",
        _undo=undo,
    )


@dataclass(frozen=True)
class _Proposal:
    """A set of swaps to time in the whole model."""

    name: str
    gains: Gains
    swap: Swap
    choices: Mapping[str, str]


def _proposals(measurements: Measurements, fusable: Sequence[Fusion], margin: float) -> list[_Proposal]:
    """All swaps that save ``margin`` and, if fewer, those that save :data:`LARGE`.

    A layer timed alone keeps its weights in the caches, so a small gain may vanish in the model.
    """
    found: dict[tuple[Layer, ...], _Proposal] = {}
    for name, least in (("after", margin), ("after, large gains only", max(margin, LARGE))):
        gains = gains_of(measurements, fusable, least)
        chosen = {
            key: choice
            for layer in gains.swapped
            for measurement in measurements[layer]
            for key, choice in measurement.choices.items()
        }
        alone = [layer for layer in gains.swapped if layer.fold.norm is not None and layer.module not in gains.fused]
        folds = [Fusion(None, (layer.module,), (), (layer.fold,)) for layer in alone]
        swap = Swap([layer.module for layer in gains.swapped], (*gains.fusions, *folds))
        found.setdefault(gains.swapped, _Proposal(name, gains, swap, chosen))
    return list(found.values())


def _fusable(recording: Recording) -> list[Fusion]:
    """The proved fusions with activations. Layers learn of the normalisation to be folded into them."""
    flow = recording.flow
    for layer in recording.layers:
        if (norm := flow.norm(layer.module)) is not None:
            layer.fold = Fold(norm, flow.name(norm))
    folds = {layer.module: layer.fold for layer in recording.layers}
    found = []
    for activation, convolutions, modules in flow.groups():
        theirs = tuple(folds[conv] for conv in convolutions)  # type: ignore[index]
        is_any = any(fold.norm is not None for fold in theirs)
        found.append(Fusion(activation, convolutions, modules, theirs if is_any else ()))
    return found


def _convolutions(model: nn.Module) -> tuple[dict[str, Torchs], dict[str, str]]:
    """The convolutions to consider, by name and each once; and the reasons against the others."""
    found: dict[str, Torchs] = {}
    left_alone: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, TORCHS):
            reason = _why_not(module)
            if reason is None:
                found[name] = module
            else:
                left_alone[name] = reason
    return found, left_alone


def _why_not(module: Torchs) -> str | None:
    if isinstance(module, Convolution):
        return "it is polyconv's already; polyconv.restore(model) lets it be compared"
    if isinstance(module, LazyModuleMixin):
        return "it is lazy and has seen no input yet: call the model once"
    if is_gathered(module) or is_dtensor(module.weight):
        spread = "its weight is spread over ranks, and no rank can time it alone; polyconv.replace can take it"
        return why_not_replace(module) or spread
    if type(module) not in OURS:
        return why_not_replace(module) or "it is parametrised or of a subclass, which polyconv.replace can keep"
    if not isinstance(module.weight, nn.Parameter):
        return "its weight is made anew before each call (weight_norm, pruning), which polyconv.replace can keep"
    dtype = module.weight.dtype
    return None if dtype == torch.float32 else f"its weight is {dtype}; polyconv's kernels compute in float32"


def _measure(
    recording: Recording, budget: Budget, fusable: Sequence[Fusion], measurer: Measurer, shown: Progress
) -> tuple[dict[Layer, list[Measurement]], dict[str, str]]:
    """Measure each layer on each of its inputs; also returns why layers were not measured."""
    follows = {conv: fusion for fusion in fusable for conv in fusion.convolutions}
    measurements: dict[Layer, list[Measurement]] = {}
    unmeasured: dict[str, str] = {}
    for layer in budget.in_order:
        why_not = agreed_word(f"measure {layer.name}", budget.why_not(layer))
        if why_not:
            unmeasured[layer.name] = why_not
            continue
        fusion = follows.get(layer.module)
        activation, kind = (fusion.modules[0], fusion.activation) if fusion is not None else (None, None)
        try:
            measurements[layer] = [
                measurer.measure(layer, call, activation, kind, budget.for_call(call)) for call in layer.calls.values()
            ]
        except InexactError as error:
            unmeasured[layer.name] = str(error)
        for _ in layer.calls:
            shown.step(f"timed {layer.name}")
    return {layer: measurements[layer] for layer in recording.layers if layer in measurements}, unmeasured


def _time_whole(
    timer: Timer, proposals: Sequence[_Proposal], run: Callable[[], object], *, training: bool
) -> tuple[Timing, Timing, Mapping[str, Timing]]:
    """Interleaved timings of the original model, twice, and of the model with each non-empty proposal."""
    calls: dict[str, Callable[[], object]] = {BEFORE: run, AGAIN: run}
    within: dict[str, Callable[[], AbstractContextManager[object]]] = dict.fromkeys(calls, nullcontext)
    for proposal in proposals:
        if proposal.swap.convolutions:
            calls[proposal.name] = run
            within[proposal.name] = partial(_swapped, proposal.swap, preferences.Forced(proposal.choices))
    with torch.enable_grad() if training else torch.inference_mode():
        timings = dict(timer("the model", calls, within))
    return timings.pop(BEFORE), timings.pop(AGAIN), timings


def _spread(before: Timing, again: Timing) -> float:
    """Relative difference between two timings of one model: in best times or in medians, whichever is larger."""
    return max(
        abs(one - other) / min(one, other) for one, other in ((before.best, again.best), (before.median, again.median))
    )


@contextmanager
def _swapped(swap: Swap, forced: preferences.Forced) -> Iterator[None]:
    with forced, swap:
        yield


def _decide(
    proposals: Sequence[_Proposal], before: Timing, after: Mapping[str, Timing], spread: float
) -> _Proposal | None:
    """The fastest proposal, identical on all ranks; None if no gain exceeds the measurement noise ``spread``."""
    faster = [
        name for name, timing in after.items() if timing.median < before.median and _gain(before, timing) > spread
    ]
    best = min(faster, key=lambda name: after[name].best, default=BEFORE)
    best = agreed_word(f"keep {[sorted(proposal.choices) for proposal in proposals]}", best)
    return next((proposal for proposal in proposals if proposal.name == best), None)


def _gain(before: Timing, after: Timing) -> float:
    """Speed-up minus 1; negative if the model became slower."""
    return before.best / after.best - 1


def _why_different(
    kept: _Proposal, model: nn.Module, example: Example, loss: Loss | None, measurements: Measurements
) -> str:
    """Deviation of the results with a proposal, identical on all ranks; empty if within the prediction."""
    errors: dict[nn.Module, float] = {
        layer.module: max(measurement.predicted_error for measurement in measurements[layer])
        for layer in kept.gains.swapped
    }
    changed = _swapped(kept.swap, preferences.Forced(kept.choices))
    return agreed_word(f"results {sorted(kept.choices)}", why_different(model, example, loss, changed, errors))


def _not_fused(recording: Recording) -> dict[str, str]:
    """Convolutions that ran but cannot be fused with an activation -> why."""
    found = {layer.name: recording.flow.why_not(layer.module) for layer in recording.layers}
    return {name: why for name, why in found.items() if why}


def _verdict(before: Timing, after: Mapping[str, Timing], kept: _Proposal | None, spread: float, different: str) -> str:
    if not after:
        return "no convolution is faster in polyconv"
    if different:
        return f"with the swaps {different}, so all of them were undone"
    if kept is not None:
        return f"{before.best / after[kept.name].best:.2f} times as fast"
    best = min(after.values(), key=lambda timing: timing.best)
    if 0 < _gain(before, best) <= spread:
        return (
            f"the machine was too noisy to judge: with the swaps it is {_gain(before, best):.1%} faster, but the same "
            f"model differed by {spread:.1%} from itself, so all of them were undone"
        )
    return f"with the swaps it takes {best.best * 1e3:.4g} ms, so all of them were undone"


@contextmanager
def _frozen(weights: Iterable[Tensor]) -> Iterator[None]:
    """Mark weights as frozen for a block, so that inference is measured as it will run."""
    news = [weight for weight in weights if mark_frozen(weight)]
    try:
        yield
    finally:
        for weight in news:
            unmark_frozen(weight)


def _keep(kept: _Proposal, device: torch.device, *, freeze: bool) -> Callable[[], None]:
    """Apply a proposal; returns a function that undoes it."""
    measured = preferences.remember(backend_for(device).environment(), kept.choices)
    kept.swap.apply()
    frozen = [conv.weight for conv in kept.swap.convolutions if freeze and mark_frozen(conv.weight)]

    def undo() -> None:
        if kept.swap.applied:
            kept.swap.undo()
            for fusion in kept.swap.fusions:
                fusion.forget()
            preferences.forget(measured)
            for weight in frozen:
                unmark_frozen(weight)

    return undo


def _nothing() -> None:
    """Undo of an unchanged model."""


def _save(path: Path, device: torch.device, measurements: Measurements) -> None:
    entries = {
        key: entry
        for measured in measurements.values()
        for measurement in measured
        for key, entry in measurement.entries.items()
    }
    tuning_file.update(path, tuning_file.Tuning.of(backend_for(device).environment(), entries))


def _rows(measurements: Measurements, alone: Gains, kept: _Proposal | None, different: str) -> Iterator[Row]:
    """Report rows. ``alone``: gains of layers timed one by one; ``different``: why all swaps were undone, if so."""
    gains = alone if kept is None else kept.gains
    for layer, measured in measurements.items():
        swapped = kept is not None and layer in gains.swapped
        undone = layer in alone.swapped and not swapped
        why = gains.reasons[layer]
        if undone:
            why = f"faster, but {different}" if different else "faster alone, but not in the whole model"
        for call, measurement in zip(layer.calls.values(), measured, strict=True):
            yield _row(layer, call.count, measurement, swapped, layer.module in gains.fused, why)


def _row(layer: Layer, calls: int, measurement: Measurement, swapped: bool, fused: bool, why: str) -> Row:
    ours = measurement.fused_seconds if fused and measurement.fused_seconds is not None else measurement.seconds
    return Row(
        layer=layer.name,
        shape=measurement.shape,
        calls=calls,
        plan=measurement.plan,
        before=measurement.torch_seconds,
        after=ours if swapped else measurement.torch_seconds,
        ours=ours,
        error=measurement.error,
        torch_error=measurement.torch_error,
        same_kernel=measurement.same_kernel,
        swapped=swapped,
        why=why,
    )
