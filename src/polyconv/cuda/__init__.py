"""From a plan to a running GPU: compile (NVRTC), cache, load, launch. The only folder that knows CUDA.

========================  ==============================================================================
:mod:`~.compile`          a :class:`~polyconv.plan.plan.KernelSpec` to a cubin
:mod:`~.cubin`            what a cubin says about itself: registers, spills, shared memory, parameters
:mod:`~.fingerprint`      what makes two cubins the same kernel, or the same binary
:mod:`~.entries`          cubins as folders on disk
:mod:`~.cache`            the machine's cubins, each compiled once
:mod:`~.bundle`           cubins that were compiled elsewhere; :mod:`~.bundle_writer` makes such a folder
:mod:`~.first_use`        what was compiled while somebody waited for it, and the line that says so
:mod:`~.device`           what the driver says about a GPU, in the planner's words
:mod:`~.driver`           load a cubin, launch a kernel; every driver call is checked here
:mod:`~.backend`          runs a problem: plan, workspace, launches, on torch's current stream
========================  ==============================================================================

Importing this package imports no CUDA library; using it does. The CUDA packages come with ``polyconv[cu12]`` or
``polyconv[cu13]``.
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
