"""The cost model against counts, and what determines the choice."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

import gpu_emulator
from emulate import A100, V100, cubin
from nightly import sampled
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import DEVICES, all_kernels, plan_cuda
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.cost import bound_us, cold, profiles, resource_us, tasks_us
from polyconv.cuda.planner.device import CudaDevice
from polyconv.cuda.planner.planner import DEFAULT_WORKSPACE, weigh
from polyconv.cuda.planner.winograd import nonfused as winograd_nonfused
from polyconv.cuda.planner.winograd_fp16x3 import nonfused as winograd_fp16x3_nonfused
from polyconv.measure.workloads import find
from polyconv.problem import Pass
from polyconv.tools.inspect.emulated_cost import count_plan

BOUNDS = [(workload.id, kind) for workload in find("all12,models") for kind in Pass]
NEWER = [
    ("resnet50-3b", kind, dtype, layout)
    for kind in Pass
    for dtype, layout in (("float32", "contiguous"), ("bfloat16", "contiguous"), ("bfloat16", "channels_last"))
]
SAMPLE = 8
"""Bounds that are counted except nightly: seconds each."""


def test_every_kernel_has_been_counted() -> None:
    """A kernel with an epilogue counts as its twin without one, plus the epilogue's cost."""
    assert {kernel.twin or kernel.symbol for kernel in all_kernels()} == set(profiles(ampere=True))


@pytest.mark.parametrize(("name", "kind"), sampled(BOUNDS, SAMPLE, "bounds"), ids=str)
def test_predicted_bounds_are_the_counted_ones(name: str, kind: Pass) -> None:
    plan = plan_cuda(find(name)[0].problem(kind), V100)
    counted = count_plan(gpu_emulator, plan, {kernel: cubin(kernel) for kernel in set(plan.kernels)}, V100)
    predicted_ms = sum(bound_us(launch, V100) for launch in plan.launches) / 1e3
    assert predicted_ms == pytest.approx(sum(one.bound_ms for one in counted), rel=0.15)


@pytest.mark.parametrize(("name", "kind", "dtype", "layout"), sampled(NEWER, 2, "newer"), ids=str)
def test_predicted_bounds_on_an_a100(name: str, kind: Pass, dtype: str, layout: str) -> None:
    """Of code for sm_80, in float32 and in half precision; traffic that stays in the L2 counts on both sides."""
    problem = replace(find(name)[0].problem(kind), dtype=dtype)
    plan = plan_cuda(problem.channels_last() if layout == "channels_last" else problem, A100)
    cubins = {kernel: KernelCache().get(kernel, A100.arch) for kernel in set(plan.kernels)}
    counted = count_plan(gpu_emulator, plan, cubins, A100)
    predicted_ms = sum(bound_us(cold(launch), A100) for launch in plan.launches) / 1e3
    assert predicted_ms == pytest.approx(sum(one.bound_ms for one in counted), rel=0.25)


def test_enough_problems() -> None:
    assert len(BOUNDS) >= 60


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.arch)
def test_devices_differ_as_their_figures_do(device: object) -> None:
    plan = plan_cuda(find("W1")[0].problem(Pass.FPROP), V100)
    launch = max((one for one in plan.launches if not one.work.passed_bytes), key=lambda one: one.work.steps)
    here, there = resource_us(launch, V100), resource_us(launch, device)  # type: ignore[arg-type]
    assert there["memory"] == pytest.approx(here["memory"] * V100.dram_gbs / device.dram_gbs)  # type: ignore[attr-defined]
    rates = [one.sms * one.clock_mhz for one in (V100, device)]  # type: ignore[attr-defined]
    assert there["issue"] == pytest.approx(here["issue"] * rates[0] / rates[1])


# ---- Slabs that stay in the L2


def test_w1_stays_in_the_l2_of_an_rtx_4090() -> None:
    device = DEVICES["rtx4090"]
    plan = plan_cuda(find("W1")[0].problem(Pass.FPROP), device)
    assert plan.workspace_bytes <= device.l2_slab_bytes
    assert len(plan.launches) <= 250
    assert sum(bound_us(launch, device) for launch in plan.launches) <= 2200
    spared = [launch for launch in plan.launches if launch.kernel.stem == "winograd/nonfused_gemm"]
    assert all(resource_us(launch, device)["memory"] == 0 for launch in spared)


def test_tensor_cores_find_w3_in_the_l2_of_an_l40s() -> None:
    """The split source never reaches DRAM; the GEMM's output does, and the source, for its magnitudes."""
    device, problem = DEVICES["l40s"], find("W3")[0].problem(Pass.FPROP)
    plan = plan_cuda(problem, device)
    assert plan.workspace_bytes <= device.l2_slab_bytes
    others = [
        launch for launch in plan.launches if launch.kernel.stem in ("winograd_fp16x3/gemm", "winograd_fp16x3/absmax")
    ]
    least_us = 4 * (prod(problem.y_shape) + prod(problem.x_shape)) / (device.dram_gbs * 1e3)
    assert sum(resource_us(launch, device)["memory"] for launch in others) == pytest.approx(least_us, rel=1e-3)


def test_large_slabs_are_memory_traffic() -> None:
    """An L2 of 6 MiB holds nothing of W1: all traffic is counted, as by the emulator."""
    plan = plan_cuda(find("W1")[0].problem(Pass.FPROP), V100)
    for launch in plan.launches:
        assert resource_us(launch, V100)["memory"] == launch.work.dram_bytes / (V100.dram_gbs * 1e3)


@pytest.mark.parametrize("name", ["W1", "resnet50-2b", "srcnn-9x9"])
@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_no_slab_is_dearer_than_the_largest(device: CudaDevice, name: str) -> None:
    """Smaller slabs compete with larger ones, and the estimated slabs are the launched ones."""
    problem = find(name)[0].problem(Pass.FPROP)
    ways: list[CudaCandidate] = [*winograd_nonfused.candidates(problem), *winograd_fp16x3_nonfused.candidates(problem)]
    for way in [way for way in ways if way.refusal(problem) is None]:
        found = weigh(way, problem, device, DEFAULT_WORKSPACE)
        assert found.us <= tasks_us(way.tasks(problem, device.sms, DEFAULT_WORKSPACE), device)
        assert found.workspace in (DEFAULT_WORKSPACE, device.l2_slab_bytes)
        assert found.tasks == tuple(way.tasks(problem, device.sms, found.workspace))
