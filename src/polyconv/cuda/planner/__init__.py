"""CUDA planner: from a :class:`~polyconv.problem.Problem` to a :class:`Plan`. Pure Python, needs no GPU."""

from ...selection import Candidate, PlanError, Preference
from .device import DEVICES, CudaDevice
from .plan import KernelSpec, Launch, Plan, PointerSlot
from .planner import all_kernels, plan_cuda

__all__ = [
    "DEVICES",
    "Candidate",
    "CudaDevice",
    "KernelSpec",
    "Launch",
    "Plan",
    "PlanError",
    "PointerSlot",
    "Preference",
    "all_kernels",
    "plan_cuda",
]
