"""The launch path on virtual GPUs other than the V100: limits, occupancy, and one unknown to NVRTC.

Nothing is computed: the emulator executes sm_70 machine code only.
"""

from __future__ import annotations

import pytest
import torch

from nightly import sampled
from polyconv.autotune import preferences
from polyconv.cuda import driver
from polyconv.cuda.device import describe
from polyconv.cuda.jit.compile import compile_kernel, ptx_arch, supported_archs
from polyconv.cuda.jit.cubin import is_cubin
from polyconv.cuda.planner import DEVICES, Plan, plan_cuda
from polyconv.cuda.planner.cost import resident_blocks
from polyconv.problem import Pass, Problem
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.example import KERNELS, axpy_spec
from virtual_gpu.gpu import VirtualGpu, record_only

FIRST_3X3 = ((32, 64, 56, 56), (64, 64, 3, 3))
"""Layers of ResNet-50 at batch 32."""


def on(model: str) -> dict[str, str]:
    return {"FAKE_CUDA_DEVICES": model, "POLYCONV_TUNING_FILE": "off"}


@pytest.mark.parametrize("name", sampled(DEVICES, 5, "processes of their own"))
def test_every_known_gpu_describes_itself_as_it_is_known(name: str) -> None:
    """The device as reported by the driver equals the description that is planned with elsewhere: limits and speed."""
    known, read = DEVICES[name], run_in_virtual_gpu(describe, 0, environment=on(name))
    for figure in ("arch", "sms", "clock_mhz", "l2_bytes", "threads_per_sm", "blocks_per_sm", "registers_per_sm"):
        assert getattr(read, figure) == getattr(known, figure), figure
    assert (read.shared_per_sm, read.shared_per_block_optin) == (known.shared_per_sm, known.shared_per_block_optin)
    assert read.limits == known.limits
    if name != "gb10":  # the driver does not report its memory
        assert read.dram_gbs == pytest.approx(known.dram_gbs, rel=0.03)


@pytest.mark.parametrize("kind", list(Pass))
@pytest.mark.parametrize("name", ["t4", "b200"])
def test_its_launches_are_accepted(name: str, kind: Pass) -> None:
    run_in_virtual_gpu(_launch_first_3x3, kind, environment=on(name), timeout=300)


def _launch_first_3x3(kind: Pass) -> None:
    """After planning, no launch has fewer blocks per multiprocessor than its cost assumed."""
    x, w = FIRST_3X3
    problem = Problem.make(kind, x, w, padding=(1, 1, 1, 1))
    with VirtualGpu(record_only) as gpu:
        backend = gpu.backend()
        prepared = backend.prepare(preferences.plan(backend, problem))
        with backend.device.activate():
            for launch, planned in zip(prepared.launches, prepared.plan.launches, strict=True):
                launch({name: (i + 1) << 40 for i, name in enumerate(("x", "w", "y", "dw", "workspace"))}, 0)
                assert 1 <= resident_blocks(planned, backend.description) <= max(1, launch.resident_blocks)
        assert len(gpu.launches) == len(prepared.launches) > 0


def test_occupancy_is_read_from_the_compiled_kernel() -> None:
    """A kernel with more registers than its launch bounds assume has fewer blocks, and its cost is estimated again."""
    before, read = run_in_virtual_gpu(_short_of_blocks, environment=on("v100"), timeout=300)
    symbol = before.launches[-1].kernel.symbol
    assert read == {symbol: 1}


def _short_of_blocks() -> tuple[Plan, dict[str, int]]:
    problem = Problem.make(Pass.FPROP, (8, 128, 56, 56), (128, 128, 3, 3), padding=(1, 1, 1, 1), tolerance=0.0)
    with VirtualGpu(record_only) as gpu:
        backend = gpu.backend()
        before = preferences.plan(backend, problem)
        short = before.launches[-1].kernel
        says = driver.Kernel.blocks_per_sm

        def blocks_per_sm(kernel: driver.Kernel, dynamic_shared: int) -> int:
            return 1 if kernel.spec == short else says(kernel, dynamic_shared)

        driver.Kernel.blocks_per_sm = blocks_per_sm  # type: ignore[method-assign]
        after = backend.prepare(preferences.plan(backend, problem)).plan
        assert after == plan_cuda(problem, backend.description)
        return before, backend.description.read


def test_a_gpu_newer_than_the_compiler_is_served_by_ptx() -> None:
    run_in_virtual_gpu(_serve_by_ptx, environment=on("unborn"), timeout=300)


def _serve_by_ptx() -> None:
    problem = Problem.make(Pass.FPROP, (1, 8, 12, 12), (8, 8, 1, 1))
    x, w, y = torch.zeros(problem.x_shape), torch.zeros(problem.w_shape), torch.zeros(problem.y_shape)
    with VirtualGpu(record_only) as gpu:
        backend = gpu.backend()
        assert backend.description.arch == "sm_190"
        backend.run(problem, {"x": x, "w": w, "y": y})
        assert [launch.name for launch in gpu.launches] == [
            k.symbol for k in preferences.plan(backend, problem).kernels
        ]


def test_ptx_is_that_of_the_newest_architecture_before() -> None:
    newest = max(supported_archs())
    code = compile_kernel(axpy_spec(), "sm_999", include_dirs=[KERNELS])
    assert not is_cubin(code)
    assert f".target sm_{newest}".encode() in code
    assert (ptx_arch("sm_999"), ptx_arch(f"sm_{newest}"), ptx_arch("sm_88")) == (f"sm_{newest}", None, "sm_87")


def test_ptx_is_never_that_of_the_architecture_that_was_renumbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC 12.8 on a B300 (sm_103): sm_101 is Thor's, which CUDA 13 calls sm_110."""
    monkeypatch.setattr("polyconv.cuda.jit.compile.supported_archs", lambda: (75, 80, 90, 100, 101, 120))
    found = {arch: ptx_arch(arch) for arch in ("sm_100", "sm_101", "sm_103", "sm_110", "sm_121")}
    assert found == {"sm_100": None, "sm_101": None, "sm_103": "sm_100", "sm_110": "sm_100", "sm_121": "sm_120"}
