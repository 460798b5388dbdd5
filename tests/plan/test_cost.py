"""The cost model against what is counted, and what the choice follows from."""

from __future__ import annotations

import pytest

import gpu_emulator
from emulate import V100, cubin
from polyconv.inspection.counting import count_plan
from polyconv.measure.workloads import find
from polyconv.plan import DEVICES, all_kernels, plan_cuda
from polyconv.plan.cost import bound_us, profiles, resource_us
from polyconv.problem import Pass

NAMES = [workload.id for workload in find("all12,models")]


def test_every_kernel_has_been_counted() -> None:
    """A kernel with an epilogue counts as its twin without one, and what the epilogue adds."""
    assert {kernel.twin or kernel.symbol for kernel in all_kernels()} == set(profiles())


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_predicted_bounds_are_the_counted_ones(name: str, kind: Pass) -> None:
    plan = plan_cuda(find(name)[0].problem(kind), V100)
    main = max(plan.launches, key=lambda launch: bound_us(launch, V100)).kernel
    counted = count_plan(gpu_emulator, plan, {kernel: cubin(kernel) for kernel in set(plan.kernels)}, main)
    predicted_ms = sum(bound_us(launch, V100) for launch in plan.launches) / 1e3
    assert predicted_ms == pytest.approx(sum(one.bound_ms for one in counted), rel=0.15)


def test_enough_problems() -> None:
    assert len(NAMES) * len(Pass) >= 60


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.arch)
def test_devices_differ_as_their_figures_do(device: object) -> None:
    plan = plan_cuda(find("W1")[0].problem(Pass.FPROP), V100)
    launch = max(plan.launches, key=lambda one: one.work.steps)
    here, there = resource_us(launch, V100), resource_us(launch, device)  # type: ignore[arg-type]
    assert there["memory"] == pytest.approx(here["memory"] * V100.dram_gbs / device.dram_gbs)  # type: ignore[attr-defined]
    rates = [one.sms * one.clock_mhz for one in (V100, device)]  # type: ignore[attr-defined]
    assert there["issue"] == pytest.approx(here["issue"] * rates[0] / rates[1])
