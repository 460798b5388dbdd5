"""CUDA backend: plan, compile (NVRTC), cache, load, launch. The only package that calls CUDA.

========================  ==============================================================================
:mod:`~.backend`          run a problem: plan, workspace, launches, on torch's current stream
:mod:`~.launch`           enqueue the launches of a plan, by native code or from Python
:mod:`~.driver`           load a cubin, launch a kernel; every driver call is checked there
:mod:`~.device`           the planner's description of a GPU, read from the driver
:mod:`~.weight_cache`     packed and transformed weights of frozen layers
:mod:`~.compile_log`      log line about kernels that were compiled during a call
:mod:`~.jit`              compile a :class:`~polyconv.cuda.planner.plan.KernelSpec`; cubins on disk, bundles
:mod:`~.planner`          plan a problem, without a GPU
========================  ==============================================================================

Importing this package imports no CUDA library. The CUDA packages come with ``polyconv[cu12]`` or ``polyconv[cu13]``.
"""

from __future__ import annotations

from .errors import (
    CaptureError,
    CompileError,
    ContextLostError,
    CudaError,
    DriverError,
    LaunchError,
    MissingKernelError,
    RefusedKernelError,
)

__all__ = [
    "CaptureError",
    "CompileError",
    "ContextLostError",
    "CudaError",
    "DriverError",
    "LaunchError",
    "MissingKernelError",
    "RefusedKernelError",
]
