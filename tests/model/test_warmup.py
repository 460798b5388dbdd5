"""``polyconv.warmup``: afterwards a first step plans, compiles and loads nothing; its report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import polyconv
from polyconv.backend import override
from polyconv.cpu import planner
from polyconv.cpu.backend import CpuBackend
from polyconv.cuda import MissingKernelError, RefusedKernelError
from polyconv.cuda.jit import compile as compiling
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import KernelSpec, plan_cuda
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu, record_only

SHAPE = (1, 8, 10, 12)


def network() -> nn.Module:
    """A fast kernel, a strided one and a depthwise one, in training mode."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.Conv2d(32, 32, 3, groups=32),
    )
    polyconv.replace(model, policy="own")
    return model


def step(model: nn.Module) -> None:
    model(torch.randn(SHAPE)).square().sum().backward()


def test_it_is_a_function_whatever_was_imported() -> None:
    for name in ("polyconv.model.warmup", "polyconv.model.aot", "polyconv.cli.warmup"):
        import_module(name)
    assert callable(polyconv.warmup)
    assert {"warmup", "Warmup"} <= set(polyconv.__all__)


# ---- on the CPU


def test_on_the_cpu_the_plans_are_made() -> None:
    model, backend = network(), CpuBackend()
    with override("cpu", backend):
        report = polyconv.warmup(model, torch.randn(SHAPE), quiet=True)
        planned = planner._plan.cache_info().misses
        assert planned >= 8
        step(model)
        assert planner._plan.cache_info().misses == planned
    assert str(report).startswith("cpu: 8 problems planned in ")
    assert str(report).endswith("; its kernels come compiled")


def test_in_evaluation_mode_it_is_the_forward_pass() -> None:
    model = network().eval()
    assert polyconv.warmup(model, SHAPE, quiet=True).devices["cpu"].problems == 3
    assert polyconv.warmup(model, SHAPE, backward=True, quiet=True).devices["cpu"].problems == 8


def test_what_cannot_be_made_ready_is_said() -> None:
    class Undecided(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return polyconv.conv2d(x, x[:1]) if x.sum() > 0 else x

    with pytest.raises(ValueError, match=r"depends on the values of its tensors.*Run one step of it instead"):
        polyconv.warmup(Undecided(), torch.ones(1, 2, 3, 3))
    with pytest.raises(ValueError, match=r"no convolution of polyconv's runs.*polyconv\.replace\(model\) first"):
        polyconv.warmup(nn.Conv2d(8, 8, 3), SHAPE)
    with pytest.raises(ValueError, match="call the model once, then warm it up"):
        polyconv.warmup(nn.Sequential(polyconv.LazyConv2d(8, 3)), SHAPE)


# ---- on a GPU


def test_a_first_step_stops_for_nothing(tmp_path: Path) -> None:
    said = run_in_virtual_gpu(_warm_and_step, tmp_path)
    assert "8 problems planned in" in said
    assert "compiled in" in said
    assert str(tmp_path) in said


def _warm_and_step(folder: Path) -> str:
    kept, compiled = KernelCache(), []

    def compiler(spec: KernelSpec, arch: str) -> bytes:
        compiled.append(spec)
        return kept.get(spec, arch)

    model = network()
    plan_cuda.cache_clear()
    with VirtualGpu() as gpu:
        cache = KernelCache(folder, compiler=compiler)
        with override("cpu", gpu.backend(cache=cache)) as backend:
            report = polyconv.warmup(model, SHAPE, quiet=True)
            (ready,) = report.devices.values()
            assert not gpu.launches
            planned = plan_cuda.cache_info().misses
            assert planned == 8
            assert ready.problems == 8
            assert ready.kernels == ready.compiled == len(compiled) == len(set(compiled))
            assert ready.longest in {spec.symbol for spec in compiled}
            assert 0 < ready.longest_compiling <= ready.compiling
            loaded = dict(backend.device._kernels)
            step(model)
            assert gpu.launches
            assert plan_cuda.cache_info().misses == planned
            assert len(compiled) == ready.kernels
            assert backend.device._kernels == loaded
            again = polyconv.warmup(model, SHAPE, quiet=True)
            assert "all found" in str(again)
        with override("cpu", gpu.backend(cache=KernelCache(folder, compiler=compiler))):
            assert "all found" in str(polyconv.warmup(model, SHAPE, quiet=True))
    return str(report)


def test_kernels_are_compiled_side_by_side(tmp_path: Path) -> None:
    """One pool for the whole model: no single problem has as many kernels as wait for each other here."""
    run_in_virtual_gpu(_side_by_side, tmp_path)


def _side_by_side(folder: Path) -> None:
    kept, together = KernelCache(), threading.Barrier(6)
    lined_up: list[KernelSpec] = []

    def compiler(spec: KernelSpec, arch: str) -> bytes:
        lined_up.append(spec)
        if len(lined_up) <= together.parties:
            together.wait(60)
        return kept.get(spec, arch)

    cache = KernelCache(folder, compiler=compiler)
    usual, compiling.usable_cores = compiling.usable_cores, lambda: together.parties
    try:
        with VirtualGpu(record_only) as gpu, override("cpu", gpu.backend(cache=cache)):
            (ready,) = polyconv.warmup(network(), SHAPE, quiet=True).devices.values()
    finally:
        compiling.usable_cores = usual
    assert ready.compiled == len(lined_up) > together.parties


def test_a_kernel_that_is_refused_is_done_without(tmp_path: Path) -> None:
    environment = {"POLYCONV_STRICT": "off", "POLYCONV_TUNING_FILE": "off"}
    run_in_virtual_gpu(_does_without, tmp_path, environment=environment)
    with pytest.raises(RefusedKernelError, match="implicit_gemm_taps_64x32 is of no use"):
        run_in_virtual_gpu(_warm_without, network(), tmp_path / "strict")


def _does_without(folder: Path) -> None:
    model = network()
    with pytest.warns(RuntimeWarning, match="another kernel, which may be slower, runs instead"):
        _warm_without(model, folder, then=step)


def _warm_without(model: nn.Module, folder: Path, then: Callable[[nn.Module], None] | None = None) -> None:
    kept = KernelCache()

    def compiler(spec: KernelSpec, arch: str) -> bytes:
        if spec.symbol == "implicit_gemm_taps_64x32":
            raise RefusedKernelError(f"{spec.symbol} is of no use", symbol=spec.symbol)
        return kept.get(spec, arch)

    cache = KernelCache(folder, compiler=compiler)
    with VirtualGpu() as gpu, override("cpu", gpu.backend(cache=cache)) as backend:
        polyconv.warmup(model, SHAPE, quiet=True)
        if then is not None:
            loaded = dict(backend.device._kernels)
            then(model)
            assert backend.device._kernels == loaded


def test_without_a_compiler_all_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingKernelError, match="wanted for this model, are not in the cache") as raised:
        run_in_virtual_gpu(
            _only_warm, environment={"POLYCONV_JIT": "off", "POLYCONV_CACHE_DIR": str(tmp_path / "empty")}
        )
    assert str(raised.value).count("sm_70") >= 2
    assert {"implicit_gemm_pack_weights", "implicit_gemm_split_k_reduce"} <= set(
        str(raised.value).replace(",", " ").split()
    )


def _only_warm() -> None:
    with VirtualGpu(record_only) as gpu, override("cpu", gpu.backend()):
        polyconv.warmup(network(), SHAPE, quiet=True)
