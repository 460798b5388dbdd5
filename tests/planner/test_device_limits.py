"""No launch exceeds a device's limits: on known GPUs, for every workload and for random geometries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from nightly import NIGHTLY
from polyconv.cuda.planner import DEVICES, CudaDevice, Plan, plan_cuda
from polyconv.cuda.planner.cost import launch_us, resident_blocks
from polyconv.cuda.planner.planner import FAMILIES, plan_within
from polyconv.cuda.planner.winograd import nonfused as winograd_nonfused
from polyconv.cuda.planner.winograd_fp16x3 import nonfused
from polyconv.measure.workloads import find
from polyconv.problem import PaddingMode, Pass, Problem
from polyconv.selection import PlanError, Preference

GEOMETRIES, PARTS = (500, 5) if NIGHTLY else (60, 2)
GRID_YZ = 65535
BLOCK_THREADS = 1024
ALIKE: dict[int, str] = {}
for name, one in DEVICES.items():
    ALIKE.setdefault(one.shared_per_block_optin, name)
CHECKED = tuple(DEVICES) if NIGHTLY else tuple(ALIKE.values())
"""One device per size of shared memory, because other limits never bind first; nightly all."""
T4, V100 = DEVICES["t4"], DEVICES["v100"]


def check(plan: Plan, device: CudaDevice) -> None:
    """Static shared memory (at most 48 KiB) and registers per block are ensured by the compiler."""
    for launch in plan.launches:
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        assert launch.dynamic_shared <= device.shared_per_block_optin, f"{launch} on {device.name}"
        assert threads <= min(BLOCK_THREADS, device.threads_per_sm), f"{launch} on {device.name}"
        assert 0 < launch.grid[0] < 2**31, f"{launch} on {device.name}"
        assert 0 < launch.grid[1] <= GRID_YZ, f"{launch} on {device.name}"
        assert 0 < launch.grid[2] <= GRID_YZ, f"{launch} on {device.name}"
        assert len(launch.params) <= 4096, f"{launch} on {device.name}"
        assert resident_blocks(launch, device) >= 1, f"{launch} on {device.name}"


@pytest.mark.parametrize("name", CHECKED)
def test_every_workload(name: str) -> None:
    for workload in find("all"):
        for kind in Pass:
            check(plan_cuda(workload.problem(kind), DEVICES[name]), DEVICES[name])


@pytest.mark.parametrize("part", range(PARTS))
def test_random_geometries(part: int) -> None:
    """All passes."""
    for geometry in random_geometries(Random(f"limits {part}"), GEOMETRIES // PARTS):
        for kind in Pass:
            problem = geometry.for_pass(kind)
            for name in CHECKED:
                check(plan_cuda(problem, DEVICES[name]), DEVICES[name])


def random_geometries(random: Random, count: int) -> Iterator[Problem]:
    """Forward problems of any size that some kernel takes, including long kernels and wide dilations."""
    while count:
        groups = random.choice([1, 1, 1, 2, 3, 32])
        channels, outputs = random.choice([1, 3, 4, 8, 16, 64, 130]), random.choice([1, 2, 8, 32, 100, 256])
        kernel = random.choice([(1, 1), (3, 3), (3, 3), (5, 5), (7, 7), (5, 9), (1, 13), (random.randint(1, 13),) * 2])
        dilation = random.choice([(1, 1), (1, 1), (2, 2), (2, 3), (1, 7), (1, 600), (1, 2048), (64, 64)])
        sides = [random.choice([0, d * (k - 1) // 2, d * (k - 1)]) for k, d in zip(kernel, dilation, strict=True)]
        size = [random.choice([7, 40, 112]), random.choice([7, 40, 224, 1100, 5000])]
        if any(n + 2 * side < d * (k - 1) + 1 for n, side, k, d in zip(size, sides, kernel, dilation, strict=True)):
            continue
        problem = Problem.make(
            Pass.FPROP,
            (random.choice([1, 2, 7]), groups * channels, *size),
            (groups * outputs, channels, *kernel),
            stride=random.choice([(1, 1), (1, 1), (2, 2), (1, 3), (4, 4)]),
            padding=(sides[0], sides[0], sides[1], sides[1]),
            dilation=dilation,
            groups=groups,
            padding_mode=random.choice([PaddingMode.ZEROS] * 4 + [PaddingMode.REPLICATE]),
            bias=random.choice([True, False]),
        )
        count -= 1
        yield problem


def test_a_t4_is_told_why_it_gets_other_kernels() -> None:
    """ResNet-50's first 3x3: the V100's FP32 plan needs more than the 64 KiB of a T4."""
    fp32 = tuple(family for family in FAMILIES if family is not nonfused)
    for kind in (Pass.FPROP, Pass.WGRAD):
        problem = Problem.make(kind, (32, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1, 1, 1))
        on_v100, on_t4 = plan_within(fp32, problem, V100), plan_cuda(problem, T4)
        assert max(launch.dynamic_shared for launch in on_v100.launches) > T4.shared_per_block_optin
        assert on_t4.choice != on_v100.choice
        (refused,) = (c for c in on_t4.candidates if c.name == on_v100.choice)
        assert refused.rejected is not None
        assert "bytes of shared memory, and Tesla T4 gives it 65536" in refused.rejected
        assert refused.cost is refused.error is None


def test_a_dilation_that_no_separable_kernel_has_memory_for() -> None:
    problem = Problem.make(Pass.FPROP, (1, 64, 8, 5000), (64, 64, 1, 3), padding=(0, 0, 2048, 2048), dilation=(1, 2048))
    for device in (V100, DEVICES["rtx4090"]):
        check(plan_cuda(problem, device), device)


def test_shared_memory_and_threads_say_how_many_blocks_there_are() -> None:
    problem = Problem.make(Pass.FPROP, (32, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1, 1, 1))
    for launch in plan_cuda(problem, V100).launches:
        assert resident_blocks(launch, T4) <= resident_blocks(launch, V100) <= launch.kernel.min_blocks
    way = Preference("winograd_nonfused_toom4_3_1_toom4_3_1_64")
    for device, blocks in ((T4, 1), (V100, 2)):  # of 48 KiB each
        plan = plan_within((winograd_nonfused,), problem, device, prefer=way)
        grids = {launch.grid for launch in plan.launches if "gemm" in launch.kernel.symbol}
        assert grids == {(device.sms * blocks, 1, 1)}


def test_a_kernel_that_cannot_be_used_is_in_no_plan() -> None:
    problem = Problem.make(Pass.FPROP, (8, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1, 1, 1))
    first = plan_cuda(problem, V100)
    broken = first.launches[-2].kernel.symbol
    without = plan_cuda(problem, replace(V100, unusable=((broken, "it does not load"),)))
    assert broken not in {kernel.symbol for kernel in without.kernels}
    words = {c.name: c.rejected for c in without.candidates}[first.choice]
    assert words == f"{broken} cannot be used on this device: it does not load"
    every = tuple((kernel.symbol, "broken") for kernel in first.kernels)
    assert plan_cuda(problem, replace(V100, unusable=every)).choice != first.choice
    with pytest.raises(
        PlanError, match=r"no kernel can run .*: implicit_gemm_pack_weights cannot be used on this device: broken"
    ):
        plan_cuda(replace(problem, tolerance=0.0), replace(V100, unusable=(("implicit_gemm_pack_weights", "broken"),)))


def test_what_was_read_of_a_kernel_counts() -> None:
    problem = Problem.make(Pass.FPROP, (8, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1, 1, 1), tolerance=0.0)
    plan = plan_cuda(problem, V100)
    launch = plan.launches[-1]
    read = replace(V100, resident=((launch.kernel.symbol, 1),))
    assert resident_blocks(launch, V100) > resident_blocks(launch, read) == 1
    assert launch_us(launch, read) != launch_us(launch, V100)
