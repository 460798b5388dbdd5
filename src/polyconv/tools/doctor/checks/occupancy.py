"""Occupancy: the driver accepts every kernel, with the number of blocks per multiprocessor assumed by the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ....cuda import driver
from ....cuda.planner.cost import resident_blocks, why_not_on
from ....cuda.planner.plan import Task
from ..check import Part, Result, failed, not_here, passed, warning
from ..device_under_test import GpuUnderTest
from ..kernel_coverage import selected


def parts(subject: GpuUnderTest) -> Mapping[str, Part]:
    tasks = {task.kernel.symbol: task for way in selected(subject).values() for task in way.tasks}
    return {symbol: partial(launchable, subject, task) for symbol, task in sorted(tasks.items())}


def launchable(subject: GpuUnderTest, task: Task) -> Result:
    """Load a kernel, set its shared memory and query its occupancy: everything that can fail before a launch."""
    if why_not := why_not_on((task,), subject.description):
        return not_here(why_not)
    gpu = driver.device(subject.index)
    kernel = gpu.load(task.kernel, subject.cache.get(task.kernel, subject.description.arch))
    with gpu.activate():
        kernel.allow_shared(task.dynamic_shared)
        held = kernel.blocks_per_sm(task.dynamic_shared)
    believed = resident_blocks(task, replace(subject.description, resident=()))
    figures: dict[str, Any] = {
        "blocks": held,
        "planned": believed,
        "registers": kernel.info.registers,
        "stack": kernel.info.stack,
        "shared": kernel.info.static_shared + task.dynamic_shared,
    }
    if held < 1:
        return failed(f"a multiprocessor holds no block of it: {kernel.info}", **figures)
    if held < believed:
        return warning(f"a multiprocessor holds {held} blocks of it, and {believed} were planned with", **figures)
    return passed(**figures)
