"""What can go wrong between a plan and a GPU, said so that a person can act on it."""

from __future__ import annotations


class CudaError(RuntimeError):
    """Base of everything that this folder raises.

    Args:
        message: the words.
        symbol: the kernel that it is about, if it is about one.
        status: what the driver returned, if it was the driver.
    """

    def __init__(self, message: str, *, symbol: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.symbol = symbol
        self.status = status


class CompileError(CudaError):
    """NVRTC refused a kernel, or cannot compile for this GPU at all."""


class RefusedKernelError(CompileError):
    """NVRTC refused one kernel. The message holds the compiler's own words."""


class MissingKernelError(CudaError):
    """A kernel is nowhere, and the settings forbid to compile it. The message holds the command that makes it."""


class DriverError(CudaError):
    """No NVIDIA driver on this machine, or a call to it failed."""


class LaunchError(DriverError):
    """A kernel could not be loaded or launched. The message names the kernel, its sizes and the device."""


class ContextLostError(LaunchError):
    """The GPU stopped working for this process: every later call fails, whatever is launched."""


class CaptureError(CudaError):
    """A convolution first runs while a CUDA graph is captured, when nothing may be loaded. The message says which."""
