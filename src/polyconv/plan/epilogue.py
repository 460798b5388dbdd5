"""What a forward pass does with its sums before it stores them (kernels/epilogue.cuh): y = act(sums + residual).

Every kernel that stores a forward pass has a twin that finishes the sums in registers: the same kernel, with two more
parameters behind its own. So a family plans as if there were no epilogue, and hands the task that stores the result to
:func:`task_with_epilogue` and the launch that it makes of it to :func:`with_epilogue`.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import lru_cache

from ..problem import Activation, Pass, Problem
from .layout import EpilogueParams
from .plan import KernelSpec, Launch, PointerSlot, Task

ACTIVATIONS = {Activation.NONE: 0, Activation.RELU: 1, Activation.SILU: 2}
"""Values of ``Activation`` in epilogue.cuh."""


def has_epilogue(problem: Problem) -> bool:
    """Whether the pass does more than to sum and to add a bias. The gradient passes know no epilogue."""
    return problem.kind is Pass.FPROP and (problem.residual or problem.activation is not Activation.NONE)


@lru_cache(maxsize=1024)
def kernel_with_epilogue(kernel: KernelSpec, fewer_blocks: int = 0) -> KernelSpec:
    """The twin of a kernel that has an epilogue, for so many fewer blocks at a time where it needs more registers."""
    return replace(
        kernel,
        symbol=f"{kernel.symbol}_epilogue",
        params=f"polyconv::WithEpilogue<{kernel.params}>",
        params_bytes=kernel.params_bytes + ctypes.sizeof(EpilogueParams),
        min_blocks=kernel.min_blocks - fewer_blocks,
        twin=kernel.symbol,
    )


def task_with_epilogue(problem: Problem, task: Task, elements: int, fewer_blocks: int = 0) -> Task:
    """A task that stores so many elements of the result, with the epilogue that the problem asks for, if any."""
    if not has_epilogue(problem):
        return task
    moved = task.work.dram_bytes + problem.element_bytes * elements * problem.residual
    return replace(
        task,
        kernel=kernel_with_epilogue(task.kernel, fewer_blocks),
        work=replace(task.work, dram_bytes=moved, finished=elements),
    )


def with_epilogue(problem: Problem, launch: Launch) -> Launch:
    """The launch of such a task, with the parameters of the epilogue behind its own, if there is one."""
    return with_epilogue_params(problem, launch) if has_epilogue(problem) else launch


def with_epilogue_params(problem: Problem, launch: Launch) -> Launch:
    """A launch with the parameters of the problem's epilogue behind its own, even of one that does nothing."""
    tail = EpilogueParams(activation=ACTIVATIONS[problem.activation])
    pointers = launch.pointers
    if problem.residual:  # laid out as y: what is stored at an offset of y belongs to the same offset of it
        (stored,) = (slot for slot in pointers if slot.buffer == "y")
        at = len(launch.params) + EpilogueParams.residual.offset
        pointers += (PointerSlot(at, "residual", stored.byte_offset),)
    return replace(launch, params=launch.params + bytes(tail), pointers=pointers)
