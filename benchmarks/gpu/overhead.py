"""Processor time of a call on a GPU: ``python benchmarks/gpu/overhead.py``.

With the tests' fake driver, whose launches do nothing, on CPU tensors: memory comes from the CPU's allocator, and all
else is production code. The floor is torch's dispatcher: ``torch.nn.functional.conv2d`` on a tensor of one element.
Beside each call is the same with launches made one by one from Python, as in a build without the native part. Times are
processor times, the best of many short runs, so that a busy machine shows as little as possible.

Limits: 12 us over the floor for a call of two launches, 60 us for the 79 launches of W1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import polyconv
from polyconv.backend import override
from polyconv.cuda import launch
from polyconv.cuda.backend import CudaBackend
from polyconv.measure.workloads import find

sys.path += [str(Path(__file__).resolve().parents[2] / folder) for folder in ("tests", "tools")]
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu, record_only

LARGEST = 2**16
"""Largest allocation [bytes]: beyond it the CPU's allocator, unlike a GPU's, requests pages from the system."""

Mode = Callable[[], AbstractContextManager[object]]


class HostBackend(CudaBackend):
    """The CUDA backend on CPU tensors that are never read."""

    def __init__(self) -> None:
        super().__init__(stream=lambda: 0)

    def allocate(self, size: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(min(size, LARGEST))


def best_us(candidates: list[Callable[[], object]], calls: int, rounds: int) -> list[float]:
    """Microseconds per call of each, the best of many rounds in turn."""
    timers = [timeit.Timer(candidate, timer=time.thread_time) for candidate in candidates]
    best = [float("inf")] * len(timers)
    for _ in range(rounds):
        for place, timer in enumerate(timers):
            best[place] = min(best[place], timer.timeit(calls) / calls * 1e6)
    return best


def calls_of() -> dict[str, tuple[Mode, Callable[[], Tensor]]]:
    """Name -> mode and call."""
    x, w, residual = torch.randn(1, 8, 6, 6), torch.randn(8, 8, 1, 1), torch.randn(1, 8, 6, 6)
    trained, frozen = w.clone().requires_grad_(), polyconv.Conv2d(8, 8, 1, bias=False)
    polyconv.freeze(frozen)
    w1 = find("W1")[0].problem("fprop")
    large, filters = torch.empty(w1.x_shape), torch.empty(w1.w_shape)
    geometry: dict[str, Any] = {"stride": w1.stride, "padding": w1.padding[::2], "dilation": w1.dilation}
    return {
        "two launches": (torch.no_grad, lambda: polyconv.conv2d(x, w)),
        "residual and relu": (torch.no_grad, lambda: polyconv.conv2d(x, w, residual=residual, activation="relu")),
        "a frozen module": (torch.no_grad, lambda: frozen(x)),
        "weight requires grad": (torch.enable_grad, lambda: polyconv.conv2d(x, trained)),
        "W1": (torch.no_grad, lambda: polyconv.conv2d(large, filters, **geometry)),
    }


def measure() -> dict[str, dict[str, float]]:
    """In a process with the fake driver: name -> result."""
    torch.set_num_threads(1)
    one = torch.randn(1, 1, 1, 1)
    one_by_one = patch.object(launch, "why_absent", lambda: "left out for comparison")
    found: dict[str, dict[str, float]] = {}
    for name, (mode, call) in calls_of().items():
        row = found[name] = {}
        for way, built in (("one_by_one_us", one_by_one), ("ours_us", nullcontext())):
            with built, override("cpu", HostBackend()), mode():
                call()
                with VirtualGpu(record_only) as gpu:
                    call()
                row["launches"] = len(gpu.launches)
                times = (100, 200) if len(gpu.launches) < 10 else (5, 200)
                row["floor_us"], row[way] = best_us([lambda: F.conv2d(one, one), call], *times)
        row["over_us"] = row["ours_us"] - row["floor_us"]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    measured = run_in_virtual_gpu(measure, timeout=600)
    if arguments.json:
        print(json.dumps(measured, indent=2))
    else:
        for name, row in measured.items():
            times = f"floor {row['floor_us']:5.1f} us  ours {row['ours_us']:6.1f}  over {row['over_us']:6.1f}"
            print(f"{name:21}{row['launches']:3} launches  {times}  one by one {row['one_by_one_us']:6.1f}")
