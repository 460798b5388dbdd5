"""Patch embeddings (the stride is the kernel) on an A100: the plan's least time, counted, over the bound.

    python benchmarks/gpu/patches.py
    python benchmarks/gpu/patches.py "8192 patches"   # layers whose name has this

Counted: sampled blocks of every launch, executed as machine code, at the scarcest resource. The copy of patches that
PyTorch runs beside them is modelled, by its bytes. The bound is the memory's time (each tensor once) or that of the
multiplications at the peak of the format, whichever is longer: tensor cores in bfloat16, FP32 units in float32 unless
it may have TF32's error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import prod

from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import DEVICES, Plan
from polyconv.cuda.planner.volumes import BESIDE_EFFICIENCY, CudaVolumePlan, planned
from polyconv.lowering.lower import lower
from polyconv.lowering.reshape import Patches
from polyconv.problem import TORCH_TOLERANCE, Pass, Problem
from polyconv.tools.inspect.emulated_cost import count_plan, emulator

A100 = DEVICES["a100"]
LAYERS = {
    "ViT-B/16, 64 images": ((64, 3, 224, 224), (768, 3, 16, 16)),
    "ViT-H/14, 64 images": ((64, 3, 224, 224), (1280, 3, 14, 14)),
    "2x14x14, 4 videos of 32x448x448": ((4, 3, 32, 448, 448), (1280, 3, 2, 14, 14)),
    "2x14x14, 8192 patches": ((8192, 3, 2, 14, 14), (1280, 3, 2, 14, 14)),
}


def problems() -> Iterator[tuple[str, Problem]]:
    for name, (x, w) in LAYERS.items():
        for dtype in ("bfloat16", "float32"):
            for kind in Pass:
                problem = Problem.make(kind, x, w, stride=w[2:], dtype=dtype)
                yield name, problem
                if len(x) == 4 and dtype == "bfloat16":
                    yield f"{name}, channels_last", problem.channels_last()


def bound_ms(problem: Problem) -> float:
    moved = problem.element_bytes * sum(prod(shape) for shape in (problem.x_shape, problem.w_shape, problem.y_shape))
    half = problem.dtype != "float32" or problem.tolerance == TORCH_TOLERANCE
    rate = (A100.products_per_clock("float16") if half else A100.fp32_per_clock) * A100.sms * A100.clock_mhz
    return max(moved / A100.dram_gbs / 1e6, problem.multiplications / rate / 1e3)


def counted_ms(plan: Plan | CudaVolumePlan) -> float:
    """Least time of all launches."""
    gpu, cache, found = emulator(), KernelCache(), 0.0
    assert gpu is not None, "counted figures need the emulator: in a source checkout, pip install -e tools/gpu_emulator"
    for part in (plan,) if isinstance(plan, Plan) else plan.plans.values():
        times = 1 if isinstance(plan, Plan) else plan.times(part.problem)
        cubins = {kernel: cache.get(kernel, A100.arch) for kernel in part.kernels}
        found += times * sum(one.bound_ms for one in count_plan(gpu, part, cubins, A100))
    return found


def main(word: str = "") -> None:
    print(f"{'':48} {'pass':6} {'bound':>9} {'kernels':>9} {'copy':>9}  over the bound")
    for name, problem in problems():
        if word not in f"{name}, {problem.dtype}":
            continue
        lowering, copied, bound = lower(problem, "cuda"), 0.0, bound_ms(problem)
        if isinstance(lowering, Patches):
            copied, _ = lowering.extra_traffic
            (problem,) = lowering.problems
        elif lowering is not None:
            print(f"{name:42} {problem.kind!s:6} {lowering.in_words()}")
            continue
        plan = planned(problem, A100)
        found, copy = counted_ms(plan), copied / (BESIDE_EFFICIENCY * A100.dram_gbs * 1e6)
        figures = f"{bound:9.4f} {found:9.4f} {copy:9.4f}  {(found + copy) / bound:.2f}"
        print(f"{f'{name}, {problem.dtype}':48} {problem.kind!s:6} {figures}  {plan.name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
