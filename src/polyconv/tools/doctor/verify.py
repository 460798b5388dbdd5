"""Verification of one plan: every element, bitwise determinism, out-of-bounds writes, uninitialised reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...autotune import preferences
from ...backend import Backend
from ...cuda.planner.plan import Plan
from ...numerics import reference
from ...numerics.scale import largest, scales
from ...problem import DEFAULT_TOLERANCE, Pass, Problem
from .check import Result, failed, judged
from .device_under_test import DeviceUnderTest, GpuUnderTest
from .redzones import LARGE_BYTE, NAN_BYTE, RedzoneBackend, Redzoned

FLOAT64_ERROR = 1e-12
"""Allowed error in float64."""
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def verify_plan(subject: GpuUnderTest, plan: Plan, *, shift: int = 0) -> Result:
    """Verify a plan on a GPU, regardless of the planner's choice."""
    backend = subject.backend(planner=lambda *_: plan)
    found = verify(subject, plan.problem, backend, expected=plan.expected_error, shift=shift)
    return replace(found, figures={**found.figures, "plan": plan.algorithm, "expected": plan.expected_error})


def verify(
    subject: DeviceUnderTest, problem: Problem, backend: Backend[Any], *, expected: float = 0.0, shift: int = 0
) -> Result:
    """Run a problem twice (if quick, once) on NaN-filled memory, then once on memory filled with large numbers.

    Every element is compared with float64 on the CPU. All runs must be bitwise identical, leave inputs unchanged, and
    stay within the red zones around tensors and workspace.

    Args:
        subject: device under test.
        problem: pass to run.
        backend: what runs it.
        expected: predicted error, which is allowed even if it exceeds the problem's tolerance.
        shift: offset of the tensors' addresses from their usual alignment [bytes].
    """
    given, exact = operands(problem)
    every, layout = {**given, **exact}, strides(problem)
    each, dtype = problem.element_bytes, getattr(torch, problem.dtype)
    zones = {
        name: Redzoned(each * _extent(value, layout[name]), subject.device, shift) for name, value in every.items()
    }
    tensors = {name: zone.tensor(every[name].shape, layout[name], dtype) for name, zone in zones.items()}
    for name, value in given.items():
        tensors[name].copy_(value)
    run = backend.prepare(preferences.plan(backend, problem))
    found: list[dict[str, Tensor]] = []
    for byte in (NAN_BYTE, LARGE_BYTE) if subject.quick else (NAN_BYTE, NAN_BYTE, LARGE_BYTE):
        for name in exact:
            zones[name].fill(byte)
        if isinstance(backend, RedzoneBackend):
            backend.filled_with = byte
        held = dict(tensors)  # a run may replace an output by a tensor of its own
        run(held)
        subject.wait()
        if trouble := _trespasses(zones, backend) or _changed(given, tensors):
            return failed(trouble)
        found.append({name: held[name].cpu().clone() for name in exact})
    if trouble := _not_written(found[0]) or _differences(found):
        return failed(trouble)
    unit = scales(problem, given)
    error = max(largest((found[0][name].double() - want).abs(), unit[name]) for name, want in exact.items())
    allowed = FLOAT64_ERROR if problem.dtype == "float64" else problem.tolerance or DEFAULT_TOLERANCE
    return judged(error, max(allowed, expected))


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


def _extent(value: Tensor, strides: tuple[int, ...]) -> int:
    """Elements spanned, from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True))


def _trespasses(zones: dict[str, Redzoned], backend: Backend[Any]) -> str:
    around = list(zones.items())
    if isinstance(backend, RedzoneBackend):
        around += [("the scratch memory", zone) for zone in backend.scratch]
        backend.scratch = []
    found = {name: where for name, zone in around if (where := zone.trespasses())}
    return "; ".join(f"a kernel wrote outside {name}: {where}" for name, where in found.items())


def _changed(given: dict[str, Tensor], tensors: dict[str, Tensor]) -> str:
    found = [name for name, value in given.items() if not torch.equal(tensors[name].cpu(), value)]
    return f"the run changed its input {', '.join(found)}" if found else ""


def _not_written(found: dict[str, Tensor]) -> str:
    for name, value in found.items():
        if count := int(value.isnan().sum()):
            return f"{count} elements of {name} are NaN: not written, or computed from uninitialised memory"
    return ""


def _differences(found: list[dict[str, Tensor]]) -> str:
    """Bitwise differences between runs; the last run started from a different memory fill."""
    for place, other in enumerate(found[1:], 1):
        for name, value in found[0].items():
            bits = BITS[value.element_size()]
            count = int((value.view(bits) != other[name].view(bits)).sum())
            if count and place == len(found) - 1:
                return f"{count} elements of {name} depend on the memory's contents before the run"
            if count:
                return f"{count} elements of {name} differ between two runs"
    return ""
