"""The launch path on the virtual V100: what reaches the driver, refusals, and error messages."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpu_emulator
import polyconv
from polyconv.arguments import Geometry
from polyconv.backend import backend_for
from polyconv.cuda import DriverError, LaunchError, driver
from polyconv.cuda.backend import CudaBackend
from polyconv.cuda.device import describe
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.compile import compile_kernel
from polyconv.cuda.planner import plan_cuda
from polyconv.cuda.planner.plan import KernelSpec, Launch, Plan, PointerSlot
from polyconv.dispatch import problem_of
from polyconv.model import aot
from polyconv.model.explain import explain_plans
from polyconv.problem import Pass, Problem
from polyconv.tools.doctor import environment
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.example import KERNELS, THREADS, axpy_launch, axpy_plan, axpy_spec
from virtual_gpu.gpu import LaunchRecord, VirtualGpu, record_only
from virtual_gpu.streams import new_stream
from virtual_gpu.threads import assert_addresses_are_not_mixed

PROBLEM = Problem.make("fprop", (1, 1, 1, 1000), (1, 1, 1, 1))
KIB = 1024


# ---- helpers that run in the child ----------------------------------------------------------------------------------


def cubin(spec: KernelSpec) -> bytes:
    return compile_kernel(spec, "sm_70", include_dirs=[KERNELS])


def prepare(launch: Launch, index: int = 0) -> driver.PreparedLaunch:
    return driver.PreparedLaunch(driver.device(index).load(launch.kernel, cubin(launch.kernel)), launch)


def launch_once(launch: Launch, addresses: dict[str, int], stream: int = 0) -> LaunchRecord:
    """Launch on a GPU that computes nothing; returns the recorded launches."""
    with VirtualGpu(record_only) as gpu:
        prepared = prepare(launch)
        with driver.device(0).activate():
            prepared(addresses, stream)
        return gpu.launches[-1]


# ---- what reaches the driver ----------------------------------------------------------------------------------------


def test_grid_block_shared_stream_and_bytes_arrive() -> None:
    seen, stream = run_in_virtual_gpu(_launch_on_a_stream)
    assert seen.name == "axpy_128"
    assert (seen.grid, seen.block) == ((8, 1, 1), (THREADS, 1, 1))
    assert seen.dynamic_shared == 512
    assert seen.cubin == cubin(axpy_spec())  # the driver has found its end
    assert (seen.stream, seen.device) == (stream, 0)
    assert struct.unpack("<QQqfi", seen.params) == (0x1000, 0x2000, 1000, 2.5, 128)


def _launch_on_a_stream() -> tuple[LaunchRecord, int]:
    stream = new_stream()
    return launch_once(axpy_launch(1000, 2.5), {"x": 0x1000, "y": 0x2000}, stream), stream


def test_offsets_are_added_and_an_absent_buffer_is_null() -> None:
    launch = replace(axpy_launch(8, 1.0), pointers=(PointerSlot(0, "bias", 16), PointerSlot(8, "workspace", 4096)))
    seen = run_in_virtual_gpu(launch_once, launch, {"workspace": 0x10000})
    assert struct.unpack_from("<QQ", seen.params) == (0, 0x11000)


def test_the_plan_packs_the_same_bytes() -> None:
    launch = axpy_launch(1000, 2.5)
    addresses = {"x": 1 << 63, "y": 0x2000}
    assert run_in_virtual_gpu(launch_once, launch, addresses).params == launch.bind(addresses)


def test_threads_sharing_a_launch_do_not_mix_their_addresses() -> None:
    run_in_virtual_gpu(_many_threads)


def _many_threads() -> None:
    with VirtualGpu(record_only) as gpu:
        prepared = prepare(axpy_launch(8, 1.0))

        def launch(address: int) -> None:
            with driver.device(0).activate():
                prepared({"x": address, "y": address}, 0)

        assert_addresses_are_not_mixed(gpu, launch, 200)


def test_each_device_gets_its_own_launches_and_the_context_is_put_back() -> None:
    run_in_virtual_gpu(_two_devices, environment={"FAKE_CUDA_DEVICES": "v100,v100"})


def _two_devices() -> None:
    with VirtualGpu(record_only) as gpu:
        for index in (0, 1):
            prepared = prepare(axpy_launch(8, 1.0), index)
            with driver.device(1 - index).activate():
                with driver.device(index).activate():
                    prepared({}, 0)
                assert int(driver.call("cuCtxGetDevice")) == 1 - index
        assert [seen.device for seen in gpu.launches] == [0, 1]
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_DEVICE"):
            driver.device(2)


# ---- shared memory and other limits ---------------------------------------------------------------------------------


def test_more_than_48_kib_is_asked_for() -> None:
    seen = run_in_virtual_gpu(launch_once, axpy_launch(8, 1.0, shared=96 * KIB), {})
    assert seen.dynamic_shared == seen.max_dynamic_shared == 96 * KIB


@pytest.mark.parametrize(
    ("launch", "error", "words"),
    [
        pytest.param(axpy_launch(8, 1.0, shared=96 * KIB + 4), LaunchError, "98308 B of dynamic", id="shared memory"),
        pytest.param(replace(axpy_launch(8, 1.0), grid=(1, 65536, 1)), LaunchError, "65536", id="grid"),
        pytest.param(replace(axpy_launch(8, 1.0), grid=(0, 1, 1)), LaunchError, "grid", id="empty grid"),
        pytest.param(replace(axpy_launch(8, 1.0), block=(256, 1, 1)), LaunchError, "allows 128 threads", id="block"),
        pytest.param(replace(axpy_launch(8, 1.0), params=bytes(24)), LaunchError, "holds 24", id="parameters"),
    ],
)
def test_a_refused_launch_says_why(launch: Launch, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        run_in_virtual_gpu(launch_once, launch, {})
    assert "axpy_128" in str(caught.value)


def test_a_launch_error_names_everything() -> None:
    with pytest.raises(LaunchError) as caught:
        run_in_virtual_gpu(launch_once, replace(axpy_launch(8, 1.0), block=(256, 2, 1)), {})
    for words in (
        "CUDA_ERROR_INVALID_VALUE",
        "invalid argument",
        "axpy_128",
        "device 0",
        "V100",
        "(256, 2, 1)",
        "512 B",
    ):
        assert words in str(caught.value)


def test_a_destroyed_stream_is_refused() -> None:
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_HANDLE"):
        run_in_virtual_gpu(_launch_on_a_destroyed_stream)


def _launch_on_a_destroyed_stream() -> None:
    stream = new_stream()
    driver.call("cuStreamDestroy", stream)
    launch_once(axpy_launch(8, 1.0), {}, stream)


def test_the_default_stream_needs_a_current_context() -> None:
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_CONTEXT"):
        run_in_virtual_gpu(_launch_without_a_context)


def _launch_without_a_context() -> None:
    prepare(axpy_launch(8, 1.0))({}, 0)


def test_machine_code_for_another_gpu_is_refused() -> None:
    with pytest.raises(LaunchError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        run_in_virtual_gpu(_load_for_another_gpu)


def _load_for_another_gpu() -> None:
    spec = axpy_spec(64)
    driver.device(0).load(spec, compile_kernel(spec, "sm_80", include_dirs=[KERNELS]))


def test_without_a_driver_the_error_is_clear() -> None:
    code = "from polyconv.cuda import driver; driver.device(0)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert said.returncode != 0
    assert "no NVIDIA driver on this machine" in said.stderr


# ---- the device as the planner describes it -------------------------------------------------------------------------


def test_the_v100_describes_itself() -> None:
    gpu = run_in_virtual_gpu(describe, 0)
    assert gpu.name == "Virtual Tesla V100-SXM2-16GB"
    assert gpu.arch == "sm_70"
    assert gpu.sms == 80
    assert gpu.clock_mhz == 1530
    assert gpu.dram_gbs == pytest.approx(898, abs=1)
    assert (gpu.shared_per_sm, gpu.shared_per_block_optin) == (96 * KIB, 96 * KIB)
    assert (gpu.registers_per_sm, gpu.l2_bytes) == (65536, 6 * KIB * KIB)


def test_a_gpu_that_is_too_old_is_told_so_in_words() -> None:
    said = run_in_virtual_gpu(_asked_of_a_p100, environment={"POLYCONV_JIT": "on"})  # in a separate process
    sentence = "polyconv's kernels need compute capability 7.0 (Tesla V100) or newer"
    assert all(sentence in text for text in said), said
    assert all("has 6.0. polyconv.restore(model) gives a model torch's modules back" in text for text in said)


def _asked_of_a_p100() -> list[str]:
    """Output of the backend, the planner, explain, warmup and doctor."""
    of_the_v100 = driver.Device.attribute

    def attribute(gpu: driver.Device, name: str) -> int:
        return 6 if name == "COMPUTE_CAPABILITY_MAJOR" else of_the_v100(gpu, name)

    driver.Device.attribute = attribute  # type: ignore[method-assign]
    x, w = ((1, 4, 8, 8), (256, 64, 8, 1)), ((4, 4, 3, 3), (36, 9, 3, 1))
    problem = problem_of(Pass.FPROP, x, w, (144, 36, 6, 1), Geometry(tolerance=1e-4), bias=False, dtype=torch.float32)
    said = []
    asked: list[Callable[[], object]] = [
        lambda: backend_for(torch.device("cuda", 0)),
        lambda: plan_cuda(problem, describe(0)),
        lambda: aot.wanted_by([problem], "sm_60"),
    ]
    for ask in asked:
        with pytest.raises((RuntimeError, ValueError)) as error:
            ask()
        said.append(str(error.value))
    explained = polyconv.explain(polyconv.Conv2d(4, 4, 3), (1, 4, 8, 8), device="cuda:0")
    found = [finding for finding in environment.findings() if finding.name == "compiler"]
    return [*said, str(explained), str(found[-1].text)]


# ---- the backend ----------------------------------------------------------------------------------------------------


def test_the_backend_runs_a_plan_without_waiting(tmp_path: Path) -> None:
    run_in_virtual_gpu(_run_backend, tmp_path)


def _run_backend(folder: Path) -> None:
    plans = []

    def planner(problem: Problem, device: object) -> Plan:
        first = axpy_launch(1000, 2.0)
        second = replace(first, pointers=(PointerSlot(0, "workspace", 256), PointerSlot(8, "y")))
        plans.append(axpy_plan(problem, (first, second), workspace_bytes=1024))
        return plans[-1]

    stream = new_stream()
    with VirtualGpu(record_only) as gpu:
        cache = KernelCache(folder, include_dirs=[KERNELS])
        backend = gpu.backend(planner=planner, cache=cache, stream=lambda: stream)
        x, y = torch.zeros(PROBLEM.x_shape), torch.zeros(PROBLEM.y_shape)
        run = backend.prepare(backend.plan(PROBLEM))
        for _ in range(3):
            run({"x": x, "y": y})
        assert len(plans) == 1
        assert len(gpu.launches) == 6
        first, second = (struct.unpack_from("<QQ", seen.params) for seen in gpu.launches[:2])
        assert first == (x.data_ptr(), y.data_ptr())
        assert second[0] % 64 == 0
        assert second[1] == y.data_ptr()
        assert {seen.stream for seen in gpu.launches} == {stream}
        assert y.isnan().all()
        assert gpu.synchronisations == 0
        assert "axpy" in explain_plans(backend, PROBLEM)


def test_an_error_in_the_emulator_reaches_the_test(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="in the emulator"):
        run_in_virtual_gpu(_fail_in_the_emulator, tmp_path)


def _fail_in_the_emulator(folder: Path) -> None:
    def fail(launch: LaunchRecord, buffers: list[tuple[int, int]]) -> None:
        assert len(buffers) == 2
        raise ZeroDivisionError("in the emulator")

    with VirtualGpu(fail) as gpu:
        cache = KernelCache(folder, include_dirs=[KERNELS])
        backend = gpu.backend(planner=lambda p, d: axpy_plan(p, (axpy_launch(1000, 2.0),)), cache=cache)
        backend.run(PROBLEM, {"x": torch.zeros(PROBLEM.x_shape), "y": torch.zeros(PROBLEM.y_shape)})


# ---- the emulator behind it -----------------------------------------------------------------------------------------


def run_axpy(count: int, function: str, shared: int) -> float:
    """Largest error of ``y + a x`` on the virtual GPU; guard elements around y must not change."""
    spec = axpy_spec(function=function)
    storage = torch.randn(count + 256)
    x, y = torch.randn(count), storage[128 : 128 + count]
    before, expected = storage.clone(), y.double() + 1.5 * x.double()
    with VirtualGpu() as gpu:
        prepared = prepare(axpy_launch(count, 1.5, spec=spec, shared=shared))
        with gpu.memory(x, y), driver.device(0).activate():
            prepared({"x": x.data_ptr(), "y": y.data_ptr()}, 0)
    assert torch.equal(storage[:128], before[:128])
    assert torch.equal(storage[128 + count :], before[128 + count :])
    return float((y.double() - expected).abs().max())


@pytest.mark.parametrize("count", [1, 128, 1000])
@pytest.mark.parametrize("shared", [512, 64 * KIB])
def test_machine_code_computes(count: int, shared: int) -> None:
    assert run_in_virtual_gpu(run_axpy, count, "axpy", shared) < 1e-6


def test_an_access_outside_the_tensors_is_caught() -> None:
    with pytest.raises(gpu_emulator.OutOfBounds, match="axpy_past_the_end_128"):
        run_in_virtual_gpu(run_axpy, 1000, "axpy_past_the_end", 512)


def test_what_a_kernel_leaves_out_stays_nan(tmp_path: Path) -> None:
    y = run_in_virtual_gpu(_run_a_plan_that_writes_half, tmp_path)
    assert not y[:500].isnan().any()
    assert y[500:].isnan().all()


def _run_a_plan_that_writes_half(folder: Path) -> torch.Tensor:
    half = replace(axpy_launch(500, 1.0, spec=axpy_spec(function="copy")), dynamic_shared=0)
    with VirtualGpu() as gpu:
        cache = KernelCache(folder, include_dirs=[KERNELS])
        backend = gpu.backend(planner=lambda p, d: axpy_plan(p, (half,)), cache=cache)
        y = torch.zeros(PROBLEM.y_shape)
        backend.run(PROBLEM, {"x": torch.ones(PROBLEM.x_shape), "y": y})
    return y.flatten()


def test_a_changed_input_is_caught(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="changed its input 'x'"):
        run_in_virtual_gpu(_run_a_plan_that_writes_its_input, tmp_path)


def _run_a_plan_that_writes_its_input(folder: Path) -> None:
    launch = replace(axpy_launch(1000, 1.0), pointers=(PointerSlot(0, "x"), PointerSlot(8, "x")))
    with VirtualGpu() as gpu:
        cache = KernelCache(folder, include_dirs=[KERNELS])
        backend = gpu.backend(planner=lambda p, d: axpy_plan(p, (launch,)), cache=cache)
        backend.run(PROBLEM, {"x": torch.ones(PROBLEM.x_shape), "y": torch.zeros(PROBLEM.y_shape)})


def test_a_workspace_is_not_filled_in_deterministic_mode() -> None:
    """In deterministic mode torch fills new tensors, which a workspace does not need."""
    size = 1 << 20
    torch.use_deterministic_algorithms(True)
    try:
        filled = torch.empty(size, dtype=torch.uint8)
        workspace = CudaBackend.allocate(SimpleNamespace(_place=torch.device("cpu")), size)  # type: ignore[arg-type]
    finally:
        torch.use_deterministic_algorithms(False)
    assert filled.eq(255).all()
    assert isinstance(workspace, torch.UntypedStorage)
    assert workspace.nbytes() == size
    assert not torch.empty(0, dtype=torch.uint8).set_(workspace).eq(255).all()
