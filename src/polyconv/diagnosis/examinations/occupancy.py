"""Every kernel is accepted by the driver, and a multiprocessor holds as many blocks of it as were planned with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ...cuda import driver
from ...plan.cost import resident_blocks, why_not_on
from ...plan.plan import Task
from ..every_kernel import selected
from ..examination import Answer, Examination, Needs, Part, doubtful, fine, not_here, wrong
from ..subject import Subject


def parts(subject: Subject) -> Mapping[str, Part]:
    tasks = {task.kernel.symbol: task for way in selected(subject).values() for task in way.tasks}
    return {symbol: partial(launchable, subject, task) for symbol, task in sorted(tasks.items())}


def launchable(subject: Subject, task: Task) -> Answer:
    """Loaded, given its shared memory, and asked for its occupancy: all that the driver can refuse before a launch."""
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
        return wrong(f"a multiprocessor holds no block of it: {kernel.info}", **figures)
    if held < believed:
        return doubtful(f"a multiprocessor holds {held} blocks of it, and {believed} were planned with", **figures)
    return fine(**figures)


OCCUPANCY = Examination(
    "occupancy",
    "every kernel can be launched, and as many blocks of it run at once as its cost was reckoned with",
    parts,
    Needs.NOTHING,
    quick=True,
)
