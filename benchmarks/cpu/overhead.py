"""What polyconv costs where there is nothing to compute: ``python benchmarks/cpu/overhead.py``.

The time of ``polyconv.conv2d`` over that of ``torch.nn.functional.conv2d`` on a tensor of one element (with an epilogue
of ours, still over torch's convolution alone), and the time to import polyconv once torch is imported. Both are the
best of many short runs in turn, so that a busy machine shows as little as possible.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import polyconv

IMPORT = """
import time, torch
began = time.perf_counter()
import polyconv
print(time.perf_counter() - began)
"""


def best_us(candidates: list[Callable[[], object]], calls: int = 60, rounds: int = 400) -> list[float]:
    """Microseconds per call of each, the best of many rounds in turn."""
    timers = [timeit.Timer(candidate) for candidate in candidates]
    best = [float("inf")] * len(timers)
    for _ in range(rounds):
        for place, timer in enumerate(timers):
            best[place] = min(best[place], timer.timeit(calls) / calls * 1e6)
    return best


def call_overhead() -> dict[str, dict[str, float]]:
    """Mode -> microseconds of torch's call, of ours, and the difference."""
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


def import_ms(processes: int = 9) -> float:
    """Milliseconds to import polyconv after torch: the best of several processes, with bytecode as pip leaves it."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def once() -> float:
        command = [sys.executable, "-c", IMPORT]
        return float(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)

    return min(once() for _ in range(processes)) * 1e3


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    calls, cold = call_overhead(), import_ms()
    if arguments.json:
        print(json.dumps({"calls": calls, "import_ms": cold}, indent=2))
    else:
        for name, row in calls.items():
            print(f"{name:22} torch {row['torch_us']:6.1f} us  ours {row['ours_us']:6.1f}  over {row['over_us']:6.1f}")
        print(f"import polyconv after torch: {cold:.0f} ms")
