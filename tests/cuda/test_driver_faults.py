"""Failing driver calls: an error names the call and the reason, and later calls give correct results."""

from __future__ import annotations

import os
import traceback
from importlib import import_module

import pytest
import torch

import gpu_emulator._core
import polyconv
from polyconv.backend import override
from polyconv.cuda import CudaError
from polyconv.cuda.jit.compile import compiler_id
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

OUT_OF_MEMORY, ILLEGAL_ADDRESS, CAPTURING, UNNAMED = 2, 700, 900, 4321

WORDS = {
    "cuInit": "the NVIDIA driver does not start",
    "cuDriverGetVersion": "cuDriverGetVersion failed",
    "cuDeviceGet": "cuDeviceGet failed",
    "cuDeviceGetName": "cuDeviceGetName failed",
    "cuDeviceGetAttribute": "cuDeviceGetAttribute failed",
    "cuDevicePrimaryCtxRetain": "cuDevicePrimaryCtxRetain failed",
    "cuCtxPushCurrent_v2": "cuCtxPushCurrent failed",
    "cuCtxPopCurrent_v2": "cuCtxPopCurrent failed",
    "cuThreadExchangeStreamCaptureMode": "cuThreadExchangeStreamCaptureMode failed",
    "cuLibraryLoadData": "could not be loaded on device 0",
    "cuLibraryGetKernel": "could not be loaded on device 0",
    "cuKernelGetFunction": "could not be loaded on device 0",
    "cuFuncLoad": "could not be loaded on device 0",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": "cuOccupancyMaxActiveBlocksPerMultiprocessor failed",
    "cuLaunchKernel": "when launching",
}


def test_every_call_that_may_fail() -> None:
    """Each failure in a process that has not used the driver yet; the next convolution must not find partial state."""
    _in_processes([(function, OUT_OF_MEMORY) for function in WORDS])


def test_what_the_driver_said_is_told() -> None:
    """Also if the bindings are older than the driver, do not know the error, and raise their own."""
    unnamed = [(function, UNNAMED) for function in ("cuInit", "cuDeviceGet", "cuCtxPushCurrent_v2")]
    _in_processes([*unnamed, *(("cuLaunchKernel", code) for code in (ILLEGAL_ADDRESS, CAPTURING, UNNAMED))])


def test_a_context_that_nobody_names_is_made_current() -> None:
    """Whichever context was current: launches need this device's."""
    _in_processes([("cuCtxGetCurrent", UNNAMED)])


def _in_processes(faults: list[tuple[str, int]]) -> None:
    # A separate environment means a separate process, which has not used the driver.
    run_in_virtual_gpu(_fork_each, faults, timeout=500, environment={"POLYCONV_TUNING_FILE": "off"})


def _fork_each(faults: list[tuple[str, int]]) -> None:
    """Fork after all imports and before the first driver call: a new process would take seconds."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    import_module("cuda.bindings.driver")
    compiler_id()
    gpu_emulator._core.library()
    for function, code in faults:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _fails_once(function, code)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0, f"after {function} has failed with {code}"


def _fails_once(function: str, code: int) -> None:
    names = {
        OUT_OF_MEMORY: "OUT_OF_MEMORY",
        ILLEGAL_ADDRESS: "ILLEGAL_ADDRESS",
        CAPTURING: "STREAM_CAPTURE_UNSUPPORTED",
    }
    said = f"CUDA_ERROR_{names[code]}" if code in names else f"CUDA error {code} "
    x, w = torch.randn(1, 8, 6, 6), torch.randn(8, 8, 1, 1)
    with VirtualGpu() as gpu:
        gpu.fail(function, 1, 1, code)
        if function in WORDS:
            with pytest.raises(CudaError) as raised, override("cpu", gpu.backend()):
                polyconv.conv2d(x, w)
            assert WORDS[function] in str(raised.value)
            assert said in str(raised.value)
        else:
            with override("cpu", gpu.backend()):
                polyconv.conv2d(x, w)
        assert gpu.repair() == 1
        with override("cpu", gpu.backend()):
            y = polyconv.conv2d(x, w)
    # Not torch.testing.assert_close, whose first call imports DTensors, most of the time of a process like this one.
    assert torch.allclose(y.double(), torch.nn.functional.conv2d(x.double(), w.double()), rtol=1e-4, atol=1e-4)
