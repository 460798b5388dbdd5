"""The cost model against counts, and what determines the choice."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

import gpu_emulator
from emulate import A100, V100, cubin
from nightly import NIGHTLY, sampled
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import DEVICES, all_kernels, plan_cuda
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.cost import SECTOR, bound_us, cold, profiles, resource_us, scattered, tasks_us
from polyconv.cuda.planner.device import CudaDevice
from polyconv.cuda.planner.planner import DEFAULT_WORKSPACE, weigh
from polyconv.cuda.planner.winograd import nonfused as winograd_nonfused
from polyconv.cuda.planner.winograd_fp16x3 import nonfused as winograd_fp16x3_nonfused
from polyconv.measure.workloads import find
from polyconv.problem import Pass
from polyconv.tools.inspect.emulated_cost import count_plan

BOUNDS = [(workload.id, kind) for workload in find("all12,models") for kind in Pass]
NEWER = [
    (name, kind, dtype, layout)
    for name, kind in BOUNDS
    for dtype in ("float32", "bfloat16")
    for layout in ("contiguous", "channels_last")
]
SAMPLE = 8
"""Bounds that are counted except nightly: seconds each."""
CLASSES = [
    ("resnet50-3down", Pass.DGRAD, "bfloat16", "contiguous"),  # stored one element at a time
    ("resnet50-1x1", Pass.DGRAD, "float32", "channels_last"),  # reads four channels at a time
    ("resnet50-conv1", Pass.DGRAD, "bfloat16", "channels_last"),  # that, with few results
    ("resnet50-conv1", Pass.WGRAD, "float32", "channels_last"),  # reads pixels that are apart
    ("resnext-g32", Pass.FPROP, "bfloat16", "channels_last"),  # a step of the product has several taps
    ("resnet50-5b", Pass.FPROP, "float32", "contiguous"),  # tiles of tensor cores are half empty
    ("tiny-batch", Pass.FPROP, "bfloat16", "channels_last"),  # packing takes as long as the product
    ("kb83", Pass.FPROP, "float32", "channels_last"),  # the L2 binds
    ("resnet50-4b", Pass.FPROP, "float32", "channels_last"),  # lanes outside of small images load nothing
    ("kb85", Pass.WGRAD, "bfloat16", "contiguous"),  # four slices, of which the last is shorter
]
"""Those of NEWER that are counted except nightly: one of each class."""


def test_every_kernel_has_been_counted() -> None:
    """A kernel with an epilogue counts as its twin without one, plus the epilogue's cost."""
    assert {kernel.twin or kernel.symbol for kernel in all_kernels()} == set(profiles(ampere=True))


@pytest.mark.parametrize(("name", "kind"), sampled(BOUNDS, SAMPLE, "bounds"), ids=str)
def test_predicted_bounds_are_the_counted_ones(name: str, kind: Pass) -> None:
    plan = plan_cuda(find(name)[0].problem(kind), V100)
    counted = count_plan(gpu_emulator, plan, {kernel: cubin(kernel) for kernel in set(plan.kernels)}, V100)
    predicted_ms = sum(bound_us(launch, V100) for launch in plan.launches) / 1e3
    assert predicted_ms == pytest.approx(sum(one.bound_ms for one in counted), rel=0.15)


@pytest.mark.parametrize(("name", "kind", "dtype", "layout"), NEWER if NIGHTLY else CLASSES, ids=str)
def test_predicted_bounds_on_an_a100(name: str, kind: Pass, dtype: str, layout: str) -> None:
    """Of code for sm_80, in float32 and in half precision; traffic that stays in the L2 counts on both sides."""
    problem = replace(find(name)[0].problem(kind), dtype=dtype)
    plan = plan_cuda(problem.channels_last() if layout == "channels_last" else problem, A100)
    cubins = {kernel: KernelCache().get(kernel, A100.arch) for kernel in set(plan.kernels)}
    counted = count_plan(gpu_emulator, plan, cubins, A100)
    predicted_ms = sum(bound_us(cold(launch), A100) for launch in plan.launches) / 1e3
    assert predicted_ms == pytest.approx(sum(one.bound_ms for one in counted), rel=0.25)


# ---- Elements that are not adjacent


@pytest.mark.parametrize(("kind", "alone"), [(Pass.FPROP, False), (Pass.DGRAD, True)])
def test_strided_gradients_are_stored_one_element_at_a_time(kind: Pass, alone: bool) -> None:
    """That takes longer than the products of the layer, and four pixels of the forward pass are stored at a time."""
    problem = replace(find("resnet50-3down")[0].problem(kind), dtype="bfloat16")
    (launch,) = plan_cuda(problem, A100).launches[1:]
    assert launch.work.stored_singly == (prod(problem.x_shape) if alone else 0)
    spent = resource_us(launch, A100)
    assert (spent["issue"] > 2 * spent["tensor"]) is alone


@pytest.mark.parametrize("name", ["kb79", "kb81"])
def test_single_stores_a_stride_apart_take_a_sector_each(name: str) -> None:
    """Transposed convolutions with strides of 2 and 5 in float32: lines and sectors of the result bind the kernel."""
    problem = find(name)[0].problem(Pass.FPROP)
    plan = plan_cuda(problem.as_2d() if problem.rank == 1 else problem, A100)
    cubins = {kernel: KernelCache().get(kernel, A100.arch) for kernel in set(plan.kernels)}
    counted = count_plan(gpu_emulator, plan, cubins, A100)
    assert counted[-1].binding in ("L2", "lsu / L1")
    assert plan.launches[-1].work.scattered_sectors > 0.35 * plan.launches[-1].work.stored_singly
    predicted_ms = sum(bound_us(cold(launch), A100) for launch in plan.launches) / 1e3
    assert predicted_ms == pytest.approx(sum(one.bound_ms for one in counted), rel=0.25)


def test_elements_that_are_apart_lie_in_lines_of_their_own() -> None:
    assert scattered(4, 4) == 0
    assert scattered(4, 128) == scattered(4, 4096) == 31 * 124 / 128
    assert scattered(2, 4, SECTOR) == 31 * 2 / 32


@pytest.mark.parametrize("name", ["resnet50-1x1", "resnet50-conv1", "resnext-g32"])
def test_input_gradients_in_channels_last_are_not_gathered_channel_by_channel(name: str) -> None:
    """A warp that reads one channel of 32 pixels touches 32 lines."""
    plan = plan_cuda(find(name)[0].problem(Pass.DGRAD).channels_last(), A100)
    assert "_taps_" not in plan.choice.replace("_taps_vector_", "_")


def test_enough_problems() -> None:
    assert len(BOUNDS) >= 60
    assert len(NEWER) == 4 * len(BOUNDS)
    assert set(CLASSES) <= set(NEWER)


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
