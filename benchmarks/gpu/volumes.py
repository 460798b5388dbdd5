"""Volumes on an A100: the kernels with three axes, and the lowering that ran before.

    python benchmarks/gpu/volumes.py        # bfloat16 in channels_last_3d
    python benchmarks/gpu/volumes.py U-Net  # layers whose name has this
    POLYCONV_TOLERANCE=torch python benchmarks/gpu/volumes.py "" float32  # contiguous, at TF32's accuracy

Counted and bound as in patches.py. Copies and additions that PyTorch runs beside the kernels are modelled, by bytes.
The last figure of a line is the modelled time with launches.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from patches import A100, bound_ms, counted_ms

from polyconv import settings
from polyconv.cuda.planner.volumes import CudaVolumePlan, beside_us, plan_volume
from polyconv.lowering.volume import WHOLE
from polyconv.problem import Pass, Problem
from polyconv.selection import Preference, by_cost

LAYERS = {
    "3-D U-Net, first level": ((1, 32, 128, 128, 128), (32, 32, 3, 3, 3), 1),
    "64 to 64": ((2, 64, 32, 64, 64), (64, 64, 3, 3, 3), 1),
    "r3d_18, layer 1": ((8, 64, 8, 56, 56), (64, 64, 3, 3, 3), 1),
    "r3d_18, layer 2, stride 2": ((8, 64, 8, 56, 56), (128, 64, 3, 3, 3), 2),
    "r3d_18, layer 3": ((8, 256, 2, 14, 14), (256, 256, 3, 3, 3), 1),
}


def plans(problem: Problem) -> list[CudaVolumePlan]:
    """The plan, and the best other one."""
    plan = plan_volume(problem, A100)
    others = [one.name for one in by_cost(plan.candidates) if one.name != WHOLE]
    return [plan] * (plan.choice == WHOLE) + [plan_volume(problem, A100, prefer=Preference(others[0]))]


def main(word: str = "", dtype: str = "bfloat16") -> None:
    print(f"{'':28} {'pass':6} {'bound':>8} {'kernels':>8} {'beside':>8} {'modelled':>8}  [ms]")
    for name, (x, w, stride) in LAYERS.items():
        if word not in name:
            continue
        for kind in Pass:
            problem = Problem.make(kind, x, w, stride=(stride,) * 3, padding=(1,) * 6, dtype=dtype)
            problem = replace(problem, tolerance=settings.current().tolerance)
            problem = problem if dtype == "float32" else problem.channels_last()
            for plan in plans(problem):
                found, beside = counted_ms(plan), beside_us(plan.parts.extra_traffic[0], 0, A100) / 1e3
                figures = f"{bound_ms(problem):8.3f} {found:8.3f} {beside:8.3f} {plan.cost_us / 1e3:8.3f}"
                print(f"{name:28} {kind!s:6} {figures}  {plan.name}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
