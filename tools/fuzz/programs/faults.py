"""Failing driver calls on a virtual V100: an error names the call, and later calls give correct results.

Needs polyconv's repository, for the fake driver: PYTHONPATH=src:tests:tools.
"""

import ctypes
import os
import threading

import torch
import torch.nn.functional as F

import polyconv
from fake_cuda.library import driver_folder
from polyconv import settings
from polyconv.backend import override
from polyconv.cuda import CudaError
from virtual_gpu.gpu import VirtualGpu

os.environ["POLYCONV_STRICT"] = "on"  # a kernel that fails is an error, without a fallback
ctypes.CDLL(str(driver_folder() / "libcuda.so.1"))  # libcuda.so.1 is this library from now on

KINDS = {
    "small": ((1, 4, 6, 7), (5, 4, 3, 3), {"padding": 1}),
    "depthwise": ((1, 8, 9, 10), (8, 1, 3, 3), {"groups": 8, "padding": 1}),
    "pointwise": ((1, 8, 6, 6), (8, 8, 1, 1), {}),
    "strided": ((1, 4, 9, 9), (6, 4, 3, 3), {"stride": 2, "padding": 1}),
    "fast": ((1, 8, 24, 40), (16, 8, 5, 9), {"padding": (2, 4), "dilation": (2, 3)}),
    "shared": ((1, 16, 40, 40), (32, 16, 3, 3), {}),
}


class Convolution:
    def __init__(self, kind):
        torch.manual_seed(0)
        x_shape, w_shape, self.moves = KINDS[kind]
        self.leaves = [torch.randn(shape).requires_grad_() for shape in (x_shape, w_shape, w_shape[:1])]
        exact = F.conv2d(*(leaf.double() for leaf in self.leaves), **self.moves)
        self.dy = torch.randn(exact.shape)
        self.exact = [exact.detach(), *torch.autograd.grad(exact, self.leaves, self.dy.double())]

    def check(self):
        y = polyconv.conv2d(*self.leaves, **self.moves)
        for got, exact in zip([y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)], self.exact, strict=True):
            excess = (got.double() - exact).abs().max() / exact.abs().max()
            assert excess < 3e-4, f"strays by {float(excess)} of the largest element"


def named(error, function, code):
    """The error message names the call or its purpose, and the driver's error."""
    words = str(error)
    what = function.removesuffix("_v2")
    assert what in words or "launching" in words or "does not start" in words, f"it does not say what failed: {words}"
    says = "CUDA_ERROR_" in words or f"CUDA error {code}" in words
    assert says, f"it does not say what the driver said: {words}"


def fail(function, nth, count, code, kind, when, threads=1):
    """This many calls of a function fail, from the n-th on: from the start, after a backend's or a convolution's."""
    convolution = Convolution(kind)
    with VirtualGpu() as gpu:
        backend = None
        if when != "start":
            backend = gpu.backend()
        if when == "warm":
            with override("cpu", backend):
                convolution.check()
        gpu.fail(function, nth, count, code)
        seen = []

        def attempt():
            try:
                with override("cpu", backend or gpu.backend()):
                    convolution.check()
            except CudaError as error:
                seen.append(error)
            except BaseException as error:
                seen.append(error)
                raise

        if threads == 1:
            attempt()
        else:
            run_together(attempt, threads)
        failed = gpu.repair()
        for error in seen:
            assert isinstance(error, CudaError), f"{type(error).__name__} and no CudaError: {error}"
            named(error, function, code)
        if failed and not seen and function not in HARMLESS.get(when, ()):
            raise AssertionError(f"{function} failed without an error")
        for used in (backend, gpu.backend()):
            if used is not None:
                with override("cpu", used):
                    convolution.check()


HARMLESS = {
    "start": ("cuCtxGetCurrent",),  # without an answer the context is still made current
    "backend": ("cuCtxGetCurrent", "cuInit"),  # by then only NVRTC calls cuInit, and tolerates its failure
    "warm": ("cuCtxGetCurrent",),
}
"""Calls that may fail silently, by time of failure."""


def run_together(step, threads):
    unexpected = []

    def guarded():
        try:
            step()
        except BaseException as error:
            unexpected.append(error)

    started = [threading.Thread(target=guarded) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if unexpected:
        raise unexpected[0]


def without_memory(nth, kind):
    """The n-th workspace cannot be allocated: torch's own error, and the next call works."""
    convolution = Convolution(kind)
    with VirtualGpu() as gpu, settings.use(workspace_bytes=2**20):
        backend, asked = gpu.backend(), 0
        allocate = backend.allocate

        def refuse(size):
            nonlocal asked
            asked += 1
            if asked == nth:
                raise torch.OutOfMemoryError("CUDA out of memory: a test")
            return allocate(size)

        backend.allocate = refuse
        with override("cpu", backend):
            try:
                convolution.check()
            except torch.OutOfMemoryError:
                convolution.check()
