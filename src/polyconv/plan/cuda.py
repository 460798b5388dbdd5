"""The planner for CUDA devices: candidates, their cost, the choice, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

from ..preference import Preference
from ..problem import AXES, HALF_DTYPES, PaddingMode, Pass, Problem
from ..select import PlanError, Selection, select
from . import (
    depthwise,
    fused,
    fused_tensor,
    gather,
    pointwise_wgrad,
    separable,
    strips,
    tensor,
    tensor_gather,
    tensor_wgrad,
    toom_wgrad,
    toom_wgrad_tensor,
    wgrad,
)
from .candidates import CudaCandidate, FastCandidate
from .cost import tasks_us, why_not_on, worth_residing
from .device import CudaDevice, why_too_old
from .plan import KernelSpec, Plan, Task, direct_name

DTYPES = ("float32", *HALF_DTYPES)
"""What tensors may be made of."""
DEFAULT_WORKSPACE = 64 * 2**20
"""Bytes of scratch memory that a plan may take for partial sums."""
GENERAL: tuple[ModuleType, ...] = (gather, wgrad, depthwise)
"""Of these families, one or another takes any problem, and any strides."""
FAMILIES: tuple[ModuleType, ...] = (
    *GENERAL,
    strips,
    pointwise_wgrad,
    separable,
    fused,
    fused_tensor,
    toom_wgrad,
    toom_wgrad_tensor,
    tensor,
    tensor_gather,
    tensor_wgrad,
)
"""Modules with ``candidates(problem)`` and ``all_kernels()``; with ``DTYPES``, if their tensors are not of float32."""


def all_kernels(arch: str = "") -> tuple[KernelSpec, ...]:
    """Every kernel instance that any plan can name: what is compiled ahead of time, inspected and tested.

    Of an architecture, if one is given: those that plans for its devices can name.
    """
    every = dict.fromkeys(kernel for family in FAMILIES for kernel in family.all_kernels())
    return tuple(kernel for kernel in every if not arch or kernel.runs_on(arch))


@lru_cache(maxsize=4096)
def plan_cuda(
    problem: Problem, device: CudaDevice, workspace: int = DEFAULT_WORKSPACE, prefer: Preference | None = None
) -> Plan:
    """The plan for ``problem`` on ``device`` with the least modelled cost, or the preferred one, if it can run.

    Deterministic: no timing, no state.
    """
    if too_old := why_too_old(device.arch, device.name):
        raise PlanError(too_old)
    if other_axes := problem.why_not_pictures():
        raise PlanError(other_axes)
    if problem.dtype not in DTYPES:
        raise PlanError(f"polyconv's CUDA kernels take {', '.join(DTYPES)}; this problem is {problem.dtype}")
    if problem.padding_mode is not PaddingMode.ZEROS:
        _check_border(problem)
        if min(problem.padding) < 0 and problem.kind is not Pass.DGRAD:
            return _plan_cropped(problem, device, workspace, prefer)
    return plan_within(FAMILIES, problem, device, workspace, prefer)


def plan_within(
    families: tuple[ModuleType, ...],
    problem: Problem,
    device: CudaDevice,
    workspace: int = DEFAULT_WORKSPACE,
    prefer: Preference | None = None,
) -> Plan:
    """The plan that these families of kernels make of a problem."""
    found = choose(problem, device, workspace, families, prefer)
    room = weigh(found.chosen, problem, device, workspace).workspace
    schedule = found.chosen.schedule(problem, device.sms, room)
    return Plan(
        problem=problem,
        device=device.name,
        algorithm=direct_name(found.chosen.name) if found.chosen.direct else found.chosen.name,
        launches=schedule.launches,
        workspace_bytes=schedule.workspace_bytes,
        expected_error=found.weighed.error or 0.0,
        cost_us=found.weighed.cost or 0.0,
        candidates=found.candidates,
        preference=found.preference,
        weights_bytes=schedule.weights_bytes,
        ways=found.chosen.ways(problem) if isinstance(found.chosen, FastCandidate) else (),
    )


def choose(
    problem: Problem,
    device: CudaDevice,
    workspace: int = DEFAULT_WORKSPACE,
    families: tuple[ModuleType, ...] = FAMILIES,
    prefer: Preference | None = None,
) -> Selection[CudaCandidate]:
    """What runs, of what these families offer. Costs are in microseconds."""

    def cost(one: CudaCandidate) -> float | str:
        found = weigh(one, problem, device, workspace)
        return why_not_on(found.tasks, device) or found.us

    return select(
        candidates(problem, families),
        problem,
        refusal=lambda one: one.refusal(problem),
        error=lambda one: one.error(problem, device.sms, workspace),
        cost=cost,
        prefer=prefer,
    )


class Weighed(NamedTuple):
    """What a candidate launches in so much of the workspace, and what that costs."""

    us: float
    workspace: int
    tasks: tuple[Task, ...]


def weigh(one: CudaCandidate, problem: Problem, device: CudaDevice, workspace: int) -> Weighed:
    """A candidate with all of the workspace or, if that is better, with the part that makes its slabs stay in the L2.

    Larger slabs are fewer launches and fuller waves; of what passes through smaller ones the memory sees nothing.
    """

    def within(room: int) -> Weighed:
        tasks = tuple(one.tasks(problem, device.sms, room))
        return Weighed(tasks_us(tasks, device), room, tasks)

    whole = within(workspace)
    if not worth_residing(whole.tasks, device):
        return whole
    return min(whole, within(device.l2_slab_bytes), key=lambda weighed: weighed.us)


def _check_border(problem: Problem) -> None:
    """Raise unless what negative sides leave of the image has the pixels that the border is made of."""
    for axis, name in enumerate(AXES[problem.rank]):
        before, after = problem.padding[2 * axis : 2 * axis + 2]
        left, widest = problem.in_size[axis] + min(before, 0) + min(after, 0), max(before, after, 0)
        needed = {PaddingMode.REFLECT: widest + 1, PaddingMode.CIRCULAR: max(widest, 1)}.get(problem.padding_mode, 1)
        if left < needed:
            raise PlanError(
                f"padding_mode='{problem.padding_mode}' makes the border of the image: padding {before} and {after} "
                f"along a {name} of {problem.in_size[axis]} needs {needed} to be left of it, and leaves {left}"
            )


def _plan_cropped(problem: Problem, device: CudaDevice, workspace: int, prefer: Preference | None) -> Plan:
    """A negative side takes rows away before the border is made of the image: the same problem on a part of x."""
    crop_top, crop_bottom, crop_left, crop_right = (max(-side, 0) for side in problem.padding)
    top, bottom, left, right = (max(side, 0) for side in problem.padding)
    part = replace(
        problem,
        in_size=(problem.in_size[0] - crop_top - crop_bottom, problem.in_size[1] - crop_left - crop_right),
        padding=(top, bottom, left, right),
        vector_aligned=False,
    )
    offset = problem.element_bytes * (crop_top * problem.x_strides[2] + crop_left * problem.x_strides[3])
    plan = plan_cuda(part, device, workspace, prefer)
    moved = tuple(
        replace(
            launch,
            pointers=tuple(
                replace(slot, byte_offset=slot.byte_offset + offset) if slot.buffer == "x" else slot
                for slot in launch.pointers
            ),
        )
        for launch in plan.launches
    )
    return replace(plan, problem=problem, launches=moved)


def candidates(problem: Problem, families: tuple[ModuleType, ...] = FAMILIES) -> Iterator[CudaCandidate]:
    """Every candidate that some family of kernels offers for the problem's pass."""
    for family in families:
        if problem.dtype in getattr(family, "DTYPES", ("float32",)):
            yield from family.candidates(problem)
