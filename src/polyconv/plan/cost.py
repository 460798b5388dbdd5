"""What a schedule would take: from counted instructions and bytes, and the device's figures. Never a measurement.

Each kernel has been executed as machine code on small problems, and everything that it spent was counted and divided
among its blocks, tiles and steps (``profiles.json``, written by ``benchmarks/gpu/profile_kernels.py``). A launch says
how many of these it has, so its counts follow for any problem, and from them the time that each resource needs: the
FP32 pipe, the integer pipe, issue slots, the L1 with its shared memory, the L2, the tensor cores and the memory. The
largest is the *bound*: no schedule of the same instructions is faster. Then comes what the bound leaves out: latencies
that are not hidden (a share by kind of kernel, from simulation), a last wave that does not fill the device, and the
launch itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ..rounding import round_up
from ..select import PlanError
from ..tf32 import half_per_clock
from .device import L2_BYTES_PER_CLOCK, CudaDevice
from .plan import KernelSpec, Launch, Task

LAUNCH_US = 3.0
"""What a launch costs beside its work."""
COUNTED_L2_BYTES = L2_BYTES_PER_CLOCK["sm_70"]
"""Bytes of one cycle of the L2 in the profiles: they count in cycles of a V100."""
COUNTED_PRODUCTS = half_per_clock("sm_70", "Tesla V100", "float16")
"""Multiply-adds of one cycle of the tensor cores, likewise."""


class Spent(NamedTuple):
    """Cycles of one multiprocessor of a V100, by resource."""

    fp32: float
    integer: float
    issue: float
    l1: float
    l2: float
    tensor: float = 0.0


class Profile(NamedTuple):
    """What a kernel spends on one block, one tile and one step."""

    block: Spent
    tile: Spent
    step: Spent


EFFICIENCY = {
    "gather_gemm": 0.94,
    "wgrad_gemm": 0.85,
    "half_gemm": 0.6,
    "fused": 0.5,
    "fused_tensor": 0.55,
    "toom_wgrad": 0.5,
    "toom_wgrad_tensor": 0.5,
    "tensor_product": 0.75,
}
"""Share of its bound that a kernel reaches where arithmetic, issue slots or shared memory bind, by stem: simulated;
tensor_product by a coarse model of one block on a V100, and taken to be the same on newer GPUs; toom_wgrad_tensor is
taken to reach what toom_wgrad does; fused_tensor such that it compares with fused_resident as in simulation."""
OTHER_EFFICIENCY = 0.8
IN_THE_WAY = 0.05
"""Share of the other resources' time that adds to the scarcest one's: of two equal bounds, the leaner kernel wins."""
DRAM_EFFICIENCY = 0.85
"""Share of the data-sheet bandwidth that streaming kernels reach."""


FINISHED = Spent(0.1, 0.08, 0.1, 0.05, 0.16)
"""What an epilogue adds for one element: about what is counted with a residual and SiLU, the costliest, where a kernel
stores several elements at a time (``benchmarks/gpu/count_epilogue.py``; one at a time: up to 0.35). Special functions
take 0.125 of their own pipe, a quarter of what the memory takes for each time that an element crosses it."""


@lru_cache(maxsize=1)
def profiles() -> Mapping[str, Profile]:
    """By the kernel's symbol."""
    found = json.loads(Path(__file__).with_name("profiles.json").read_text(encoding="utf-8"))
    return {symbol: Profile(*(Spent(*part) for part in parts)) for symbol, parts in found["kernels"].items()}


def profile_of(kernel: KernelSpec) -> Profile:
    try:
        return profiles()[kernel.twin or kernel.symbol]
    except KeyError:
        raise PlanError(
            f"{kernel.symbol} has not been counted: run benchmarks/gpu/profile_kernels.py, which writes profiles.json"
        ) from None


def _spent_us(launch: Task | Launch, device: CudaDevice) -> Spent:
    """Microseconds that each resource but the memory needs."""
    work, (block, tile, step) = launch.work, profile_of(launch.kernel)
    blocks, tiles, steps, done = work.blocks, work.tiles, work.steps, work.finished
    rate = device.sms * device.clock_mhz
    # Written out, because this is what planning spends its time on.
    fp32 = blocks * block.fp32 + tiles * tile.fp32 + steps * step.fp32 + done * FINISHED.fp32
    integer = blocks * block.integer + tiles * tile.integer + steps * step.integer + done * FINISHED.integer
    issue = blocks * block.issue + tiles * tile.issue + steps * step.issue + done * FINISHED.issue
    l1 = blocks * block.l1 + tiles * tile.l1 + steps * step.l1 + done * FINISHED.l1
    l2 = blocks * block.l2 + tiles * tile.l2 + steps * step.l2 + done * FINISHED.l2
    tensor = blocks * block.tensor + tiles * tile.tensor + steps * step.tensor
    return Spent(
        fp32 * 64 / device.fp32_per_clock / rate,
        integer / rate,
        issue / rate,
        (l1 + work.scattered_lines) / rate,
        (l2 * COUNTED_L2_BYTES + work.scattered_sectors * 32) / (device.l2_gbs * 1e3),
        tensor * COUNTED_PRODUCTS / device.products_per_clock(launch.kernel.dtype) / rate if tensor else 0.0,
    )


def _memory_us(launch: Task | Launch, device: CudaDevice) -> float:
    """Of what passes between the launches of a slab that stays in the L2, the memory sees nothing."""
    work = launch.work
    kept = work.passed_bytes if work.slab_bytes <= device.l2_slab_bytes else 0
    return (work.dram_bytes - kept) / (device.dram_gbs * 1e3)


def resource_us(launch: Task | Launch, device: CudaDevice) -> dict[str, float]:
    """Microseconds that each resource needs, everything else being free and all multiprocessors evenly filled."""
    return {**_spent_us(launch, device)._asdict(), "memory": _memory_us(launch, device)}


def bound_us(launch: Task | Launch, device: CudaDevice) -> float:
    """The least time that a launch can take: that of the resource it needs most."""
    return max(resource_us(launch, device).values())


def launch_us(launch: Task | Launch, device: CudaDevice) -> float:
    """The bound, with what it leaves out."""
    spent = _spent_us(launch, device)
    memory = _memory_us(launch, device) / DRAM_EFFICIENCY
    most = max(spent)
    crowded = most + IN_THE_WAY * (sum(spent) - most)
    inside = crowded / EFFICIENCY.get(launch.kernel.stem, OTHER_EFFICIENCY) * _unevenness(launch, device)
    return max(inside, memory) + IN_THE_WAY * min(inside, memory) + LAUNCH_US


def tasks_us(tasks: Iterable[Task], device: CudaDevice) -> float:
    """All launches, one after another."""
    return sum(task.times * launch_us(task, device) for task in tasks)


def worth_residing(tasks: Iterable[Task], device: CudaDevice) -> bool:
    """Whether slabs that stay in the L2 would spare the memory more time than their launches add: where they are not
    that small already, and the L2 is not so small that they would be too many."""
    resident, gained = device.l2_slab_bytes, 0.0
    for task in tasks:
        work = task.work
        if work.slab_bytes > resident:
            gained += task.times * work.passed_bytes / (device.dram_gbs * 1e3)
            gained -= task.times * (work.slab_bytes / resident - 1) * LAUNCH_US
    return gained > 0


def _unevenness(launch: Task | Launch, device: CudaDevice) -> float:
    """How much longer the busiest multiprocessor works than the average one."""
    work = launch.work
    if not work.blocks:
        return 1.0
    slots = device.sms * resident_blocks(launch, device)
    if work.tiles > work.blocks:  # persistent: blocks walk over tiles
        queued = waves(work.blocks, slots) * slots / work.blocks if work.blocks > slots else 1.0
        return queued * round_up(work.tiles, work.blocks) / work.tiles
    if work.blocks <= slots:
        return round_up(work.blocks, device.sms) / work.blocks
    return waves(work.blocks, slots) * slots / work.blocks


def resident_blocks(launch: Task | Launch, device: CudaDevice) -> int:
    """Blocks of a launch that a multiprocessor holds at once: as many as the kernel is compiled for, unless the device
    has less shared memory or room for fewer threads, or something else was read from the compiled kernel."""
    kernel = launch.kernel
    believed = min(kernel.min_blocks, device.limits.holds(kernel.threads, launch.dynamic_shared))
    return max(1, min(believed, device.read.get(kernel.symbol, believed)))


def why_not_on(tasks: Iterable[Task], device: CudaDevice) -> str | None:
    """Why a device cannot run these launches, or None."""
    for task in tasks:
        if (refused := device.refused.get(task.kernel.symbol)) is not None:
            return f"{task.kernel.symbol} cannot be used on this device: {refused}"
        if not task.kernel.runs_on(device.arch):
            return f"{task.kernel.symbol} multiplies by an instruction that {device.arch} does not have at full rate"
        if task.dynamic_shared > device.shared_per_block_optin:
            return (
                f"a block of {task.kernel.symbol} needs {task.dynamic_shared} bytes of shared memory, "
                f"and {device.name} gives it {device.shared_per_block_optin}"
            )
    return None


def waves(blocks: int, slots: int) -> float:
    """Waves that the device needs. A last partial one takes less than a whole one: fewer blocks share what there is."""
    whole, rest = divmod(blocks, slots)
    return whole + (0.0 if rest == 0 else max(rest / slots, 0.5 if whole else 1.0))
