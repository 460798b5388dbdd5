"""Planner for volumes on CUDA devices: lowerings to 2-D problems, their cost, the choice, and the reasons.

A volume runs on a kernel with three axes (cuda/planner/implicit_gemm/ndhwc.py, scaled_fp16/halo_volume.py), or is
lowered to a sum of 2-D problems (:mod:`polyconv.lowering.volume_sum`), or one of its tensors is stacked
(:mod:`polyconv.lowering.volume_stack`); the lowering of least modelled cost within the tolerance runs. Each copy or
addition that PyTorch runs beside the kernels costs its memory traffic and a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from ...lowering.base import Lowering, Rewrite
from ...lowering.volume import WHOLE, Parts, VolumePlan, WholeVolume, planned_parts, scattered_bytes
from ...lowering.volume_stack import NAMES, Stack, stack
from ...lowering.volume_sum import NAME as SUM_OF_SLICES
from ...lowering.volume_sum import volume_sum
from ...numerics.prediction import with_numeric_tolerance
from ...problem import HALF_DTYPES, Pass, Problem
from ...selection import Candidate, PlanError, Preference, select, why_not
from ...util.gpu_arch import capability
from .cost import LAUNCH_US
from .device import CudaDevice, has_tf32
from .implicit_gemm.fprop_dgrad_nhwc import GENERATIONS
from .plan import Autotunable, Plan
from .planner import DEFAULT_WORKSPACE, candidates, plan_cuda

BESIDE_EFFICIENCY = 0.7
"""Assumed share of the data-sheet bandwidth that PyTorch's copies and sums of strided slices reach."""
DOUBT = 1.1
"""Cost factor on stacks. The sum needs neither copies nor memory for them, and where the model cannot separate the two
(kb61's input gradient: 2 %) the sum was counted to take less."""
SECTOR_BYTES = 32
"""L2 sector size: the least that an access moves."""


@dataclass(frozen=True, slots=True)
class CudaVolumePlan(Autotunable, VolumePlan[Plan]):
    """Plan for a volume on a GPU, and the reasons for it."""

    device: str
    cost_us: float
    """Includes PyTorch's copies and additions, and :data:`DOUBT` for a stack."""
    candidates: tuple[Candidate, ...]
    preference: str = ""

    @property
    def cost(self) -> float:
        return self.cost_us

    @property
    def keeps_weights(self) -> bool:
        return self.problem.frozen and any(plan.weights_bytes > 0 for plan in self.plans.values())

    def with_parts(self, plan: Callable[[Problem], Plan]) -> CudaVolumePlan:
        """The same lowering, with each 2-D problem planned by ``plan``."""
        return replace(self, plans={part: own if part.rank == 3 else plan(part) for part, own in self.plans.items()})

    def explain(self, *, verbose: bool = False) -> str:
        """The plan as text: the lowering, the plans of its 2-D problems, and why other lowerings do not run."""
        figures = f"expected error {self.predicted_error:.1e}, modelled cost {self.cost_us:.0f} us"
        lines = [str(self.problem), f"  runs {self.choice} on {self.device}: {figures}"]
        lines += [f"  {self.preference}"] if self.preference else []
        return "\n".join([*lines, *self.in_words(verbose=verbose), *why_not(self.candidates, verbose=verbose)])


def planned(
    problem: Problem, device: CudaDevice, workspace: int = DEFAULT_WORKSPACE, prefer: Preference | None = None
) -> Plan | CudaVolumePlan:
    """Plan a 2-D problem or a volume."""
    return (plan_volume if problem.rank == 3 else plan_cuda)(problem, device, workspace, prefer)


@lru_cache(maxsize=1024)
def plan_volume(
    problem: Problem, device: CudaDevice, workspace: int = DEFAULT_WORKSPACE, prefer: Preference | None = None
) -> CudaVolumePlan:
    """The lowering of least modelled cost, or the preferred one if it can run. ``workspace`` also limits a stack."""
    problem = with_numeric_tolerance(problem, has_tf32(device))
    found = select(
        _ways(problem, device, workspace),
        problem,
        refusal=lambda one: one.refused,
        error=lambda one: one.plan.predicted_error,
        cost=lambda one: (DOUBT if one.name in NAMES.values() else 1.0) * volume_us(one.plan, device),
        prefer=prefer,
    )
    plan = found.chosen.plan
    return CudaVolumePlan(
        plan.parts, plan.plans, device.name, found.weighed.cost or 0.0, found.candidates, found.preference
    )


@dataclass(frozen=True, slots=True)
class _Way:
    name: str
    refused: str | None = None
    planned: VolumePlan[Plan] | None = None

    @property
    def plan(self) -> VolumePlan[Plan]:
        assert self.planned is not None
        return self.planned

    @property
    def direct(self) -> bool:
        return all(plan.direct for plan in self.plan.plans.values())


def _ways(problem: Problem, device: CudaDevice, workspace: int) -> Iterator[_Way]:
    whole = _way(WHOLE, _whole(problem, device), device, workspace)
    yield whole
    named: dict[str, Parts | str] = {SUM_OF_SLICES: volume_sum(problem)}
    named |= {name: stack(problem, side, workspace) for side, name in NAMES.items()}
    once = [name for name, parts in named.items() if not isinstance(parts, str) and not _rounds_parts(parts)]
    for name, parts in named.items():
        if not isinstance(parts, str) and (once or whole.refused is None) and name not in once:
            parts = f"parts of a sum would be rounded to {problem.dtype} in memory"
        yield _way(name, parts, device, workspace)


def _way(name: str, parts: Parts | str, device: CudaDevice, workspace: int) -> _Way:
    if isinstance(parts, str):
        return _Way(name, parts)
    try:
        return _Way(name, None, planned_parts(parts, lambda part: plan_cuda(part, device, workspace)))
    except PlanError as error:
        return _Way(name, str(error))


def _whole(problem: Problem, device: CudaDevice) -> WholeVolume | str:
    """The problem for a kernel with three axes, or why there is none."""
    if capability(device.arch) not in GENERATIONS:
        return f"only on GPUs from sm_{GENERATIONS[0]} on"
    first = next(candidates(problem), None)
    if first is None:
        return f"not for the {problem.kind} of {problem.dtype} volumes"
    return first.refusal(problem) or WholeVolume(problem)


def _rounds_parts(parts: Parts) -> bool:
    """Whether results of half precision are added to others in memory. Weight gradients are added in float32."""
    problem = parts.problem
    stacked = isinstance(parts, Stack)
    return problem.dtype in HALF_DTYPES and parts.additions > 0 and not (stacked and problem.kind is Pass.WGRAD)


# ---- cost


def is_ahead(
    lowering: Lowering, other: Lowering | None, device: CudaDevice, workspace: int = DEFAULT_WORKSPACE
) -> bool:
    """Whether a lowering is modelled to take no longer than another of its problem, or than the problem itself."""
    ours, theirs = (_lowered_us(lowering.problem, one, device, workspace) for one in (lowering, other))
    return ours <= theirs


def _lowered_us(problem: Problem, lowering: Lowering | None, device: CudaDevice, workspace: int) -> float:
    """Modelled time [us] with PyTorch's copies; infinite if no plan can run."""
    try:
        us = sum(planned(part, device, workspace).cost_us for part in (lowering.problems if lowering else (problem,)))
    except PlanError:
        return inf
    return us + (beside_us(*lowering.extra_traffic, device) if isinstance(lowering, Rewrite) else 0.0)


def beside_us(moved: int, launches: int, device: CudaDevice) -> float:
    """Modelled time [us] of PyTorch's copies and additions beside the kernels."""
    return moved / (BESIDE_EFFICIENCY * device.dram_gbs * 1e3) + launches * LAUNCH_US


def volume_us(plan: VolumePlan[Plan], device: CudaDevice) -> float:
    """Modelled time [us] of all 2-D problems and of PyTorch's copies and additions."""
    kernels = sum(plan.times(part) * max(own.cost_us, _scattered_us(part, device)) for part, own in plan.plans.items())
    return kernels + beside_us(*plan.parts.extra_traffic, device)


def _scattered_us(part: Problem, device: CudaDevice) -> float:
    """L2 time [us] for elements without neighbours in memory: where the volume is cut across its width."""
    return scattered_bytes(part, SECTOR_BYTES) / (device.l2_gbs * 1e3)
