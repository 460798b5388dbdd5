"""1x1 layers in half precision by polyconv's kernels, in times of float32: ``python benchmarks/cpu/half_pixels.py``.

One thread; best processor time of calls in random order, with frozen weights. Columns, for the forward pass, the input
gradient and the weight gradient: polyconv's best kernel in float32 [us], the same again (A/A), bfloat16, float16. An
instruction set (``avx512``, ``avx2``, ``sse4``) limits the kernels, none of which has instructions that multiply half
precision.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from polyconv.cpu import native
from polyconv.cpu.planner import plan_cpu
from polyconv.cpu.weight_cache import TransformedWeights
from polyconv.problem import Pass, Problem
from polyconv.runtime.frozen_weights import mark_frozen
from polyconv.selection import Preference

LAYERS = [(64, 256), (256, 64), (128, 512), (512, 128)]
IMAGES = [(1, 56), (8, 56), (1, 28), (1, 14), (8, 14), (8, 7)]
FORMATS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}
KERNELS = "direct, pointwise", "direct, tile lanes", "direct, channel lanes"
SECONDS = 0.2


def calls(kind: Pass, sizes: tuple[int, ...], dtype: torch.dtype, form: str) -> list[Callable[[], object]]:
    """The pass by each of polyconv's direct kernels that takes it; in half precision by those of blocks of pixels, or,
    a weight gradient, by those that pack pixels."""
    images, channels, outputs, extent = sizes
    x, y = (torch.randn(images, c, extent, extent).to(dtype) for c in (channels, outputs))
    x, y = (t.contiguous(memory_format=FORMATS[form]) for t in (x, y))
    w = (torch.randn(outputs, channels, 1, 1) / channels**0.5).to(dtype)
    mark_frozen(w)
    layout = {"x_strides": x.stride(), "w_strides": w.stride(), "y_strides": y.stride()}
    problem = Problem.make(kind, x.shape, w.shape, dtype=str(dtype).removeprefix("torch."), **layout)
    found: list[Callable[[], object]] = []
    half = "direct in float32, channel lanes" if kind is Pass.WGRAD else KERNELS[0]
    for name in KERNELS if dtype == torch.float32 else (half,):
        plan = plan_cpu(replace(problem, frozen=True), inference=kind is Pass.FPROP, prefer=Preference(name))
        if plan.choice == name:
            run = plan.prepared(TransformedWeights() if plan.keeps_weights else None)
            found.append(partial(lambda run, tensors: run(dict(tensors)), run, {"x": x, "w": w, "dw": w, "y": y}))
    return found


def times(kind: Pass, sizes: tuple[int, ...], form: str) -> list[float]:
    """Of float32 twice, bfloat16 and float16 [s]."""
    wide = calls(kind, sizes, torch.float32, form)
    every = [
        *wide,
        *wide,
        *(one for dtype in (torch.bfloat16, torch.float16) for one in calls(kind, sizes, dtype, form)),
    ]
    best, end = [float("inf")] * len(every), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        for place in random.sample(range(len(every)), len(every)):  # each follows each: kernels share buffers
            began = time.thread_time()
            every[place]()
            best[place] = min(best[place], time.thread_time() - began)
    return [min(best[: len(wide)]), min(best[len(wide) : 2 * len(wide)]), *best[2 * len(wide) :]]


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:]:
        native.instruction_set(sys.argv[1])
    for form in FORMATS:
        for images, extent in IMAGES:
            for channels, outputs in LAYERS:
                line = f"{form:14}{images} x {channels:3} to {outputs:3} at {extent}x{extent}"
                for kind in Pass:
                    first, *others = times(kind, (images, channels, outputs, extent), form)
                    line += f" | {kind} {1e6 * first:6.0f}" + "".join(f" {one / first:5.2f}" for one in others)
                print(line, flush=True)


if __name__ == "__main__":
    main()
