"""What can go wrong between a plan and a GPU, said so that a person can act on it."""

from __future__ import annotations


class CudaError(RuntimeError):
    """Base of everything that this folder raises."""


class CompileError(CudaError):
    """NVRTC refused a kernel, or cannot compile for this GPU at all."""


class MissingKernelError(CudaError):
    """A kernel is nowhere, and the settings forbid to compile it. The message holds the command that makes it."""


class DriverError(CudaError):
    """No NVIDIA driver on this machine, or a call to it failed."""


class LaunchError(DriverError):
    """A kernel could not be loaded or launched. The message names the kernel, its sizes and the device."""
