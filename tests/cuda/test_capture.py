"""CUDA graph capture on a fake driver that enforces its rules: warm calls can be captured, cold ones raise an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import polyconv
from polyconv.autotune import preferences
from polyconv.backend import override
from polyconv.cuda import CaptureError, DriverError, driver
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.compile import compile_kernel
from polyconv.cuda.planner.plan import KernelSpec
from polyconv.problem import Problem
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.example import KERNELS, axpy_launch, axpy_plan, axpy_spec
from virtual_gpu.gpu import VirtualBackend, VirtualGpu
from virtual_gpu.streams import GLOBAL, RELAXED, THREAD_LOCAL, captured, new_stream

PROBLEM = Problem.make("fprop", (1, 1, 1, 1000), (1, 1, 1, 1))


def cubin(spec: KernelSpec) -> bytes:
    return compile_kernel(spec, "sm_70", include_dirs=[KERNELS])


def load_directly(spec: KernelSpec) -> None:
    """A launch that polyconv never makes."""
    with driver.device(0).activate():
        driver.call("cuLibraryLoadData", cubin(spec), [], [], 0, [], [], 0)


def backend_of(gpu: VirtualGpu, spec: KernelSpec, folder: Path, stream: int) -> VirtualBackend:
    """A backend whose plan launches a kernel of the tests."""
    cache = KernelCache(folder, include_dirs=[KERNELS])
    launch = axpy_launch(1000, 2.0, spec=spec)
    return gpu.backend(planner=lambda problem, _: axpy_plan(problem, (launch,)), cache=cache, stream=lambda: stream)


def convolve(backend: VirtualBackend) -> None:
    backend.run(PROBLEM, {"x": torch.ones(PROBLEM.x_shape), "y": torch.zeros(PROBLEM.y_shape)})


# ---- the fake driver enforces the rules


def test_the_driver_refuses_to_load_while_a_graph_is_captured() -> None:
    run_in_virtual_gpu(_load_in_capture)


def _load_in_capture() -> None:
    spec, stream = axpy_spec(32), new_stream()
    with pytest.raises(DriverError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        _spoil(stream, lambda: load_directly(spec))
    with pytest.raises(DriverError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
        _spoil(stream, lambda: _in_a_thread(lambda: load_directly(spec)))
    for mode in (THREAD_LOCAL, RELAXED):
        with captured(stream, mode):
            _in_a_thread(lambda: load_directly(spec))
    with captured(stream, RELAXED):
        load_directly(spec)
    # Lazy loading would load the code at the launch, which is too late.
    with driver.device(0).activate():
        library = driver.call("cuLibraryLoadData", cubin(spec), [], [], 0, [], [], 0)
        kernel = driver.call("cuLibraryGetKernel", library, spec.symbol.encode())
        function = driver.bindings().CUfunction(int(kernel))
        with pytest.raises(DriverError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            _spoil(
                stream, lambda: driver.call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, stream, _parameters(), 0)
            )


def _parameters() -> int:
    buffer = (driver.ctypes.c_byte * 64)()
    pointers = (driver.ctypes.c_void_p * 1)(driver.ctypes.addressof(buffer))
    _kept.append((buffer, pointers))
    return driver.ctypes.addressof(pointers)


_kept: list[object] = []


def _spoil(stream: int, action: Callable[[], None]) -> None:
    with captured(stream), pytest.raises(DriverError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        action()


def _in_a_thread(action: Callable[[], None]) -> None:
    """Raises the thread's exception here."""
    raised: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


# ---- polyconv keeps the rules


def test_what_ran_once_can_be_captured(tmp_path: Path) -> None:
    run_in_virtual_gpu(_run_then_capture, tmp_path)


def _run_then_capture(folder: Path) -> None:
    stream = new_stream()
    with VirtualGpu() as gpu:
        backend = backend_of(gpu, axpy_spec(function="copy", threads=64), folder, stream)
        convolve(backend)
        for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
            with captured(stream, mode):
                convolve(backend)
        assert [launch.stream for launch in gpu.launches] == 4 * [stream]


def test_what_was_only_prepared_can_be_captured(tmp_path: Path) -> None:
    """No launch has used the kernel: it was loaded when prepared, as ``polyconv.warmup`` does."""
    run_in_virtual_gpu(_prepare_then_capture, tmp_path)


def _prepare_then_capture(folder: Path) -> None:
    stream = new_stream()
    with VirtualGpu() as gpu:
        backend = backend_of(gpu, axpy_spec(function="copy", threads=96), folder, stream)
        backend.prepare(preferences.plan(backend, PROBLEM))
        with captured(stream):
            convolve(backend)
        assert len(gpu.launches) == 1


def test_a_first_use_in_a_capture_says_what_to_do(tmp_path: Path) -> None:
    run_in_virtual_gpu(_first_use_in_capture, tmp_path)


def _first_use_in_capture(folder: Path) -> None:
    """The capture stays valid, nothing is compiled, and the call works afterwards."""
    stream, spec = new_stream(), axpy_spec(function="copy", threads=160)
    with VirtualGpu() as gpu:
        backend = backend_of(gpu, spec, folder / "cache", stream)
        with captured(stream), pytest.raises(CaptureError) as raised:
            convolve(backend)
        assert str(raised.value) == (
            "fprop 1x1x1x1000, 1 channels, kernel 1x1 runs for the first time while a CUDA graph is captured, and "
            "kernels cannot be loaded then (copy_160): run the model once before capture, on tensors of the same "
            "shapes, or call polyconv.warmup(model, x)"
        )
        assert not (folder / "cache").exists()
        convolve(backend)
        with captured(stream):
            convolve(backend)
        # Another shape on loaded kernels needs no forbidden call.
        other = Problem.make("fprop", (1, 1, 1, 1001), (1, 1, 1, 1))
        with captured(stream):
            backend.prepare(preferences.plan(backend, other))


def test_a_first_use_beside_a_capture_does_not_spoil_it(tmp_path: Path) -> None:
    run_in_virtual_gpu(_first_use_in_another_thread, tmp_path)


def _first_use_in_another_thread(folder: Path) -> None:
    stream, own = new_stream(), new_stream()
    with VirtualGpu() as gpu:
        backend = backend_of(gpu, axpy_spec(function="copy", threads=192), folder, own)
        with captured(stream):
            _in_a_thread(lambda: convolve(backend))
        assert len(gpu.launches) == 1
    mode = driver.bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert driver.call("cuThreadExchangeStreamCaptureMode", mode) == mode  # restored


def test_a_model_that_was_warmed_up_is_captured() -> None:
    run_in_virtual_gpu(_warm_then_capture, environment={"POLYCONV_TUNING_FILE": "off"})


def _warm_then_capture() -> None:
    """Forward and backward without a preceding step, in a process that has loaded nothing."""
    stream, model, x = new_stream(), polyconv.Conv2d(4, 4, 3), torch.randn(1, 4, 6, 6, requires_grad=True)
    with VirtualGpu() as gpu, override("cpu", gpu.backend(stream=lambda: stream)):
        with captured(stream), pytest.raises(CaptureError, match="fprop 1x4x6x6, 4 channels, kernel 3x3"):
            model(x)
        polyconv.warmup(model, x, quiet=True)
        with captured(stream):
            model(x).square().sum().backward()
        assert len(gpu.launches) >= 5
