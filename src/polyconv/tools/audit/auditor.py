"""Driver of :func:`polyconv.audit`: run the model once with polyconv and measure each pass right after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ...dispatch.prepare import Ran, observed
from ...model.example_run import Example, Loss, preserved, refuse_lazy, run_model
from ...model.example_run import backward as run_backward
from ...model.explain import OF_TRANSPOSED
from ...model.replace import replace
from ...nn import Convolution
from ...problem import Pass, Problem
from ...util.console import Progress, progress
from .figures import Figures
from .passes import Limits, Measured, Remedy, measure
from .report import NAMES, Audit, Row


def audit(
    model: nn.Module,
    inputs: Example,
    *,
    limit: float | None = None,
    local_limit: float | None = None,
    backward: bool | None = None,
    loss: Loss | None = None,
    quiet: bool = False,
) -> Audit:
    """Measure the error of each convolution of a model against float64, on the given inputs.

    Examples::

        print(polyconv.audit(model, images))
        report = polyconv.audit(model, images, limit=1e-5, backward=True)
        report.apply()  # the tolerances that keep the limit

    The model runs once. Each pass of each convolution is compared with float64 on the same operands, as is PyTorch's
    float32 convolution. A torch module is audited as :func:`polyconv.replace` would make it. The model's classes,
    hooks, buffers, gradients and random generators are restored.

    Args:
        model: any module on a CPU or a CUDA device.
        inputs: arguments of the model: a tensor, a tuple of positional arguments, or a dict of named ones.
        limit: largest acceptable error, relative to the scale of its output map. For each pass that exceeds it, smaller
            tolerances are tried on the same operands, and the largest that keeps it is reported.
        local_limit: likewise for the error of each element relative to its neighbourhood, the terms that it sums.
        backward: whether to audit the gradients; by default those of a model in training mode.
        loss: from the output to the scalar whose gradient is computed; by default the sum of all outputs with random
            weights.
        quiet: show no progress on standard error.

    Raises:
        ValueError: if a limit is negative, a lazy module has seen no input yet, or there is nothing to audit.
    """
    limits = Limits(_checked("limit", limit), _checked("local_limit", local_limit))
    refuse_lazy(model, "audit it")
    wanted = model.training if backward is None else backward
    with ExitStack() as stack:
        left_alone = stack.enter_context(_replaced(model))
        convolutions = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, Convolution) and name not in left_alone
        }
        stack.enter_context(preserved(model, inputs))
        shown = stack.enter_context(progress(quiet=quiet))
        shown.expect(len(convolutions) * (len(Pass) if wanted else 1))
        inspector = _Inspector(limits, shown)
        stack.enter_context(inspector.following(model))
        stack.enter_context(observed(inspector.inspect))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(wanted or model.training))
        output = run_model(model, inputs)
        if wanted:
            run_backward(output, loss)
    if not inspector.measured:
        raise ValueError(
            "no convolution ran that polyconv could audit: the model has "
            f"{len(convolutions) + len(left_alone)} convolutions"
            + "".join(f"; {name or 'the model itself'}: {why}" for name, why in left_alone.items())
        )
    rows = tuple(_rows(inspector.measured, convolutions))
    ran = {row.layer for row in rows}
    idle = dict.fromkeys((name for name in convolutions if name not in ran), "it does not run on these inputs")
    return Audit(
        mode="forward and backward" if wanted else "training" if model.training else "inference",
        device=", ".join(inspector.devices),
        limits=limits,
        rows=rows,
        left_alone={**left_alone, **idle},
        _modules=convolutions,
    )


def _checked(name: str, limit: float | None) -> float | None:
    if limit is not None and not limit >= 0:
        raise ValueError(f"{name} is the largest error that is acceptable, a number from 0 up; got {limit!r}")
    return limit


@contextmanager
def _replaced(model: nn.Module) -> Iterator[dict[str, str]]:
    """Replace torch's convolutions inside a ``with`` block; yields those that cannot be replaced -> why."""
    classes = [(module, type(module)) for module in model.modules()]
    try:
        yield replace(model, policy="own").left_alone
    finally:
        for module, kind in classes:
            if type(module) is not kind:
                module.__class__ = kind


class _Inspector:
    """Measures every pass and attributes it to a layer."""

    def __init__(self, limits: Limits, shown: Progress) -> None:
        self.measured: dict[str, dict[Pass, list[Measured]]] = {}
        """Layer, in the order of first calls -> pass -> calls."""
        self.devices: dict[str, None] = {}
        self._limits = limits
        self._shown = shown
        self._callers: dict[Any, set[str]] = {}
        """Shapes and geometry, which all passes of a convolution share -> layers that used them in the forward pass."""
        self._here = _Here()
        self._lock = threading.Lock()
        """Held to change the tables above: autograd runs a thread per device."""

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Track the running module and, in the backward pass, the convolution whose output gradient came last."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                self._follow(name, module, stack)
            yield

    def _follow(self, name: str, module: nn.Module, stack: ExitStack) -> None:
        here = self._here

        def enter(*_: Any) -> None:
            here.running.append(name)

        def leave(_: Any, __: Any, output: Any) -> None:
            here.running.pop()
            if isinstance(module, Convolution) and isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(returning)

        def returning(_: Tensor) -> None:
            here.behind = name

        stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def inspect(self, ran: Ran) -> None:
        """Measure a pass that has just run; only its figures are kept."""
        measured = measure(ran, self._limits)
        with self._lock:
            name = self._name(ran.problem)
            self.measured.setdefault(name, {}).setdefault(ran.problem.kind, []).append(measured)
            self.devices[str(next(iter(ran.tensors.values())).device)] = None
        self._shown.step(f"measured {name}")

    def _name(self, problem: Problem) -> str:
        here = self._here
        common = (problem.x_shape, problem.w_shape, problem.stride, problem.padding, problem.dilation)
        callers = self._callers.setdefault(common, set())
        if here.running:
            callers.add(here.running[-1])
            return here.running[-1]
        if here.behind in callers or len(callers) != 1:
            return here.behind
        return next(iter(callers))  # a call outside of all modules, whose output has no hook


class _Here(threading.local):
    """State of the calling thread; autograd has its own threads."""

    def __init__(self) -> None:
        self.running: list[str] = []
        """Modules in their forward pass, the innermost last."""
        self.behind = ""
        """The convolution whose output gradient came last."""


def _rows(
    measured: Mapping[str, Mapping[Pass, list[Measured]]], convolutions: Mapping[str, Convolution]
) -> Iterator[Row]:
    for name, passes in measured.items():
        transposed = name in convolutions and convolutions[name].transposed
        for kind, word in (OF_TRANSPOSED if transposed else NAMES).items():
            if kind in passes:
                yield _row(name, word, passes[kind])


def _row(name: str, word: str, calls: list[Measured]) -> Row:
    """Row of several calls: the worst of their figures, with the plan of the call with the largest error."""
    worst = max(calls, key=lambda call: call.ours.error)
    ours = reduce(Figures.worst, (call.ours for call in calls))
    theirs = reduce(Figures.worst, (call.torch for call in calls))
    return Row(
        layer=name,
        kind=word,
        shape=worst.problem.in_brief,
        calls=len(calls),
        plan=worst.plan,
        tolerance=worst.problem.tolerance,
        predicted=worst.predicted,
        concentration=max(call.concentration for call in calls),
        error=ours.error,
        local_error=ours.local_error,
        torch_error=theirs.error,
        torch_local_error=theirs.local_error,
        remedy=min((call.remedy for call in calls if call.remedy is not None), key=_strictness, default=None),
    )


def _strictness(remedy: Remedy) -> float:
    """Sort key: a tolerance of None (no remedy) sorts before 0."""
    return -1.0 if remedy.tolerance is None else remedy.tolerance
