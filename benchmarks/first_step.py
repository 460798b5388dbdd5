"""Cost of the first training step of ResNet-50 on a cold GPU: ``python benchmarks/first_step.py``.

From the model to kernels ready to load, as in ``polyconv.warmup``: the passes of a step at batch 32 are found without
data, planned for a known GPU, and their kernels compiled into an empty cache by one pool. No GPU is needed. Each figure
is of a fresh process, and the best of several counts, so that a busy machine shows as little as possible; processor
time is given, too.

One thread compiles a kernel, so the pool takes at least as long as the longest one. Times for other numbers of cores
follow from those of the single kernels, assigned to free workers in the order of the pool.
"""

from __future__ import annotations

import argparse
import heapq
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import polyconv
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.compile import compile_kernel, compiler_id, cores
from polyconv.cuda.planner import DEVICES, KernelSpec, plan_cuda
from polyconv.model.dry_run import dry_run
from polyconv.util.cpuinfo import processor_name

BATCH = 32
LIMIT = 0.4
"""Limit of planning [s]."""
OTHER_CORES = (4, 8, 16, 64)


class Bottleneck(nn.Module):
    """Three convolutions with a skip connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *normalised(channels, width, 1),
            nn.ReLU(),
            *normalised(width, width, 3, stride),
            nn.ReLU(),
            *normalised(width, out, 1),
        )
        changes = stride != 1 or channels != out
        self.shortcut = nn.Sequential(*normalised(channels, out, 1, stride)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def normalised(channels: int, out: int, taps: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, out, taps, stride, taps // 2, bias=False), nn.BatchNorm2d(out)


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [*normalised(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, 64 * 2**stage, 2 if stage and block == 0 else 1))
            channels = 256 * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Stopwatch:
    """Wall and processor seconds of this process between two readings."""

    def __init__(self) -> None:
        self._clock, self._processors = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> dict[str, float]:
        clock, processors = time.perf_counter(), time.process_time()
        found = {f"{name}_s": clock - self._clock, f"{name}_processor_s": processors - self._processors}
        self._clock, self._processors = clock, processors
        return found


def measure(device: str) -> dict[str, Any]:
    """One cold start, in this process."""
    gpu = DEVICES[device]
    with torch.device("meta"):
        model = resnet50()
    polyconv.replace(model)
    watch = Stopwatch()
    found = dry_run(model, [(BATCH, 3, 224, 224)], backward=True)
    problems = [one.problem for asked in found.values() for one in asked]
    figures: dict[str, Any] = {"problems": len(problems), **watch.lap("finding")}
    plans = [plan_cuda(problem, gpu) for problem in problems]
    figures |= watch.lap("planning")
    specs = list(dict.fromkeys(kernel for plan in plans for kernel in plan.kernels))
    compiler_id()  # starts the compiler: a fixed cost, not the kernels'
    figures |= watch.lap("starting_compiler")
    single: dict[str, float] = {}
    guard = threading.Lock()

    def compiler(spec: KernelSpec, arch: str) -> bytes:
        began = time.thread_time()
        code = compile_kernel(spec, arch)
        with guard:
            single[spec.symbol] = time.thread_time() - began
        return code

    with tempfile.TemporaryDirectory() as folder:
        cache = KernelCache(folder, compiler=compiler)
        cache.get_many(specs, gpu.arch)
    figures |= watch.lap("compiling")
    assert cache.compilations.take().kernels == len(specs)
    return {**figures, "kernels": single}  # in order of completion


def best_of(device: str, repeat: int) -> dict[str, Any]:
    """The least of each figure over several processes."""
    command = [sys.executable, __file__, "--once", "--device", device]
    runs = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(repeat)
    ]
    kernels = {name: min(run["kernels"][name] for run in runs) for name in runs[0]["kernels"]}
    least = {name: min(run[name] for run in runs) for name in runs[0] if name != "kernels"}
    return {
        "processor": processor_name(),
        "cores": cores(),
        "compiler": compiler_id(),
        "device": device,
        **least,
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1])),
    }


def makespan(seconds: Iterable[float], workers: int) -> float:
    """Time of a pool whose free workers take the next kernel."""
    busy = [0.0] * workers
    for one in seconds:
        heapq.heappush(busy, heapq.heappop(busy) + one)
    return max(busy)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the first training step of ResNet-50 costs a GPU.")
    parser.add_argument("--device", choices=DEVICES, default="v100", help="the GPU to plan and compile for (v100)")
    parser.add_argument("--repeat", type=int, default=3, help="processes, of which the best counts (3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--once", action="store_true", help="measure once, in this process, and print JSON")
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(measure(arguments.device)))
        return
    found = best_of(arguments.device, arguments.repeat)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    kernels = found["kernels"]
    longest = next(iter(kernels))

    def took(name: str) -> str:
        return f"{found[f'{name}_s']:.2f} s ({found[f'{name}_processor_s']:.2f} s of processors)"

    on = f"{found['processor']}, {found['cores']} cores, NVRTC {found['compiler']}"
    print(f"ResNet-50, a training step at batch {BATCH}, for {arguments.device}; {on}")
    print(f"finding {found['problems']} problems: {took('finding')}")
    print(f"planning them: {took('planning')}; at most {LIMIT} s")
    print(f"compiling {len(kernels)} kernels in one pool: {took('compiling')}")
    print(f"the longest of them: {longest}, {kernels[longest]:.2f} s of a processor")
    others = ", ".join(f"{makespan(kernels.values(), count):.1f} s on {count}" for count in OTHER_CORES)
    print(f"reckoned from the single kernels: {others} cores")


if __name__ == "__main__":
    main()
