"""Executed instructions of some layers in the emulated process, which the plugin ``count.c`` counts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace

import torch

from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu.engines import aten
from polyconv.measure.batch_limits import with_batch
from polyconv.measure.candidate_timing import decision_of
from polyconv.measure.operands import Operands, ours, pytorch
from polyconv.measure.workloads import find
from polyconv.problem import Pass
from polyconv.runtime.frozen_weights import mark_frozen

LAYERS = {"resnet50-3b": None, "mobilenet-dw3": None, "resnet50-1x1": None, "kb80": (128, 128)}
"""Names of workloads, and a smaller image where theirs takes long to emulate."""


def main() -> int:
    """Prints the instructions of warm calls in inference with a frozen weight, one image, one thread: the best of
    polyconv's own kernels by the cost model, and torch's convolution in both layouts."""
    torch.set_num_threads(1)
    backend = backend_for(torch.device("cpu"))
    for name, size in LAYERS.items():
        (workload,) = find(name)
        if size is not None:
            workload = replace(workload, input=(*workload.input[:2], *size))
        problem = replace(with_batch(workload, 1).problem(Pass.FPROP), frozen=True)
        operands = Operands.random(problem)
        mark_frozen(operands.w)
        decision = decision_of(problem, operands, inference=True)
        names = candidate_names(backend, decision.problem, inference=decision.inference)
        own = next(one for one in names if not one.endswith(aten.NAME))
        print(f"{name}: {problem}, {problem.multiplications:,} products", flush=True)
        with preferences.Forced({decision.key: own}), torch.inference_mode():
            _count(own, ours(problem, operands))
        with torch.inference_mode():
            _count("torch", pytorch(problem, operands))
            _count("torch, channels_last", pytorch(problem, operands.channels_last()))
    return 0


def _count(name: str, call: Callable[[], object]) -> None:
    call()
    print(f"  {name}", flush=True)
    _mark(0)
    call()
    _mark(1)


def _mark(number: int) -> None:
    """The system call that the plugin waits for. It fails, because there is no such user."""
    with contextlib.suppress(OSError):
        os.getpriority(os.PRIO_USER, number)
