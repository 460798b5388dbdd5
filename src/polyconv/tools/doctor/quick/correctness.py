"""Correctness of the kernels on small convolutions, compared in every element with float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .... import settings
from ....backend import Backend, backend_for
from ....cpu.planner import plan_cpu
from ....cuda.planner.device import CudaDevice
from ....cuda.planner.plan import KernelSpec, Plan
from ....cuda.planner.planner import FAMILIES, family_name, plan_within
from ....numerics import reference
from ....numerics.scale import largest, scales
from ....problem import DEFAULT_TOLERANCE, Pass, Problem
from ....selection import PlanError
from ..kernel_coverage import problems

FLOAT64 = 1e-12
"""Allowed error in float64."""

Planner = Callable[[Problem, CudaDevice], Plan]


@dataclass(frozen=True, slots=True)
class Trial:
    """One problem on one kernel family."""

    case: str
    problem: Problem
    family: str
    plan: str
    backend: Callable[[], Backend[Any]]
    kernels: tuple[KernelSpec, ...] = ()
    """CUDA kernels that it needs compiled."""


@dataclass(frozen=True, slots=True)
class Outcome:
    case: str
    family: str
    plan: str
    error: float
    """Largest deviation of an element, relative to the scale of its output map."""
    allowed: float
    failure: str = ""
    """Reason why there is no result to compare; empty if there is one."""

    @property
    def ok(self) -> bool:
        return not self.failure and self.error <= self.allowed

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error if self.error < inf else None, "ok": self.ok}

    def __str__(self) -> str:
        what = self.failure or f"error {self.error:.1e}, allowed {self.allowed:.0e}"
        return f"{self.case}, {self.family} ({self.plan}): {what}"


# ---- trials


def cuda_trials(device: CudaDevice, backend: Callable[[Planner], Backend[Any]]) -> Iterator[Trial]:
    """Every case on every CUDA kernel family that accepts it.

    Args:
        device: GPU to plan for.
        backend: factory of a backend that uses the given planner.
    """
    for name, problem in problems().items():
        for family in FAMILIES:
            planner = partial(_plan_within, family)
            try:
                plan = planner(problem, device)
            except PlanError:
                continue  # not supported by the family, or not within the tolerance
            yield Trial(name, problem, family_name(family), plan.algorithm, partial(backend, planner), plan.kernels)


LARGER_ON_CPU = 4
"""Factor on height and width on the CPU, where the planner prefers PyTorch's kernels for smaller images."""


def cpu_trials() -> Iterator[Trial]:
    """Every case on the CPU planner's choice: default tolerance, tolerance 0 (direct summation only), float64."""
    for name, problem in problems(LARGER_ON_CPU).items():
        for asked in (problem, replace(problem, tolerance=0.0), replace(problem, dtype="float64")):
            plan = plan_cpu(asked)
            yield Trial(name, asked, plan.chosen.engine, plan.name, lambda: backend_for(torch.device("cpu")))


def _plan_within(family: ModuleType, problem: Problem, device: CudaDevice) -> Plan:
    return plan_within((family,), problem, device, settings.current().workspace_bytes)


# ---- execution


def attempt(trial: Trial, device: torch.device) -> Outcome:
    """Run a trial on a device. Errors become part of the outcome, never an exception."""
    allowed = FLOAT64 if trial.problem.dtype == "float64" else trial.problem.tolerance or DEFAULT_TOLERANCE
    outcome = partial(Outcome, trial.case, trial.family, trial.plan, allowed=allowed)
    try:
        tensors, exact = _tensors(trial.problem, device)
        before = {name: tensor.clone() for name, tensor in tensors.items() if name not in exact}
        backend = trial.backend()
        backend.prepare(backend.plan(trial.problem))(tensors)
        changed = [name for name, tensor in before.items() if not torch.equal(tensor, tensors[name])]
        if changed:
            return outcome(error=inf, failure=f"the run changed its input {', '.join(changed)}")
        unit = scales(trial.problem, tensors)
        deviations = {name: (tensors[name].cpu().double() - want).abs() for name, want in exact.items()}
        return outcome(error=max(largest(off, unit[name].cpu()) for name, off in deviations.items()))
    except Exception as error:  # raised by the driver, the compiler or a kernel: goes into the report
        return outcome(error=inf, failure=f"{type(error).__name__}: {error}")


def run(trials: Sequence[Trial], device: torch.device, step: Callable[[str], None]) -> list[Outcome]:
    outcomes = []
    for trial in trials:
        outcomes.append(attempt(trial, device))
        step(f"{trial.case}: {trial.family}")
    return outcomes


def _tensors(problem: Problem, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of a problem by name, outputs filled with NaN; and the exact outputs, in float64 on the CPU."""
    given, exact = operands(problem)
    dtype, lie = getattr(torch, problem.dtype), strides(problem)

    def placed(name: str, value: Tensor) -> Tensor:
        empty = torch.empty_strided(value.shape, lie[name], dtype=dtype, device=device)
        return empty.copy_(value) if name in given else empty.fill_(torch.nan)

    return {name: placed(name, value) for name, value in {**given, **exact}.items()}, exact


def operands(problem: Problem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random inputs of a problem, and its exact outputs in float64, both by name and on the CPU."""
    dtype: torch.dtype = getattr(torch, problem.dtype)
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=dtype)

    x, w, y = draw(*problem.x_shape), draw(*problem.w_shape), draw(*problem.y_shape)
    bias = draw(problem.out_channels) if problem.bias else None
    if problem.kind is Pass.FPROP:
        residual = draw(*problem.y_shape) if problem.residual else None
        exact = {"y": reference.with_epilogue(problem, x, w, bias, residual, str(problem.activation))}
        optional = {"bias": bias, "residual": residual}
        return {"x": x, "w": w, **{name: value for name, value in optional.items() if value is not None}}, exact
    if problem.kind is Pass.DGRAD:
        return {"y": y, "w": w}, {"x": reference.dgrad(problem, y, w, problem.x_shape)}
    dw, db = reference.wgrad(problem, x, y, problem.w_shape)
    return {"x": x, "y": y}, {"dw": dw, **({"db": db} if problem.bias else {})}


def strides(problem: Problem) -> dict[str, tuple[int, ...]]:
    x, y, w = problem.x_strides, problem.y_strides, problem.w_strides
    return {"x": x, "y": y, "residual": y, "w": w, "dw": w, "bias": (1,), "db": (1,)}
