"""Epilogue of a forward pass (kernels/common/epilogue.cuh): y = act(sums + residual).

Kernels that store a forward pass have twins that finish the sums in registers, with its parameters appended. A family
plans without an epilogue, and passes the task that stores the result through :func:`task_with_epilogue` and its launch
through :func:`with_epilogue`. A kernel of :func:`finishing` has no twin: it takes the parameters at every call.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32
from dataclasses import replace
from functools import lru_cache
from math import inf

from ...activation import Activation
from ...problem import Pass, Problem
from .kernel_params import Params, pointer
from .plan import KernelSpec, Launch, PointerSlot, Task


class EpilogueParams(Params):
    """Fields that ``WithEpilogue`` (common/epilogue.cuh) appends to a kernel's own parameters."""

    _fields_ = (("residual", pointer), ("activation", c_int32), ("a", c_float), ("b", c_float))


FUNCTIONS = ("none", "clamp", "leaky_relu", "sigmoid", "swish", "hardsigmoid", "hardswish", "gelu")
"""``Activation`` in common/epilogue.cuh."""
_FACTS = {
    f"int(polyconv::Activation::k{name.title().replace('_', '')})": number for number, name in enumerate(FUNCTIONS)
}
_SPECIAL = {
    "relu": ("clamp", 0.0, inf),
    "silu": ("swish", 1.0, 0.0),
    "sigmoid": ("sigmoid", 1.0, 0.0),
    "gelu_tanh": ("swish", 1.5957691216057308, 0.044715 * 1.5957691216057308),
}
"""Activation -> function of a kernel and its parameters, where these are not the activation's own. The number is
sqrt(8 / pi): 1 + tanh(z) is twice the sigmoid of 2 z."""


def function_of(activation: Activation) -> tuple[str, float, float]:
    """Function of a kernel for an activation, one of ``FUNCTIONS``, and its parameters ``a`` and ``b``."""
    return _SPECIAL.get(activation, (activation.kernel, *activation.ab))


def has_epilogue(problem: Problem) -> bool:
    """Whether the problem has a residual or an activation. Gradient passes have no epilogue."""
    return problem.kind is Pass.FPROP and (problem.residual or problem.activation is not Activation.NONE)


@lru_cache(maxsize=1024)
def kernel_with_epilogue(kernel: KernelSpec, fewer_blocks: int = 0) -> KernelSpec:
    """Twin of a kernel with an epilogue. ``fewer_blocks`` lowers the launch bound where it needs more registers."""
    return replace(
        kernel,
        symbol=f"{kernel.symbol}_epilogue",
        params=f"polyconv::WithEpilogue<{kernel.params}>",
        params_bytes=kernel.params_bytes + ctypes.sizeof(EpilogueParams),
        min_blocks=kernel.min_blocks - fewer_blocks,
        facts=(*kernel.facts, *_FACTS.items()),
        twin=kernel.symbol,
    )


def finishing(kernel: KernelSpec, fewer_blocks: int = 0) -> KernelSpec:
    """The kernel as a single instance that serves with and without an epilogue, where testing for one costs little."""
    return replace(kernel_with_epilogue(kernel, fewer_blocks), symbol=kernel.symbol, twin=kernel.twin)


def _takes_epilogue(kernel: KernelSpec) -> bool:
    return kernel.params.startswith("polyconv::WithEpilogue")


def task_with_epilogue(problem: Problem, task: Task, elements: int, fewer_blocks: int = 0) -> Task:
    """The task that stores ``elements`` of the result, with the problem's epilogue, if any."""
    if not has_epilogue(problem):
        return task
    moved = task.work.dram_bytes + problem.element_bytes * elements * problem.residual
    kernel = task.kernel
    return replace(
        task,
        kernel=kernel if _takes_epilogue(kernel) else kernel_with_epilogue(kernel, fewer_blocks),
        work=replace(task.work, dram_bytes=moved, finished=elements),
    )


def with_epilogue(problem: Problem, launch: Launch) -> Launch:
    """The launch with the epilogue's parameters appended, if its kernel takes them.

    Pointers at the end of the kernel's own parameters may be missing in the launch.
    """
    if not _takes_epilogue(launch.kernel):
        return launch
    function, a, b = function_of(problem.activation)
    tail = EpilogueParams(activation=FUNCTIONS.index(function), a=a, b=b)
    params = launch.params.ljust(launch.kernel.params_bytes - ctypes.sizeof(EpilogueParams), b"\0")
    pointers = launch.pointers
    if problem.residual:  # same layout as y, so the same byte offset
        (stored,) = (slot for slot in pointers if slot.buffer == "y")
        at = len(params) + EpilogueParams.residual.offset
        pointers += (PointerSlot(at, "residual", stored.byte_offset),)
    return replace(launch, params=params + bytes(tail), pointers=pointers)
