"""The planner for CUDA devices: candidates, their cost, the choice, and the reasons."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..problem import PaddingMode, Pass, Problem
from . import candidates, depthwise, gather, wgrad
from .device import CudaDevice
from .errors import PlanError
from .plan import Candidate, KernelSpec, Plan, Schedule

DEFAULT_WORKSPACE = 64 * 2**20
"""Bytes of scratch memory that a plan may take for partial sums."""
UNIT_ROUNDOFF = 2.0**-24
"""Half the distance from 1 to the next float32. n additions in any order are off by at most about n times this."""


def all_kernels() -> tuple[KernelSpec, ...]:
    """Every kernel instance that any plan can name: what is compiled ahead of time, inspected and tested."""
    return (*gather.all_kernels(), *wgrad.all_kernels(), *depthwise.all_kernels())


@lru_cache(maxsize=4096)
def plan_cuda(problem: Problem, device: CudaDevice, workspace: int = DEFAULT_WORKSPACE) -> Plan:
    """The way to solve ``problem`` on ``device`` with the least modelled cost. Deterministic: no timing, no state."""
    if problem.dtype != "float32":
        raise PlanError(f"polyconv's CUDA kernels compute in float32; this problem is {problem.dtype}")
    if problem.padding_mode is not PaddingMode.ZEROS and min(problem.padding) < 0 and problem.kind is not Pass.DGRAD:
        return _plan_cropped(problem, device, workspace)
    if problem.kind is Pass.WGRAD:
        best, schedule, every = _plan_wgrad(problem, device, workspace)
    else:
        best, schedule, every = _plan_gather(problem, device)
    return Plan(
        problem=problem,
        device=device.name,
        algorithm=f"direct ({best.name})",
        launches=schedule.launches,
        workspace_bytes=schedule.workspace_bytes,
        expected_error=(schedule.longest_sum + 2) * UNIT_ROUNDOFF,
        cost_us=best.cost_us or 0.0,
        candidates=tuple(c if c.rejected or c is best else _slower(c, best) for c in every),
    )


def _plan_cropped(problem: Problem, device: CudaDevice, workspace: int) -> Plan:
    """A negative side takes rows away before the border is made of the image: the same problem on a part of x."""
    crop_top, crop_bottom, crop_left, crop_right = (max(-side, 0) for side in problem.padding)
    top, bottom, left, right = (max(side, 0) for side in problem.padding)
    part = replace(
        problem,
        in_size=(problem.in_size[0] - crop_top - crop_bottom, problem.in_size[1] - crop_left - crop_right),
        padding=(top, bottom, left, right),
        vector_aligned=False,
    )
    offset = 4 * (crop_top * problem.x_strides[2] + crop_left * problem.x_strides[3])
    plan = plan_cuda(part, device, workspace)
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


_Choice = tuple[Candidate, Schedule, list[Candidate]]


def _plan_gather(problem: Problem, device: CudaDevice) -> _Choice:
    dense = list(candidates.gather_candidates(problem, device))
    planes = list(candidates.depthwise_candidates(problem, device))
    every = [c for c, *_ in dense] + [c for c, *_ in planes]
    best = _cheapest(every, problem)
    for candidate, tile, loader in dense:
        if candidate is best:
            return best, gather.launches(problem, tile, loader), every
    plane = next(tile for candidate, tile in planes if candidate is best)
    return best, depthwise.launches(problem, plane, device.sms), every


def _plan_wgrad(problem: Problem, device: CudaDevice, workspace: int) -> _Choice:
    dense = list(candidates.wgrad_candidates(problem, device, workspace))
    planes = list(candidates.depthwise_wgrad_candidates(problem, device))
    every = [c for c, *_ in dense] + [c for c, *_ in planes]
    best = _cheapest(every, problem)
    for candidate, tile, vector in dense:
        if candidate is best:
            return best, wgrad.launches(problem, tile, vector, device.sms, workspace), every
    plane, taps = next((tile, taps) for candidate, tile, taps in planes if candidate is best)
    return best, depthwise.wgrad_launches(problem, plane, taps, device.sms, workspace), every


def _cheapest(every: list[Candidate], problem: Problem) -> Candidate:
    usable = [c for c in every if c.rejected is None]
    if not usable:
        reasons = "; ".join(f"{c.name}: {c.rejected}" for c in every)
        raise PlanError(f"no CUDA kernel can run {problem}: {reasons}")
    return min(usable, key=lambda c: c.cost_us or 0.0)


def _slower(candidate: Candidate, best: Candidate) -> Candidate:
    ratio = (candidate.cost_us or 0.0) / (best.cost_us or 1.0)
    reason = f"modelled {candidate.cost_us:.0f} us, {ratio:.2f}x the chosen one's"
    return Candidate(candidate.name, candidate.cost_us, reason, candidate.note)
