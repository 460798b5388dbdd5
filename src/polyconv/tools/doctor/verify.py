"""Verification of one plan: every element, bitwise determinism, out-of-bounds writes, uninitialised reads."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cuda.planner.plan import Plan
from ...numerics.scale import largest, scales
from ...problem import DEFAULT_TOLERANCE
from .check import Answer, fine, wrong
from .device_under_test import Subject
from .quick.correctness import operands, strides
from .redzones import LARGE_BYTE, NAN_BYTE, Fenced, FencedBackend


def prove(subject: Subject, plan: Plan, *, shift: int = 0) -> Answer:
    """Run a plan twice (if quick, once) on NaN-filled memory, then once on memory filled with large numbers.

    Every element is compared with float64 on the CPU. All runs must be bitwise identical, leave inputs unchanged, and
    stay within the red zones around tensors and workspace.

    Args:
        subject: GPU under test.
        plan: plan to run, regardless of the planner's choice.
        shift: offset of the tensors' addresses from their usual alignment [bytes].
    """
    problem = plan.problem
    given, exact = operands(problem)
    every, lie = {**given, **exact}, strides(problem)
    each, dtype = problem.element_bytes, getattr(torch, problem.dtype)
    fences = {name: Fenced(each * _extent(value, lie[name]), subject.device, shift) for name, value in every.items()}
    tensors = {name: fence.tensor(every[name].shape, lie[name], dtype) for name, fence in fences.items()}
    for name, value in given.items():
        tensors[name].copy_(value)
    backend = subject.backend(planner=lambda *_: plan)
    run = backend.prepare(plan)
    found: list[dict[str, Tensor]] = []
    for byte in (NAN_BYTE, LARGE_BYTE) if subject.quick else (NAN_BYTE, NAN_BYTE, LARGE_BYTE):
        for name in exact:
            fences[name].fill(byte)
        backend.filled_with = byte
        run(tensors)
        subject.wait()
        if trouble := _trespasses(fences, backend) or _changed(given, tensors):
            return wrong(trouble)
        found.append({name: tensors[name].cpu().clone() for name in exact})
    if trouble := _not_written(found[0]) or _differences(found):
        return wrong(trouble)
    unit = scales(problem, given)
    error = max(largest((found[0][name].double() - want).abs(), unit[name]) for name, want in exact.items())
    allowed = max(problem.tolerance or DEFAULT_TOLERANCE, plan.expected_error)
    if error > allowed:
        return wrong(f"error {error:.1e}, allowed {allowed:.0e}", error=error, allowed=allowed)
    return fine(error=error, expected=plan.expected_error)


def _extent(value: Tensor, strides: tuple[int, ...]) -> int:
    """Elements spanned, from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True))


def _trespasses(fences: dict[str, Fenced], backend: FencedBackend) -> str:
    scratch, backend.scratch = backend.scratch, []
    around = [*fences.items(), *(("the scratch memory", fence) for fence in scratch)]
    found = {name: where for name, fence in around if (where := fence.trespasses())}
    return "; ".join(f"a kernel wrote outside {name}: {where}" for name, where in found.items())


def _changed(given: dict[str, Tensor], tensors: dict[str, Tensor]) -> str:
    found = [name for name, value in given.items() if not torch.equal(tensors[name].cpu(), value)]
    return f"the run changed its input {', '.join(found)}" if found else ""


def _not_written(found: dict[str, Tensor]) -> str:
    for name, value in found.items():
        if count := int(value.isnan().sum()):
            return f"{count} elements of {name} are no numbers: not written, or made of memory that nobody wrote to"
    return ""


def _differences(found: list[dict[str, Tensor]]) -> str:
    """Bitwise differences between runs; the last run started from a different memory fill."""
    for place, other in enumerate(found[1:], 1):
        for name, value in found[0].items():
            bits = torch.int32 if value.element_size() == 4 else torch.int16
            count = int((value.view(bits) != other[name].view(bits)).sum())
            if count and place == len(found) - 1:
                return f"{count} elements of {name} depend on what was in the memory before"
            if count:
                return f"{count} elements of {name} differ between two runs"
    return ""
