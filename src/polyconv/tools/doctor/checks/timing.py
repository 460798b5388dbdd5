"""Kernel times next to PyTorch's in float32, TF32 and bfloat16, and next to the cost model's estimates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ....cuda.backend import CudaBackend
from ....cuda.planner.cost import LAUNCH_US
from ....cuda.planner.plan import Plan
from ....cuda.planner.planner import plan_cuda
from ....measure.operands import Operands, ours, pytorch
from ....measure.timing import cuda_sample, current, interleaved
from ....problem import Pass, Problem, Shape
from ..check import Part, Result, passed
from ..device_under_test import GpuUnderTest
from ..kernel_coverage import family_plans
from ..verify import operands

LAYERS: dict[str, tuple[Shape, Shape, dict[str, Any]]] = {
    "3x3, 64 channels": ((32, 64, 56, 56), (64, 64, 3, 3), {"padding": (1, 1, 1, 1)}),
    "3x3, 256 channels": ((32, 256, 14, 14), (256, 256, 3, 3), {"padding": (1, 1, 1, 1)}),
    "3x3, stride 2": ((32, 128, 28, 28), (128, 128, 3, 3), {"padding": (1, 1, 1, 1), "stride": (2, 2)}),
    "5x9, dilated": ((8, 32, 128, 128), (64, 32, 5, 9), {"padding": (2, 2, 4, 4), "dilation": (2, 3)}),
    "1x1": ((32, 256, 28, 28), (128, 256, 1, 1), {}),
    "7x7, stride 2": ((32, 3, 224, 224), (64, 3, 7, 7), {"padding": (3, 3, 3, 3), "stride": (2, 2)}),
    "depthwise 3x3": ((32, 192, 56, 56), (192, 1, 3, 3), {"padding": (1, 1, 1, 1), "groups": 192}),
}
REPEATS, SAMPLES = 5, 3
TINY = 2000
"""Consecutive launches of a tiny kernel that measure the time per launch."""


def parts(subject: GpuUnderTest) -> Mapping[str, Part]:
    found: dict[str, Part] = {"launch gap": lambda: launch_gap(subject)}
    for name in subject.some(list(LAYERS), 1):
        for kind in Pass:
            x, w, arguments = LAYERS[name]
            found[f"{name}, {kind}"] = partial(layer, subject, Problem.make(kind, x, w, **arguments))
    return found


def layer(subject: GpuUnderTest, problem: Problem) -> Result:
    """Time the chosen plan, PyTorch in three formats, and each family's best plan next to its estimate."""
    figures: dict[str, Any] = {}
    random = Operands.random(problem, device=subject.device)
    low = Operands(*(None if t is None else t.bfloat16() for t in (random.x, random.w, random.bias, random.dy)))  # type: ignore[arg-type]
    calls = {
        "ours": ours(problem, random),
        "float32": pytorch(problem, random),
        "TF32": pytorch(problem, random),
        "bfloat16": pytorch(problem, low),
    }
    within: dict[str, Callable[[], AbstractContextManager[object]]] = {
        name: partial(torch.backends.cudnn.flags, enabled=True, benchmark=True, allow_tf32=name == "TF32")
        for name in ("float32", "TF32", "bfloat16")
    }
    with torch.no_grad(), current(subject.device):
        timings = interleaved(calls, REPEATS, cuda_sample, within=within)
        figures["us"] = {name: round(timing.best * 1e6, 2) for name, timing in timings.items()}
        figures["measured_to_modelled"] = measured_to_modelled(subject, problem)
    ratio = timings["float32"].best / timings["ours"].best
    return passed(f"{ratio:.2f} times as fast as PyTorch in float32", **figures, ratio=ratio)


def measured_to_modelled(subject: GpuUnderTest, problem: Problem) -> dict[str, float]:
    """Ratio of measured to modelled time of each family's best plan."""
    found = {}
    for family, plan in family_plans(problem, subject.description):
        run = CudaBackend(subject.index, planner=partial(_settled, plan)).prepare(plan)
        shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape, "dw": problem.w_shape}
        tensors = {name: torch.randn(shape, device=subject.device) for name, shape in shapes.items()}
        run(tensors)
        best = min(cuda_sample(partial(run, tensors), SAMPLES) for _ in range(SAMPLES)) * 1e6
        found[family] = round(best / plan.cost_us, 3)
    return found


def _settled(plan: Plan, *_: object) -> Plan:
    return plan


def launch_gap(subject: GpuUnderTest) -> Result:
    """Time from launch to launch of a tiny kernel: the cost model's ``LAUNCH_US``."""
    problem = Problem.make(Pass.FPROP, (1, 8, 4, 4), (8, 1, 3, 3), padding=(1, 1, 1, 1), groups=8)
    given, exact = operands(problem)
    tensors = {name: value.float().to(subject.device) for name, value in {**given, **exact}.items()}
    backend = CudaBackend(subject.index)
    run = backend.prepare_launches(plan_cuda(problem, backend.description), backend.weights)
    with current(subject.device):
        run(tensors)
        gap = min(cuda_sample(partial(run, tensors), TINY) for _ in range(SAMPLES)) * 1e6 / len(run.launches)
    return passed(f"{gap:.1f} us from launch to launch; the model has {LAUNCH_US:.1f}", us=gap, modelled_us=LAUNCH_US)
