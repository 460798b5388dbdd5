"""The planner for volumes on CUDA devices: ways to make them of pictures, their cost, the choice, and the reasons.

Kernels know height and width. A volume is a sum of pictures (:mod:`polyconv.sheets`), or one of its tensors is stacked
(:mod:`polyconv.stacks`); of the ways that keep the tolerance the one of least modelled cost runs. What PyTorch copies
or adds beside the kernels takes the memory's time, and a launch each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ..preference import Preference
from ..problem import Problem
from ..select import Candidate, PlanError, select, why_not
from ..sheets import NAME as SUM_OF_PICTURES
from ..sheets import cut
from ..stacks import NAMES, stack
from ..volumes import Parts, VolumePlan, planned_parts, scattered_bytes
from .cost import LAUNCH_US
from .cuda import DEFAULT_WORKSPACE, plan_cuda
from .device import CudaDevice
from .plan import Plan

BESIDE_EFFICIENCY = 0.7
"""Share of the data-sheet bandwidth that PyTorch's copies and sums of strided sheets are taken to reach."""
DOUBT = 1.1
"""By how much a stack has to be ahead: the sum needs neither copies nor memory for them, and of two that the model
cannot tell apart (kb61's input gradient: 2 %) the sum was counted to take less."""
SECTOR_BYTES = 32
"""What the L2 delivers at least, however few of the bytes are wanted."""


@dataclass(frozen=True, slots=True)
class CudaVolumePlan(VolumePlan[Plan]):
    """What runs a volume on a GPU, and why."""

    device: str
    cost_us: float
    """With what is copied and added beside the pictures, and with the doubt of a stack."""
    candidates: tuple[Candidate, ...]
    preference: str = ""

    @property
    def cost(self) -> float:
        return self.cost_us

    def with_plans(self, plan: Callable[[Problem], Plan]) -> CudaVolumePlan:
        """The same way, with pictures as somebody else plans them."""
        return replace(self, plans={picture: plan(picture) for picture in self.plans})

    def explain(self, *, verbose: bool = False) -> str:
        """The plan in words: what runs, the plans of its pictures, and why other ways do not."""
        figures = f"expected error {self.predicted_error:.1e}, modelled cost {self.cost_us:.0f} us"
        lines = [str(self.problem), f"  runs {self.choice} on {self.device}: {figures}"]
        lines += [f"  {self.preference}"] if self.preference else []
        return "\n".join([*lines, *self.in_words(verbose=verbose), *why_not(self.candidates, verbose=verbose)])


def planned(
    problem: Problem, device: CudaDevice, workspace: int = DEFAULT_WORKSPACE, prefer: Preference | None = None
) -> Plan | CudaVolumePlan:
    """The plan for a problem over two axes or three."""
    return (plan_volume if problem.rank == 3 else plan_cuda)(problem, device, workspace, prefer)


@lru_cache(maxsize=1024)
def plan_volume(
    problem: Problem, device: CudaDevice, workspace: int = DEFAULT_WORKSPACE, prefer: Preference | None = None
) -> CudaVolumePlan:
    """The way of least modelled cost, or the preferred one, if it can run; a stack takes as much as the workspace."""
    found = select(
        _ways(problem, device, workspace),
        problem,
        refusal=lambda one: one.refused,
        error=lambda one: one.plan.predicted_error,
        cost=lambda one: (1.0 if one.name == SUM_OF_PICTURES else DOUBT) * volume_us(one.plan, device),
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
    named: dict[str, Parts | str] = {SUM_OF_PICTURES: cut(problem)}
    named |= {name: stack(problem, side, workspace) for side, name in NAMES.items()}
    for name, parts in named.items():
        if isinstance(parts, str):
            yield _Way(name, parts)
            continue
        try:
            yield _Way(name, None, planned_parts(parts, lambda picture: plan_cuda(picture, device, workspace)))
        except PlanError as error:
            yield _Way(name, str(error))


# ---- cost


def volume_us(plan: VolumePlan[Plan], device: CudaDevice) -> float:
    """All pictures, and what PyTorch does beside them."""
    pictures = sum(
        plan.times(picture) * max(own.cost_us, _scattered_us(picture, device)) for picture, own in plan.plans.items()
    )
    moved, launches = plan.parts.beside
    return pictures + moved / (BESIDE_EFFICIENCY * device.dram_gbs * 1e3) + launches * LAUNCH_US


def _scattered_us(picture: Problem, device: CudaDevice) -> float:
    """What the L2 takes for elements that have no neighbours: where the width is cut across."""
    return scattered_bytes(picture, SECTOR_BYTES) / (device.l2_gbs * 1e3)
