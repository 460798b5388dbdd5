"""What a forward pass does with its sums before it stores them (kernels/epilogue.cuh): y = act(sums + residual).

Every kernel that stores a forward pass has a twin that finishes the sums in registers: the same kernel, with two more
parameters behind its own. So a family plans a launch as if there were none, and hands it to :func:`with_epilogue`.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

from ..problem import Activation, Pass, Problem
from .layout import EpilogueParams
from .plan import KernelSpec, Launch, PointerSlot

ACTIVATIONS = {Activation.NONE: 0, Activation.RELU: 1, Activation.SILU: 2}
"""Values of ``Activation`` in epilogue.cuh."""


def has_epilogue(problem: Problem) -> bool:
    """Whether the pass does more than to sum and to add a bias. The gradient passes know no epilogue."""
    return problem.kind is Pass.FPROP and (problem.residual or problem.activation is not Activation.NONE)


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


def with_epilogue(problem: Problem, launch: Launch, elements: int, fewer_blocks: int = 0) -> Launch:
    """A launch that stores so many elements of the result, with the epilogue that the problem asks for, if any."""
    if not has_epilogue(problem):
        return launch
    tail = EpilogueParams(activation=ACTIVATIONS[problem.activation])
    pointers = launch.pointers
    if problem.residual:  # laid out as y: what is stored at an offset of y belongs to the same offset of it
        (stored,) = (slot for slot in pointers if slot.buffer == "y")
        at = len(launch.params) + EpilogueParams.residual.offset
        pointers += (PointerSlot(at, "residual", stored.byte_offset),)
    moved = launch.work.dram_bytes + 4 * elements * problem.residual
    return replace(
        launch,
        kernel=kernel_with_epilogue(launch.kernel, fewer_blocks),
        params=launch.params + bytes(tail),
        pointers=pointers,
        work=replace(launch.work, dram_bytes=moved, finished=elements),
    )
