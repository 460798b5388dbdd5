"""Executed instructions of some layers in the emulated process, which the plugin ``count.c`` counts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu.engines import aten
from polyconv.measure.batch_limits import with_batch
from polyconv.measure.candidate_timing import decision_of
from polyconv.measure.operands import Operands, ours, pytorch
from polyconv.measure.workloads import find
from polyconv.problem import Pass, Problem
from polyconv.runtime.frozen_weights import mark_frozen

LAYERS = ("resnet50-1x1", "mobilenet-dw3", "resnet50-3b", "W1")


def main(layers: Sequence[str] = LAYERS) -> int:
    """Prints the instructions of warm calls in inference with a frozen weight, one image, one thread, in both layouts:
    of torch's convolution, and of polyconv's own kernel that is best by the cost model."""
    torch.set_num_threads(1)
    for name in layers:
        (workload,) = find(name)
        problem = replace(with_batch(workload, 1).problem(Pass.FPROP), frozen=True)
        print(f"{name}: {problem}, {problem.multiplications:,} products", flush=True)
        operands = Operands.random(problem)
        for layout, tensors in (("NCHW", operands), ("channels_last", operands.channels_last())):
            with torch.inference_mode():
                _count(f"{layout}, torch", pytorch(problem, tensors))
            _count_own(layout, problem, tensors)
    return 0


def _count_own(layout: str, problem: Problem, operands: Operands) -> None:
    backend = backend_for(torch.device("cpu"))
    mark_frozen(operands.w)
    decision = decision_of(problem, operands, inference=True)
    names = candidate_names(backend, decision.problem, inference=decision.inference)
    own = next(one for one in names if not one.endswith(aten.NAME))
    with preferences.Forced({decision.key: own}), torch.inference_mode():
        _count(f"{layout}, {own}; the planner chooses {decision.choice}", ours(problem, operands))


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
