"""Planning time of a new problem: ``python benchmarks/planning.py``.

All workloads and passes, for every known GPU and two described processors, and the 68 problems of a ResNet-50 training
step. A problem is new if it differs in any way from those planned before, so each is planned several times, with
slightly different tolerances. Processor time is measured, and the best counts, so that a busy machine shows as little
as possible. Data independent of the problem (such as the exact algebra of a scheme) is cached by then: the first
problems of a process pay for it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from statistics import median

from polyconv.cpu.device import CpuDevice
from polyconv.cpu.planner import plan_cpu
from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.measure.workloads import find
from polyconv.problem import Pass, Problem

CPUS = {"AVX-512": CpuDevice("avx512", cores=16), "AVX2": CpuDevice("avx2", cores=8)}
LIMITS_MS = {"CUDA": (5.0, 25.0), "CPU": (2.0, None), "ResNet-50": (None, 400.0)}
"""Limits of the median and the worst (for ResNet-50: of the sum)."""

_different = count(1)


def workloads() -> Iterator[tuple[str, Problem]]:
    """Every pass of every workload."""
    for workload in find("all"):
        for kind in Pass:
            yield f"{workload.id} {kind}", workload.problem(kind)


def resnet50(batch: int) -> Iterator[Problem]:
    """The passes of its 23 different convolutions; the image needs no gradient."""
    layers = [(3, 64, 7, 2, 224)]
    channels, size = 64, 56
    for stage in range(4):
        width, stride = 64 * 2**stage, 1 if stage == 0 else 2
        layers += [
            (channels, width, 1, 1, size),
            (width, width, 3, stride, size),
            (channels, 4 * width, 1, stride, size),
        ]
        channels, size = 4 * width, size // stride
        layers += [(width, channels, 1, 1, size), (channels, width, 1, 1, size), (width, width, 3, 1, size)]
    for c, k, taps, stride, size in dict.fromkeys(layers):
        pad = taps // 2
        for kind in Pass:
            if c > 3 or kind is not Pass.DGRAD:
                yield Problem.make(
                    kind, (batch, c, size, size), (k, c, taps, taps), stride=(stride, stride), padding=(pad,) * 4
                )


def new(problem: Problem) -> Problem:
    """The problem as if never planned."""
    return replace(problem, tolerance=problem.tolerance * (1 + 1e-9 * next(_different)))


def planning_ms(plan: Callable[[Problem], object], problem: Problem, repeat: int) -> float:
    """Milliseconds to plan it as a new problem: the best of several."""
    best = float("inf")
    for _ in range(repeat):
        fresh = new(problem)
        began = time.process_time()
        plan(fresh)
        best = min(best, time.process_time() - began)
    return best * 1e3


def measure(repeat: int) -> dict[str, dict[str, object]]:
    """By planner: number of problems, the median, and the worst with its problem."""
    planners: dict[str, dict[str, Callable[[Problem], object]]] = {
        "CUDA": {name: lambda problem, device=device: plan_cuda(problem, device) for name, device in DEVICES.items()},
        "CPU": {name: lambda problem, device=device: plan_cpu(problem, device) for name, device in CPUS.items()},
    }
    found: dict[str, dict[str, object]] = {}
    for planner, plans in planners.items():
        for _, problem in workloads():
            next(iter(plans.values()))(problem)
        times = {
            f"{workload} on {device}": planning_ms(plan, problem, repeat)
            for device, plan in plans.items()
            for workload, problem in workloads()
        }
        worst = max(times, key=lambda name: times[name])
        figures = {"median_ms": median(times.values()), "worst_ms": times[worst]}
        found[planner] = {"problems": len(times), **figures, "worst": worst}
    problems = list(resnet50(32))
    together = sum(planning_ms(planners["CUDA"]["v100"], problem, repeat) for problem in problems)
    found["ResNet-50"] = {"problems": len(problems), "together_ms": together}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What planning a new problem costs.")
    parser.add_argument("--repeat", type=int, default=5, help="times that each problem is planned (5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = measure(arguments.repeat)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    for planner in ("CUDA", "CPU"):
        row, (most, worst) = found[planner], LIMITS_MS[planner]
        print(
            f"{planner}: {row['problems']} problems, median {row['median_ms']:.2f} ms (at most {most}), "
            f"worst {row['worst_ms']:.2f} ms" + (f" (at most {worst})" if worst else "") + f": {row['worst']}"
        )
    row = found["ResNet-50"]
    print(
        f"ResNet-50: {row['problems']} problems, {row['together_ms']:.0f} ms (at most {LIMITS_MS['ResNet-50'][1]:.0f})"
    )


if __name__ == "__main__":
    main()
