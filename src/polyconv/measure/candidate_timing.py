"""Trials of one problem: candidates timed in turn with PyTorch's convolution on the same data, and the choice.

Used by ``polyconv tune`` on random data, and by :func:`polyconv.optimize` on a model's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ..autotune import preferences
from ..autotune.preferences import Decision
from ..autotune.tuning_file import Entry
from ..backend import Backend
from ..cpu.engines import aten
from ..problem import Pass, Problem, tolerance_text
from ..runtime.frozen_weights import mark_frozen
from ..selection import TRIALS
from ..util import tf32
from .accuracy import measure_all
from .operands import Operands, ours, pytorch
from .timing import Timing, Within, cuda_sample, current, interleaved, sample

TORCH = "PyTorch"
"""Name of PyTorch's convolution among the candidates."""
REPEATS = 7
PATIENCE = 4.0
"""Time [s] after which a trial ends with the rounds that it has."""
WHOLE, SAMPLE = 2e8, 5e7
"""Multiply-adds of a comparison with float64: of the whole result, or of a sample."""
AS_PYTORCH = 4.0
"""A result is accepted at any tolerance if its error is at most this multiple of PyTorch's in float32. PyTorch's TF32
error does not count."""


class InexactError(RuntimeError):
    """No candidate is accurate enough on the given data."""


class Timer(Protocol):
    """Times named calls. Tests substitute one with fixed times."""

    def __call__(
        self, what: str, calls: Mapping[str, Callable[[], object]], within: Within
    ) -> Mapping[str, Timing]: ...


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times calls in turn on a device; a candidate far behind drops out early."""

    device: torch.device
    repeats: int = REPEATS
    patience: float = PATIENCE
    stays: Collection[str] = (TORCH,)
    """Candidates that never drop out, because others are compared with them."""

    def __call__(self, what: str, calls: Mapping[str, Callable[[], object]], within: Within) -> Mapping[str, Timing]:
        timer = cuda_sample if self.device.type == "cuda" else sample
        with current(self.device):
            return interleaved(calls, self.repeats, timer, within=within, patience=self.patience, stays=self.stays)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the trials of one problem."""

    decision: Decision
    """The problem, and its choice before the trials."""
    entry: Entry
    error: float
    """Error of the choice: largest deviation from float64, relative to the scale of its output map."""
    torch_error: float
    """PyTorch's error in the same unit, in the timed precision."""

    @property
    def key(self) -> str:
        return self.decision.key

    @property
    def seconds(self) -> float:
        """Time of one call of the choice."""
        return self.entry.seconds[self.entry.choice]


def decision_of(problem: Problem, operands: Operands, *, inference: bool) -> Decision:
    """The decision for a pass on these tensors: with their strides and alignment, in training or inference."""
    with preferences.watched(alone=True) as seen, state(problem, inference=inference):
        ours(problem, _operands(problem, operands, inference=inference))()
    return next((one for one in seen if one.problem.kind is problem.kind), Decision(problem, inference, "", ""))


def contest(
    decision: Decision,
    operands: Operands,
    backend: Backend[Any],
    timer: Timer,
    *,
    most: int = TRIALS,
    known: Mapping[str, float] | None = None,
) -> Outcome:
    """Time the candidates, and choose the fastest that is accurate enough. ``known``: earlier times of the same problem
    (:func:`times_of`); then only the errors are measured."""
    seconds = dict(known or times_of(decision, operands, backend, timer, most=most))
    torch_seconds = seconds.pop(TORCH)
    problem, inference = decision.problem, decision.inference
    with state(problem, inference=inference):
        theirs = rounded = pytorch(problem, operands)().detach()
        if tf32.torchs_format(operands.x.device) != "float32":
            with tf32.switched_off():
                rounded = pytorch(problem, operands)().detach()
    # Ties go to polyconv's kernels: where PyTorch's convolution wins, no module is replaced.
    for name in sorted(seconds, key=lambda name: (seconds[name], name.endswith(aten.NAME))):
        with preferences.Forced({decision.key: name}), state(problem, inference=inference):
            mine = ours(problem, _operands(problem, operands, inference=inference))().detach()
        with torch.no_grad():
            found = measure_all(problem, operands, (mine, theirs, rounded), whole=WHOLE, sample=SAMPLE)
        error, torch_error, rounding = (one.error for one in found)
        # A negative tolerance stands for PyTorch's error, as measured here.
        if error <= max(problem.tolerance, AS_PYTORCH * (rounding if problem.tolerance >= 0 else torch_error)):
            return Outcome(decision, Entry(name, seconds, torch_seconds), error, torch_error)
    raise InexactError(
        f"no candidate for {problem} keeps the tolerance {tolerance_text(problem.tolerance)} on this data (the last "
        f"one strayed by {error:.1e}, PyTorch by {torch_error:.1e}): {', '.join(seconds)}"
    )


def times_of(
    decision: Decision, operands: Operands, backend: Backend[Any], timer: Timer, *, most: int = TRIALS
) -> dict[str, float]:
    """Time [s] of one call, by candidate, PyTorch included."""
    problem, inference = decision.problem, decision.inference
    names = backend.plan(problem, inference=inference).trials(most)
    # Each candidate has its own weight, since a weight is prepared for one candidate at a time.
    calls: dict[str, Callable[[], object]] = {
        name: ours(problem, _operands(problem, operands, inference=inference)) for name in names
    }
    within: dict[str, Callable[[], AbstractContextManager[object]]] = {}
    for name in names:
        forced = preferences.Forced({decision.key: name})
        within[name] = lambda forced=forced: forced  # type: ignore[misc]
    calls[TORCH] = pytorch(problem, _operands(problem, operands, inference=inference))
    with state(problem, inference=inference):
        timings = timer(str(problem), calls, within)
    return {name: timing.best for name, timing in timings.items()}


def state(problem: Problem, *, inference: bool) -> AbstractContextManager[object]:
    """The grad mode of a pass: gradients are recorded in a forward pass of training only."""
    if problem.kind is Pass.FPROP:
        return torch.inference_mode() if inference else torch.enable_grad()
    return torch.no_grad()


def _operands(problem: Problem, operands: Operands, *, inference: bool) -> Operands:
    """Operands with a copy of the weight; in a forward pass of training it requires a gradient."""
    if problem.kind is not Pass.FPROP:
        return operands
    with torch.inference_mode(False), torch.no_grad():
        w = torch.empty_strided(operands.w.shape, operands.w.stride(), dtype=operands.w.dtype, device=operands.w.device)
        w.copy_(operands.w)
    if problem.frozen:
        mark_frozen(w)
    return replace(operands, w=w.requires_grad_(not inference))
