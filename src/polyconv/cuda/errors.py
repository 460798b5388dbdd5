"""Errors of the CUDA backend. Each message says what to do."""

from __future__ import annotations


class CudaError(RuntimeError):
    """Base class. ``symbol``: the kernel at issue, if any; ``status``: the driver's, if a driver call failed."""

    def __init__(self, message: str, *, symbol: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.symbol = symbol
        self.status = status


class CompileError(CudaError):
    """NVRTC rejected a kernel, or cannot compile for this GPU at all."""


class RefusedKernelError(CompileError):
    """NVRTC rejected one kernel. The message contains the compiler's log."""


class MissingKernelError(CudaError):
    """A kernel is not on disk, and the settings forbid compiling. The message contains the command that builds it."""


class DriverError(CudaError):
    """No NVIDIA driver on this machine, or a call to it failed."""


class LaunchError(DriverError):
    """A kernel could not be loaded or launched. The message names the kernel, its sizes and the device."""


class ContextLostError(LaunchError):
    """The GPU context is lost: every later call of this process fails."""


class CaptureError(CudaError):
    """A convolution runs first during CUDA graph capture, when kernels cannot be loaded. The message names it."""
