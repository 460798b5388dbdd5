"""Planner for CUDA devices: candidates, their modelled cost, the choice, and the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

from ...numerics.prediction import with_numeric_tolerance
from ...problem import AXES, HALF_DTYPES, PaddingMode, Problem
from ...selection import PlanError, Preference, Selection, select
from .candidate import CudaCandidate, FastCandidate
from .cost import tasks_us, why_not_on, worth_residing
from .depthwise import band, halo, line, strip
from .device import CudaDevice, has_tf32, why_too_old
from .implicit_gemm import (
    fprop_dgrad,
    fprop_dgrad_mma,
    fprop_dgrad_nhwc,
    ndhwc,
    wgrad_1x1,
    wgrad_mma,
    wgrad_nhwc,
)
from .implicit_gemm import wgrad as implicit_gemm_wgrad
from .plan import KernelSpec, Plan, Task, direct_name
from .scaled_fp16 import fprop_dgrad as scaled_fp16_fprop_dgrad
from .scaled_fp16 import halo as scaled_fp16_halo
from .scaled_fp16 import halo_volume as scaled_fp16_halo_volume
from .scaled_fp16 import halo_wgrad as scaled_fp16_halo_wgrad
from .scaled_fp16 import wgrad as scaled_fp16_wgrad
from .winograd import fused as winograd_fused
from .winograd import nonfused as winograd_nonfused
from .winograd import wgrad as winograd_wgrad
from .winograd_fp16x3 import fused as winograd_fp16x3_fused
from .winograd_fp16x3 import nonfused as winograd_fp16x3_nonfused
from .winograd_fp16x3 import wgrad as winograd_fp16x3_wgrad

DTYPES = ("float32", *HALF_DTYPES)
"""Supported element types."""
DEFAULT_WORKSPACE = 64 * 2**20
"""Default limit of a plan's workspace [bytes]."""
GENERAL: tuple[ModuleType, ...] = (fprop_dgrad, implicit_gemm_wgrad, halo)
"""Families that together take any problem, with any strides."""
FAMILIES: tuple[ModuleType, ...] = (
    *GENERAL,
    strip,
    line,
    band,
    wgrad_1x1,
    winograd_nonfused,
    winograd_fused,
    winograd_fp16x3_fused,
    winograd_wgrad,
    winograd_fp16x3_wgrad,
    winograd_fp16x3_nonfused,
    scaled_fp16_fprop_dgrad,
    scaled_fp16_halo,
    scaled_fp16_halo_volume,
    scaled_fp16_halo_wgrad,
    scaled_fp16_wgrad,
    fprop_dgrad_mma,
    fprop_dgrad_nhwc,
    ndhwc,
    wgrad_mma,
    wgrad_nhwc,
)
"""Modules with ``candidates(problem)`` and ``all_kernels()``; with ``DTYPES`` if not for float32, with ``RANK`` if not
for two axes."""


def family_name(family: ModuleType) -> str:
    """Folder and module of a family, as in ``winograd/fused``."""
    return "/".join(family.__name__.split(".")[-2:])


def all_kernels(arch: str = "") -> tuple[KernelSpec, ...]:
    """Every kernel instance that plans (for ``arch``, if given) can name: compiled ahead of time, inspected, tested."""
    every = dict.fromkeys(kernel for family in FAMILIES for kernel in family.all_kernels())
    return tuple(kernel for kernel in every if not arch or kernel.runs_on(arch))


@lru_cache(maxsize=4096)
def plan_cuda(
    problem: Problem, device: CudaDevice, workspace: int = DEFAULT_WORKSPACE, prefer: Preference | None = None
) -> Plan:
    """Plan of least modelled cost, or the preferred one if it can run. Deterministic: no timing, no state.

    Volumes that no kernel takes are lowered to 2-D problems (cuda/planner/volumes.py).
    """
    problem = with_numeric_tolerance(problem, has_tf32(device))
    if too_old := why_too_old(device.arch, device.name):
        raise PlanError(too_old)
    if (other_axes := problem.why_not_2d()) and not any(candidates(problem)):
        raise PlanError(other_axes)
    if problem.dtype not in DTYPES:
        raise PlanError(f"polyconv's CUDA kernels take {', '.join(DTYPES)}; this problem is {problem.dtype}")
    if problem.padding_mode is not PaddingMode.ZEROS:
        _check_border(problem)
        if min(problem.padding) < 0:
            raise PlanError(f"a border of a cropped image is lowered to one of the part (polyconv.lowering): {problem}")
    return plan_within(FAMILIES, problem, device, workspace, prefer)


def plan_within(
    families: tuple[ModuleType, ...],
    problem: Problem,
    device: CudaDevice,
    workspace: int = DEFAULT_WORKSPACE,
    prefer: Preference | None = None,
) -> Plan:
    """Plan for a problem from the candidates of these families."""
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
        prefer=prefer,
    )


def choose(
    problem: Problem,
    device: CudaDevice,
    workspace: int = DEFAULT_WORKSPACE,
    families: tuple[ModuleType, ...] = FAMILIES,
    prefer: Preference | None = None,
) -> Selection[CudaCandidate]:
    """Select a candidate of these families. Costs are in microseconds."""

    def cost(one: CudaCandidate) -> float | str:
        found = weigh(one, problem, device, workspace)
        return why_not_on(found.tasks, device) or found.us

    return select(
        candidates(problem, families, device),
        problem,
        refusal=lambda one: one.refusal(problem),
        error=lambda one: one.error(problem, device.sms, workspace),
        cost=cost,
        prefer=prefer,
    )


class Weighed(NamedTuple):
    """Tasks of a candidate within a workspace limit, and their modelled cost."""

    us: float
    workspace: int
    tasks: tuple[Task, ...]


def weigh(one: CudaCandidate, problem: Problem, device: CudaDevice, workspace: int) -> Weighed:
    """Price a candidate with the whole workspace or, if cheaper, with a part that keeps its slabs in the L2. Large
    slabs need fewer launches and fill waves better; data passed through L2-resident ones causes no DRAM traffic."""

    def within(room: int) -> Weighed:
        tasks = tuple(one.tasks(problem, device.sms, room))
        return Weighed(tasks_us(tasks, device), room, tasks)

    whole = within(workspace)
    if not worth_residing(whole.tasks, device):
        return whole
    return min(whole, within(device.l2_slab_bytes), key=lambda weighed: weighed.us)


def _check_border(problem: Problem) -> None:
    """Raise a PlanError if the image, cropped by negative padding, lacks the pixels that the border copies."""
    for axis, name in enumerate(AXES[problem.rank]):
        before, after = problem.padding[2 * axis : 2 * axis + 2]
        left, widest = problem.in_size[axis] + min(before, 0) + min(after, 0), max(before, after, 0)
        needed = {PaddingMode.REFLECT: widest + 1, PaddingMode.CIRCULAR: max(widest, 1)}.get(problem.padding_mode, 1)
        if left < needed:
            raise PlanError(
                f"padding_mode='{problem.padding_mode}' makes the border of the image: padding {before} and {after} "
                f"along a {name} of {problem.in_size[axis]} needs {needed} to be left of it, and leaves {left}"
            )


def candidates(
    problem: Problem, families: tuple[ModuleType, ...] = FAMILIES, device: CudaDevice | None = None
) -> Iterator[CudaCandidate]:
    """All candidates that the families offer for the problem's dtype and pass."""
    for family in families:
        if problem.dtype in getattr(family, "DTYPES", ("float32",)) and problem.rank == getattr(family, "RANK", 2):
            # Persistent blocks of winograd/nonfused depend on the shared memory, too.
            yield from family.candidates(problem, device) if family is winograd_nonfused else family.candidates(problem)
