"""The cost model's bounds against counted ones: every Conv2d workload, three passes.

    python benchmarks/gpu/check_cost_model.py                                    # all workloads on a V100
    python benchmarks/gpu/check_cost_model.py W1,models                          # these
    python benchmarks/gpu/check_cost_model.py W1 a100 bfloat16 channels_last     # on a GPU, in a dtype and layout
    POLYCONV_TOLERANCE=torch python benchmarks/gpu/check_cost_model.py W1 a100   # float32 at TF32's accuracy

Predicted: instructions and bytes per block, tile and step (profiles.json) times what the launches say they do. Counted:
sampled blocks of the full-size launches, executed as machine code. Both are sums over the launches of a plan of the
time that the scarcest resource needs; traffic that stays in the L2 counts as DRAM's on both sides. Exit code 1 if any
differs by more than 15 % on a V100, 25 % on others. In half precision the last figure is the time of the
multiplications at the tensor cores' peak, over the counted time.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

from polyconv import settings
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.cuda.planner.cost import bound_us, cold
from polyconv.measure import workloads
from polyconv.problem import HALF_DTYPES, Pass
from polyconv.tools.inspect.emulated_cost import count_plan, emulator

TOLERANCE = {"v100": 0.15}
OTHERS = 0.25
"""On GPUs for which only half-precision kernels were counted again: other profiles are those of sm_70."""


def main(names: str = "all12,models", gpu_name: str = "v100", dtype: str = "float32", layout: str = "") -> int:
    device = DEVICES[gpu_name]
    gpu = emulator()
    assert gpu is not None, "counted figures need the emulator: in a source checkout, pip install -e tools/gpu_emulator"
    cache = KernelCache()
    wrong = []
    compared, tolerance = 0, TOLERANCE.get(gpu_name, OTHERS)
    for workload in workloads.find(names):
        for kind in Pass:
            problem = replace(workload.problem(kind), dtype=dtype, tolerance=settings.current().tolerance)
            problem = problem.channels_last() if layout == "channels_last" else problem
            plan = plan_cuda(problem, device)
            specs = list(dict.fromkeys(plan.kernels))
            cubins = dict(zip(specs, cache.get_many(specs, device.arch), strict=True))
            counted = count_plan(gpu, plan, cubins, device)
            predicted_ms = sum(bound_us(cold(launch), device) for launch in plan.launches) / 1e3
            counted_ms = sum(one.bound_ms for one in counted)
            off = predicted_ms / counted_ms - 1
            compared += 1
            if abs(off) > tolerance:
                wrong.append((workload.name, str(kind)))
            kernels = ", ".join(
                f"{symbol} x{n}" for symbol, n in Counter(one.kernel.symbol for one in plan.launches).items()
            )
            if dtype in HALF_DTYPES:
                rate = device.products_per_clock(dtype) * device.sms * device.clock_mhz
                kernels += f", {problem.multiplications / rate / 1e3 / counted_ms:.0%}"
            print(
                f"{workload.name:20} {kind!s:6} predicted {predicted_ms:9.4f} ms  counted {counted_ms:9.4f} ms "
                f"{off:+7.1%}  {kernels}",
                flush=True,
            )
    print(f"{compared} problems compared, {len(wrong)} differ by more than {tolerance:.0%}: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
