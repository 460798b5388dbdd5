"""From what is asked (:class:`~polyconv.problem.Problem`) to what will run (:class:`Plan`): pure Python, no GPU."""

from ..preference import Preference
from ..select import Candidate, PlanError
from .cuda import all_kernels, plan_cuda
from .device import DEVICES, CudaDevice
from .plan import KernelSpec, Launch, Plan, PointerSlot

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
