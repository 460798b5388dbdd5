"""A whole plan by one native call (``csrc/cuda``): what reaches the driver, refusals, and the Python fallback."""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from test_fallback import NOT_STRICT, _fails_after_writing, _goes_on

import polyconv
from entered import entered
from polyconv.backend import override
from polyconv.cuda import DriverError, driver
from polyconv.cuda import launch as cuda_launch
from polyconv.cuda.jit.compile import compile_kernel
from polyconv.cuda.launch import Enqueue, enqueuer
from polyconv.cuda.planner.plan import Launch, PointerSlot
from polyconv.tools.doctor import environment
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.example import KERNELS, axpy_launch, axpy_spec
from virtual_gpu.gpu import LaunchRecord, VirtualGpu, record_only
from virtual_gpu.threads import assert_addresses_are_not_mixed

native_only = pytest.mark.skipif(cuda_launch.why_absent() is not None, reason="built without the native part for CUDA")
WAYS = [pytest.param(False, id="native", marks=native_only), pytest.param(True, id="python")]
OUT_OF_RESOURCES, UNNAMED = 701, 4321


class At:
    """The parts of a tensor that launching uses."""

    def __init__(self, address: int) -> None:
        self.data_ptr: Callable[[], int] = lambda: address


@contextmanager
def without_native(absent: bool) -> Iterator[None]:
    """As in a build without the native part."""
    if absent:
        with patch.object(cuda_launch, "why_absent", lambda: "built without"):
            yield
    else:
        yield


def prepared(*launches: Launch, index: int = 0) -> Enqueue:
    device = driver.device(index)
    code = {spec: compile_kernel(spec, "sm_70", include_dirs=[KERNELS]) for spec in {one.kernel for one in launches}}
    return enqueuer(
        device, tuple(driver.PreparedLaunch(device.load(one.kernel, code[one.kernel]), one) for one in launches)
    )


def three_launches() -> tuple[Launch, ...]:
    slots = (PointerSlot(0, "workspace", 4096), PointerSlot(8, "weights", 16))
    return (
        axpy_launch(1000, 2.5),
        replace(axpy_launch(8, 1.0, spec=axpy_spec(32)), pointers=slots),
        replace(axpy_launch(64, 3.0, shared=96 * 1024), pointers=(PointerSlot(0, "bias", 32), PointerSlot(8, "y", 8))),
    )


# ---- what reaches the driver


@pytest.mark.parametrize("by_python", WAYS)
def test_all_of_a_plan_arrives(by_python: bool) -> None:
    launches = three_launches()
    seen, stream = run_in_virtual_gpu(_enqueue_on_a_stream, launches, by_python)
    addresses = {"x": 0x1000, "y": 1 << 63, "workspace": 0x10000, "weights": 0x20000}
    assert [one.name for one in seen] == ["axpy_128", "axpy_32", "axpy_128"]
    for launch, one in zip(launches, seen, strict=True):
        assert (one.grid, one.block, one.dynamic_shared) == (launch.grid, launch.block, launch.dynamic_shared)
        assert (one.stream, one.device) == (stream, 0)
        assert one.params == launch.bind(addresses)
    assert struct.unpack_from("<QQ", seen[2].params) == (0, (1 << 63) + 8)  # no bias


def _enqueue_on_a_stream(launches: tuple[Launch, ...], by_python: bool) -> tuple[list[LaunchRecord], int]:
    with VirtualGpu(record_only) as gpu, without_native(by_python):
        enqueue_all = prepared(*launches)
        with driver.device(0).activate():
            stream = int(driver.call("cuStreamCreate", 1))
        tensors: Any = {"x": At(0x1000), "y": At(1 << 63)}
        assert enqueue_all(0, 3, stream, tensors, 0x10000, 0x20000) is None
        return gpu.launches, stream


@pytest.mark.parametrize("by_python", WAYS)
def test_a_part_of_a_plan(by_python: bool) -> None:
    names = run_in_virtual_gpu(_enqueue_parts, three_launches(), by_python)
    assert names == [[], ["axpy_128"], ["axpy_32", "axpy_128"], []]


def _enqueue_parts(launches: tuple[Launch, ...], by_python: bool) -> list[list[str]]:
    found = []
    with without_native(by_python):
        enqueue_some = prepared(*launches)
    for first, last in ((0, 0), (0, 1), (1, 3), (3, 3)):
        with VirtualGpu(record_only) as gpu:
            assert enqueue_some(first, last, 0, {}, 0, 0) is None
            found.append([one.name for one in gpu.launches])
    return found


@pytest.mark.parametrize("by_python", WAYS)
def test_threads_do_not_mix_their_addresses(by_python: bool) -> None:
    run_in_virtual_gpu(_many_threads, by_python)


def _many_threads(by_python: bool) -> None:
    with VirtualGpu(record_only) as gpu, without_native(by_python):
        enqueue_both = prepared(axpy_launch(8, 1.0), axpy_launch(8, 2.0))

        def launch(address: int) -> None:
            tensors: Any = {"x": At(address), "y": At(address)}
            assert enqueue_both(0, 2, 0, tensors, 0, 0) is None

        assert_addresses_are_not_mixed(gpu, launch, 100)


@pytest.mark.parametrize("by_python", WAYS)
def test_the_context_is_made_current_and_put_back(by_python: bool) -> None:
    run_in_virtual_gpu(_two_devices, by_python, environment={"FAKE_CUDA_DEVICES": "v100,v100"})


def _two_devices(by_python: bool) -> None:
    with VirtualGpu(record_only) as gpu, without_native(by_python):
        for index in (0, 1):
            enqueue_one = prepared(axpy_launch(8, 1.0), index=index)
            assert enqueue_one(0, 1, 0, {}, 0, 0) is None  # no context is current
            with driver.device(1 - index).activate():
                assert enqueue_one(0, 1, 0, {}, 0, 0) is None
                assert int(driver.call("cuCtxGetDevice")) == 1 - index
        assert [seen.device for seen in gpu.launches] == [0, 0, 1, 1]


@native_only
def test_it_is_linked_with_nothing_of_cuda_or_torch() -> None:
    path = import_module("polyconv.cuda._native").__file__
    told = subprocess.run(["readelf", "--dynamic", str(path)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", told))
    loaders = ("ld-linux-x86-64", "ld-linux-aarch64")
    assert {name.split(".")[0] for name in needed} <= {"libstdc++", "libgcc_s", "libm", "libc", *loaders}


# ---- refusals


@pytest.mark.parametrize("by_python", WAYS)
def test_what_the_driver_refused_is_told(by_python: bool) -> None:
    run_in_virtual_gpu(_refused, by_python)


def _refused(by_python: bool) -> None:
    with VirtualGpu(record_only) as gpu, without_native(by_python):
        enqueue_all = prepared(*three_launches())
        for code in (OUT_OF_RESOURCES, UNNAMED):
            gpu.launches.clear()
            gpu.fail(driver.LAUNCH, 2, 1, code)
            assert enqueue_all(0, 3, 0, {}, 0, 0) == (driver.LAUNCH, 1, code)
            assert gpu.repair() == len(gpu.launches) == 1
            with pytest.raises(DriverError, match="cuCtxGetDevice failed: CUDA_ERROR_INVALID_CONTEXT"):
                driver.call("cuCtxGetDevice")  # restored nevertheless


@native_only
def test_contexts_that_are_refused() -> None:
    run_in_virtual_gpu(_refused_contexts)


def _refused_contexts() -> None:
    with VirtualGpu(record_only) as gpu:
        enqueue_one = prepared(axpy_launch(8, 1.0))
        for function, launched in (("cuCtxPushCurrent", 0), ("cuCtxPopCurrent", 1)):
            gpu.launches.clear()
            gpu.fail(f"{function}_v2", 1, 1, 2)
            assert enqueue_one(0, 1, 0, {}, 0, 0) == (function, launched, 2)
            assert len(gpu.launches) == launched
            gpu.repair()
        driver.call("cuCtxPopCurrent")  # a launch cannot be taken back


@native_only
def test_wrong_arguments_are_errors_of_python() -> None:
    run_in_virtual_gpu(_wrong_arguments)


def _wrong_arguments() -> None:
    enqueue_one: Any = prepared(axpy_launch(8, 1.0))
    for arguments, error in (
        ((0, 1, 0, {}, 0), TypeError),
        ((0, 1, 0, [], 0, 0), TypeError),
        ((0, 1, "stream", {}, 0, 0), TypeError),
        ((0, 1, -1, {}, 0, 0), OverflowError),
        ((0, 1, 0, {"x": 5}, 0, 0), AttributeError),
        ((0, 2, 0, {}, 0, 0), IndexError),
        ((1, 0, 0, {}, 0, 0), IndexError),
    ):
        with pytest.raises(error):
            enqueue_one(*arguments)
    launches: Any = type(enqueue_one.__self__)
    functions, launch = driver.entry_points(), (1, (1, 1, 1), (1, 1, 1), 0, bytes(16), ((0, "x", 0),))
    for wrong, words in (
        ((*launch[:4], bytes(5000), ()), "5000 bytes of parameters; a kernel takes at most 4096"),
        ((*launch[:5], ((9, "x", 0),)), "an address at byte 9 of 16 bytes of parameters"),
        ((*launch[:5], tuple((0, str(n), 0) for n in range(15))), "more buffers than any kernel has"),
    ):
        with pytest.raises(ValueError, match=words):
            launches(functions, 0, (wrong,))
    with pytest.raises(TypeError):
        launches(functions[:3], 0, (launch,))


# ---- without the native part


def test_the_way_on_without_the_native_part() -> None:
    run_in_virtual_gpu(_goes_on_by_python, environment=NOT_STRICT, timeout=300)


def _goes_on_by_python() -> None:
    with without_native(True):
        _goes_on(driver.LAUNCH, OUT_OF_RESOURCES)
        with pytest.raises(DriverError, match="OUT_OF_RESOURCES"):
            _fails_after_writing()


@pytest.mark.parametrize("by_python", WAYS)
def test_doctor_says_which(by_python: bool) -> None:
    found = run_in_virtual_gpu(_doctor, by_python)
    assert found == (("warning", "one by one, from Python: built without") if by_python else ("ok", "a plan at a time"))


def _doctor(by_python: bool) -> tuple[str, str]:
    with without_native(by_python):
        (found,) = (one for one in environment.findings() if one.name == "launches")
    return found.state.value, found.text


# ---- cost


@native_only
@pytest.mark.parametrize("frozen", [False, True])
def test_a_warm_call_is_short(frozen: bool) -> None:
    """Functions entered per call do not depend on the number of launches (time: ``benchmarks/gpu/overhead.py``)."""
    run_in_virtual_gpu(_warm_call, frozen)


def _warm_call(frozen: bool) -> None:
    conv, x = polyconv.Conv2d(8, 8, 1, bias=False), torch.randn(1, 8, 6, 6)
    if frozen:
        polyconv.freeze(conv)
    with VirtualGpu(record_only) as gpu, override("cpu", gpu.backend()), torch.no_grad():
        conv(x)
        found = entered(lambda: conv(x))
    of_cuda = [name.removeprefix("polyconv.cuda.") for name in found if ".cuda." in name]
    if frozen:
        assert of_cuda == [
            "backend.__call__",
            "backend.enqueue",
            "backend._enqueue_keeping",
            "driver.is_capturing",
            "weight_cache.find",
            "weight_cache.is_of",
        ]
    else:
        assert of_cuda == ["backend.__call__", "backend.enqueue"]
    assert len(found) - len(of_cuda) <= 9, found
