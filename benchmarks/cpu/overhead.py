"""What polyconv costs where there is nothing to compute: ``python benchmarks/cpu/overhead.py``.

The time of ``polyconv.conv2d`` over that of ``torch.nn.functional.conv2d`` on a tensor of one element (with an epilogue
of ours, still over torch's convolution alone); that of ``polyconv.Conv2d`` over ``torch.nn.Conv2d`` where PyTorch's
kernel is the plan of every pass; that of ``torch.nn.Conv2d`` with ``polyconv.enable()`` likewise; and the processor
time to import polyconv once torch is imported, and that of the first call of a process, PyTorch's beside it. All are
the best of many short runs in turn, so that a busy machine shows as little as possible; ``torch.nn.Conv2d`` against
another one like it shows how much it still shows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import polyconv
from polyconv.autotune import preferences
from polyconv.backend import backend_for, candidate_names
from polyconv.cpu.engines import aten
from polyconv.model.explain import problems_of
from polyconv.tuning_key import problem_key

IMPORT = """
import time, torch
began = time.process_time()
import polyconv
print(time.process_time() - began)
"""

FIRST_CALL = """
import time, torch, polyconv
torch.set_num_threads(1)
conv, x = {}.Conv2d(64, 64, 3, padding=1), torch.randn(1, 64, 56, 56)
with torch.no_grad():
    began = time.process_time()
    conv(x)
    print(time.process_time() - began)
"""


Best = Callable[[list[Callable[[], object]]], list[float]]
"""Microseconds per call of each."""


def best_us(candidates: list[Callable[[], object]], calls: int = 60, rounds: int = 400) -> list[float]:
    """Microseconds per call of each, the best of many rounds in turn."""
    timers = [timeit.Timer(candidate) for candidate in candidates]
    best = [float("inf")] * len(timers)
    for _ in range(rounds):
        for place, timer in enumerate(timers):
            best[place] = min(best[place], timer.timeit(calls) / calls * 1e6)
    return best


def best_cold_us(candidates: list[Callable[[], object]], rounds: int = 400) -> list[float]:
    """Likewise with cold caches: filled with other data between any two calls, as by other layers of a network.

    The lower quartile, because no two calls are alike.
    """
    others = torch.zeros(2**21)
    times: list[list[float]] = [[] for _ in candidates]
    for turn in range(rounds):
        for place in sorted(range(len(candidates)), key=lambda place: (place + turn) % len(candidates)):
            others.add_(1.0)
            began = time.perf_counter()
            candidates[place]()
            times[place].append((time.perf_counter() - began) * 1e6)
    return [sorted(each)[rounds // 4] for each in times]


def call_overhead() -> dict[str, dict[str, float]]:
    """Mode -> microseconds of torch's call, of polyconv's, and the difference."""
    x, w = torch.randn(1, 1, 1, 1), torch.randn(1, 1, 1, 1)
    trained, residual = w.clone().requires_grad_(), torch.randn(1, 1, 1, 1)
    relu: dict[str, Any] = {"activation": "relu"}
    modes: dict[str, tuple[Callable[[], AbstractContextManager[object]], torch.Tensor, bool, dict[str, Any]]] = {
        "plain tensors": (torch.enable_grad, w, False, {}),
        "no_grad": (torch.no_grad, w, False, {}),
        "inference_mode": (torch.inference_mode, w, False, {}),
        "relu": (torch.no_grad, w, False, relu),
        "residual and relu": (torch.no_grad, w, False, {**relu, "residual": residual}),
        "weight requires grad": (torch.enable_grad, trained, False, {}),
        "the same with relu": (torch.enable_grad, trained, False, relu),
        "forward and backward": (torch.enable_grad, trained, True, {}),
    }

    def call(conv2d: Callable[..., torch.Tensor], weight: torch.Tensor, backward: bool, **options: Any) -> None:
        y = conv2d(x, weight, **options)
        if backward:
            y.backward()

    found: dict[str, dict[str, float]] = {}
    for name, (mode, weight, backward, epilogue) in modes.items():
        with mode():
            torchs = partial(call, F.conv2d, weight, backward)
            theirs, ours = best_us([torchs, partial(call, polyconv.conv2d, weight, backward, **epilogue)])
        found[name] = {"torch_us": theirs, "ours_us": ours, "over_us": ours - theirs}
    return found


def module_overhead() -> dict[str, dict[str, float]]:
    """Likewise for modules with ATen as the plan of every pass."""
    x = torch.randn(1, 16, 1, 1)
    theirs, twin, ours = torch.nn.Conv2d(16, 4, 1), torch.nn.Conv2d(16, 4, 1), polyconv.Conv2d(16, 4, 1)
    trained_x = x.clone().requires_grad_()
    found: dict[str, dict[str, float]] = {}

    def forward(module: torch.nn.Module) -> torch.Tensor:
        y: torch.Tensor = module(x)
        return y

    def forward_and_backward(module: torch.nn.Module) -> None:
        module(trained_x).sum().backward()

    modes: dict[str, tuple[Callable[[], AbstractContextManager[object]], Callable[[torch.nn.Module], object], Best]] = {
        "module, inference": (torch.inference_mode, forward, best_us),
        "module, cold caches": (torch.inference_mode, forward, best_cold_us),
        "module, training": (torch.enable_grad, forward, best_us),
        "module, with backward": (torch.enable_grad, forward_and_backward, best_us),
    }
    for name, (mode, run, best) in modes.items():
        with mode(), _pytorchs_kernel(ours, x):
            times = best([partial(run, module) for module in (theirs, twin, ours)])
        found[name] = {"torch_us": times[0], "again_us": times[1], "ours_us": times[2], "over_us": times[2] - times[0]}
    return found


def enabled_overhead() -> dict[str, dict[str, float]]:
    """Likewise for a module of torch's with and without ``polyconv.enable()``."""
    x, module = torch.randn(1, 16, 1, 1), torch.nn.Conv2d(16, 4, 1)
    modes: dict[str, tuple[Callable[[], AbstractContextManager[object]], Callable[[], object]]] = {
        "enabled, inference": (torch.inference_mode, lambda: module(x)),
        "enabled, with backward": (torch.enable_grad, lambda: module(x).sum().backward()),
    }
    found: dict[str, dict[str, float]] = {}
    for name, (mode, run) in modes.items():
        off = on = float("inf")
        with mode(), _pytorchs_kernel(polyconv.Conv2d(16, 4, 1), x):
            for _ in range(10):
                off = min(off, *best_us([run], rounds=20))
                with polyconv.enable():
                    on = min(on, *best_us([run], rounds=20))
        found[name] = {"torch_us": off, "ours_us": on, "over_us": on - off}
    return found


def _pytorchs_kernel(module: torch.nn.Module, x: torch.Tensor) -> preferences.Forced:
    """Make ATen the plan of every pass of a module, in inference and in training."""
    backend = backend_for(x.device)
    return preferences.Forced(
        {
            problem_key(problem, kept_weights=kept): name
            for problem in problems_of(module, x)
            for kept in (False, True)
            for name in candidate_names(backend, problem, inference=kept)
            if name.endswith(aten.NAME)
        }
    )


def fresh_ms(program: str, processes: int = 9) -> float:
    """Milliseconds printed by a program: the best of several processes, with bytecode as pip leaves it."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def once() -> float:
        command = [sys.executable, "-c", program]
        return float(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)

    return min(once() for _ in range(processes)) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calls, cold = {**call_overhead(), **module_overhead(), **enabled_overhead()}, fresh_ms(IMPORT)
    first = {name: fresh_ms(FIRST_CALL.format(name)) for name in ("torch.nn", "polyconv")}
    if arguments.json:
        print(json.dumps({"calls": calls, "import_ms": cold, "first_call_ms": first}, indent=2))
    else:
        for name, row in calls.items():
            again = f"  torch again {row['again_us']:6.1f}" if "again_us" in row else ""
            times = f"torch {row['torch_us']:6.1f} us  ours {row['ours_us']:6.1f}  over {row['over_us']:6.1f}"
            print(f"{name:22} {times}{again}")
        print(f"import polyconv after torch: {cold:.0f} ms of processor time")
        print(f"first call: torch {first['torch.nn']:.0f} ms of processor time, ours {first['polyconv']:.0f}")
