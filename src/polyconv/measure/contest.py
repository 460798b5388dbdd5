"""Measure, and choose: the candidates for one problem, timed in turn with PyTorch's convolution on the same numbers.

The core of ``polyconv tune``, which draws its numbers, and of :func:`polyconv.optimize`, which takes a model's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from .. import choices, reference, tf32
from ..backends import Backend
from ..choices import Decision
from ..cpu import aten
from ..problem import PaddingMode, Pass, Problem
from ..scale import largest
from ..standings import CONTENDERS
from ..tuning import Entry
from ..vouching import vouch
from .accuracy import measure_all, scale
from .operands import Operands, ours, pytorch
from .timing import Timing, Within, cuda_sample, current, interleaved, sample

TORCH = "PyTorch"
"""The candidate that is not ours."""
REPEATS = 7
PATIENCE = 4.0
"""Seconds after which a contest ends with the rounds that it has."""
WHOLE, SAMPLE = 2e8, 5e7
"""Multiply-adds that a comparison with float64 may take: of the whole result, or of a sample of it."""
AS_PYTORCH = 4.0
"""A result is exact enough, whatever the tolerance, if its error is at most so many times PyTorch's own: both round.
PyTorch's in float32, that is: being as wrong as TF32 is no excuse."""


class InexactError(RuntimeError):
    """No candidate is exact enough on the data that was given."""


class Timer(Protocol):
    """Times named calls. Tests have one that knows the times already."""

    def __call__(
        self, what: str, calls: Mapping[str, Callable[[], object]], within: Within
    ) -> Mapping[str, Timing]: ...


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times calls in turn on a device, by the clock; those that are far behind only until that is seen."""

    device: torch.device
    repeats: int = REPEATS
    patience: float = PATIENCE
    stays: Collection[str] = (TORCH,)
    """Who is timed to the end, because others are compared with it."""

    def __call__(self, what: str, calls: Mapping[str, Callable[[], object]], within: Within) -> Mapping[str, Timing]:
        timer = cuda_sample if self.device.type == "cuda" else sample
        with current(self.device):
            return interleaved(calls, self.repeats, timer, within=within, patience=self.patience, stays=self.stays)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a contest found."""

    decision: Decision
    """What was asked, and what would have run without the contest."""
    entry: Entry
    error: float
    """Of the choice: the largest deviation from float64, relative to the scale of its output map."""
    torch_error: float
    """PyTorch's, in the same unit, as it was timed."""

    @property
    def key(self) -> str:
        return self.decision.key

    @property
    def seconds(self) -> float:
        """One call of the choice."""
        return self.entry.seconds[self.entry.choice]


def decision_of(problem: Problem, operands: Operands, *, inference: bool) -> Decision:
    """What is decided when a pass runs on these tensors: with their strides and alignment, in training or not."""
    with choices.watched(alone=True) as seen, state(problem, inference=inference):
        ours(problem, _operands(problem, operands, inference=inference))()
    return next((one for one in seen if one.problem.kind is problem.kind), Decision(problem, inference, "", ""))


def contest(
    decision: Decision,
    operands: Operands,
    backend: Backend,
    timer: Timer,
    *,
    most: int = CONTENDERS,
    known: Mapping[str, float] | None = None,
) -> Outcome:
    """Time the candidates, and choose the fastest that is exact enough.

    ``known``: times that were measured before for the same problem (:func:`times_of`); then only the error is new.
    """
    seconds = dict(known or times_of(decision, operands, backend, timer, most=most))
    torch_seconds = seconds.pop(TORCH)
    problem, inference = decision.problem, decision.inference
    with state(problem, inference=inference):
        theirs = rounded = pytorch(problem, operands)().detach()
        if tf32.torchs_format(operands.x.device) != "float32":
            with tf32.switched_off():
                rounded = pytorch(problem, operands)().detach()
    # Of equal times one of polyconv's own: PyTorch's convolution runs where nothing is swapped.
    for name in sorted(seconds, key=lambda name: (seconds[name], name.endswith(aten.NAME))):
        with choices.Forced({decision.key: name}), state(problem, inference=inference):
            mine = ours(problem, _operands(problem, operands, inference=inference))().detach()
        error, torch_error, rounding = _errors(problem, operands, mine, theirs, rounded)
        if error <= max(problem.tolerance, AS_PYTORCH * rounding):
            return Outcome(decision, Entry(name, seconds, torch_seconds), error, torch_error)
    raise InexactError(
        f"no candidate for {problem} keeps the tolerance {problem.tolerance:g} on this data (the last one strayed by "
        f"{error:.1e}, PyTorch by {torch_error:.1e}): {', '.join(seconds)}"
    )


def times_of(
    decision: Decision, operands: Operands, backend: Backend, timer: Timer, *, most: int = CONTENDERS
) -> dict[str, float]:
    """Seconds of one call, by candidate and for PyTorch."""
    problem, inference = decision.problem, decision.inference
    names = backend.contenders(problem, inference=inference, most=most)
    # Weights of their own: what is prepared of a weight is kept for one candidate at a time.
    calls: dict[str, Callable[[], object]] = {
        name: ours(problem, _operands(problem, operands, inference=inference)) for name in names
    }
    within: dict[str, Callable[[], AbstractContextManager[object]]] = {}
    for name in names:
        forced = choices.Forced({decision.key: name})
        within[name] = lambda forced=forced: forced  # type: ignore[misc]
    calls[TORCH] = pytorch(problem, _operands(problem, operands, inference=inference))
    with state(problem, inference=inference):
        timings = timer(str(problem), calls, within)
    return {name: timing.best for name, timing in timings.items()}


def state(problem: Problem, *, inference: bool) -> AbstractContextManager[object]:
    """The mode in which a pass runs: gradients are recorded in a forward pass of training, and only there."""
    if problem.kind is Pass.FPROP:
        return torch.inference_mode() if inference else torch.enable_grad()
    return torch.no_grad()


def _operands(problem: Problem, operands: Operands, *, inference: bool) -> Operands:
    """The same, with a weight of its own; in a forward pass of training, one that wants a gradient."""
    if problem.kind is not Pass.FPROP:
        return operands
    with torch.inference_mode(False), torch.no_grad():
        w = torch.empty_strided(operands.w.shape, operands.w.stride(), dtype=operands.w.dtype, device=operands.w.device)
        w.copy_(operands.w)
    if problem.frozen:
        vouch(w)
    return replace(operands, w=w.requires_grad_(not inference))


# ---- the error


def _errors(problem: Problem, operands: Operands, *compared: Tensor) -> list[float]:
    """Of each result."""
    results = {str(place): result for place, result in enumerate(compared)}
    with torch.no_grad():
        if problem.padding_mode is PaddingMode.ZEROS or not any(problem.padding):
            found = {name: a.error for name, a in measure_all(problem, operands, results, **_LIMITS).items()}
        elif problem.kind is Pass.DGRAD:
            found = _bordered_gradient(problem, operands, results)
        else:  # the same convolution of the padded image, without padding
            x = reference.pad(problem, operands.x)
            inner = replace(
                problem, in_size=(x.shape[2], x.shape[3]), padding=(0, 0, 0, 0), padding_mode=PaddingMode.ZEROS
            )
            found = {
                name: a.error for name, a in measure_all(inner, replace(operands, x=x), results, **_LIMITS).items()
            }
    return [found[name] for name in results]


_LIMITS = {"whole": WHOLE, "sample": SAMPLE}


def _bordered_gradient(problem: Problem, operands: Operands, results: Mapping[str, Tensor]) -> dict[str, float]:
    """Where a border is made of the image, its gradient goes back to the pixels: the last image, as a whole."""
    assert operands.dy is not None
    one = replace(problem, batch=1)
    exact = reference.dgrad(one, operands.dy[-1:], operands.w, one.x_shape)
    unit = scale(problem, operands)[-1:]
    return {name: largest((result[-1:].double() - exact).abs(), unit) for name, result in results.items()}
