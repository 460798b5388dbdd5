"""Cost model of a schedule, from counted instructions and bytes and the device's figures. Never a measurement.

Each kernel was executed as machine code on small problems, and its use of each resource was counted per block, tile and
step (``profiles.json``, written by ``benchmarks/gpu/profile_kernels.py``). A launch states how many of these it has, so
the time of each resource follows for any problem: FP32 pipe, integer pipe, issue slots, L1 with shared memory, L2,
tensor cores and DRAM. The largest is the *bound*: no schedule of the same instructions is faster. The model adds
unhidden latencies (a share per kind of kernel, from simulation), a partial last wave, and the launch overhead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import NamedTuple

from ...problem import HALF_DTYPES, Pass, Problem
from ...selection import PlanError
from ...util.gpu_arch import half_per_clock
from ...util.intmath import round_up
from .device import L2_BYTES_PER_CLOCK, CudaDevice
from .plan import KernelSpec, Launch, Task

LAUNCH_US = 3.0
"""Launch overhead."""
COUNTED_L2_BYTES = L2_BYTES_PER_CLOCK["sm_70"]
"""Bytes per L2 cycle of a V100, the unit of the profiles."""
COUNTED_PRODUCTS = half_per_clock("sm_70", "Tesla V100", "float16")
"""Multiply-adds per tensor-core cycle of a V100, likewise."""


class Spent(NamedTuple):
    """Use of each resource: in a profile, cycles of one V100 multiprocessor; of a launch, microseconds."""

    fp32: float
    integer: float
    issue: float
    l1: float
    l2: float
    tensor: float = 0.0


LINE, SECTOR = 128, 32
"""Bytes of a line of the L1 and of a sector of the L2."""


def scattered(each: int, step: float, unit: int = LINE, lanes: int = 32) -> float:
    """Extra lines, or sectors, of one access to elements of ``each`` bytes that lie ``step`` bytes apart, not side by
    side. A lane's element is in another line than its neighbour's with the probability distance / line."""
    return max(0.0, (lanes - 1) * (min(unit, abs(step)) - min(unit, each)) / unit)


class Profile(NamedTuple):
    """Cost of one block, one tile and one step of a kernel."""

    block: Spent
    tile: Spent
    step: Spent


IN_THE_WAY = 0.05
"""Share of the other resources' time added to the bound: of two equal bounds, the leaner kernel wins."""
DRAM_EFFICIENCY = 0.85
"""Share of the data-sheet bandwidth that streaming kernels reach."""


FINISHED = Spent(0.1, 0.08, 0.1, 0.05, 0.16)
"""Epilogue cost per element: about that of a residual and SiLU, the most expensive, in kernels that store several
elements at a time (``benchmarks/gpu/count_epilogue.py``; one at a time: up to 0.35). Special functions take 0.125 of
their own pipe, a quarter of the DRAM time of reading or writing the element once."""


SINGLY = {
    False: Spent(0.05, 0.1, 0.1, 0.2, 0.55),
    True: Spent(0.68, 0.66, 0.86, 0.0, 0.04),
}
"""Cost per element that an implicit GEMM stores alone, compared with four pixels at a time; True: on tensor cores,
where a thread finds the place of each store anew. The same for all tiles, on sm_70 and sm_80
(``benchmarks/gpu/count_epilogue.py``)."""


AMPERE = "@sm_80"
"""Mark of a profile that was counted on sm_80 for a kernel that sm_70 has, too: matrix instructions differ."""


@lru_cache(maxsize=2)
def profiles(ampere: bool) -> Mapping[str, Profile]:
    """Profiles by kernel symbol, for GPUs before sm_80 or from it on."""
    kernels = json.loads(Path(__file__).with_name("profiles.json").read_text(encoding="utf-8"))["kernels"]
    found = {symbol: Profile(*(Spent(*part) for part in parts)) for symbol, parts in kernels.items()}
    newer = {symbol.removesuffix(AMPERE): found.pop(symbol) for symbol in kernels if symbol.endswith(AMPERE)}
    return {**found, **newer} if ampere else found


def profile_of(kernel: KernelSpec, device: CudaDevice) -> Profile:
    try:
        return profiles(device.ampere)[kernel.twin or kernel.symbol]
    except KeyError:
        raise PlanError(
            f"{kernel.symbol} has not been counted: run benchmarks/gpu/profile_kernels.py, which writes profiles.json"
        ) from None


def _spent_us(launch: Task | Launch, device: CudaDevice) -> Spent:
    """Time of each resource except DRAM [us]."""
    work, (block, tile, step) = launch.work, profile_of(launch.kernel, device)
    blocks, tiles, steps, done = work.blocks, work.tiles, work.steps, work.finished
    rate = device.sms * device.clock_mhz
    if work.stored_singly:
        tile = _with_single_stores(tile, launch)
    # Unrolled: planning spends most of its time here.
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


def _with_single_stores(tile: Spent, launch: Task | Launch) -> Spent:
    """Cost of a tile with its share of the elements that the launch stores one at a time."""
    each = launch.work.stored_singly / launch.work.tiles
    singly = SINGLY[launch.kernel.dtype in HALF_DTYPES]
    return Spent(*(own + each * one for own, one in zip(tile, singly, strict=True)))


def _memory_us(launch: Task | Launch, device: CudaDevice) -> float:
    """DRAM time [us]. Bytes passed between the launches of a slab that stays in the L2 are free."""
    work = launch.work
    kept = work.passed_bytes if work.slab_bytes <= device.l2_slab_bytes else 0
    return (work.dram_bytes - kept) / (device.dram_gbs * 1e3)


def resource_us(launch: Task | Launch, device: CudaDevice) -> dict[str, float]:
    """Time of each resource [us] on its own, with all multiprocessors evenly filled."""
    return {**_spent_us(launch, device)._asdict(), "memory": _memory_us(launch, device)}


def cold(launch: Launch) -> Launch:
    """The launch as counted (:mod:`polyconv.tools.inspect.emulated_cost`): all of its traffic is DRAM's."""
    return replace(launch, work=replace(launch.work, passed_bytes=0))


def bound_us(launch: Task | Launch, device: CudaDevice) -> float:
    """Lower bound of a launch's time [us]: that of its busiest resource."""
    return max(resource_us(launch, device).values())


def launch_us(launch: Task | Launch, device: CudaDevice) -> float:
    """Modelled time of a launch [us]: the bound plus what it leaves out."""
    spent = _spent_us(launch, device)
    memory = _memory_us(launch, device) / DRAM_EFFICIENCY
    most = max(spent)
    crowded = most + IN_THE_WAY * (sum(spent) - most)
    inside = crowded / launch.kernel.efficiency * _unevenness(launch, device)
    return max(inside, memory) + IN_THE_WAY * min(inside, memory) + LAUNCH_US


def tasks_us(tasks: Iterable[Task], device: CudaDevice) -> float:
    """Modelled time of all launches in sequence [us]."""
    return sum(task.times * launch_us(task, device) for task in tasks)


def worth_residing(tasks: Iterable[Task], device: CudaDevice) -> bool:
    """Whether L2-resident slabs would save more DRAM time than their additional launches cost. Only slabs too large for
    the L2 count."""
    resident, gained = device.l2_slab_bytes, 0.0
    for task in tasks:
        work = task.work
        if work.slab_bytes > resident:
            gained += task.times * work.passed_bytes / (device.dram_gbs * 1e3)
            gained -= task.times * (work.slab_bytes / resident - 1) * LAUNCH_US
    return gained > 0


def _unevenness(launch: Task | Launch, device: CudaDevice) -> float:
    """Ratio of the busiest multiprocessor's time to the average."""
    work = launch.work
    if not work.blocks:
        return 1.0
    slots = device.sms * resident_blocks(launch, device)
    among_sms = round_up(work.blocks, device.sms) if work.blocks <= slots else waves(work.blocks, slots) * slots
    if work.tiles > work.blocks:  # persistent: blocks walk over tiles
        return among_sms * round_up(work.tiles, work.blocks) / work.blocks / work.tiles
    return among_sms / work.blocks


def resident_blocks(launch: Task | Launch, device: CudaDevice) -> int:
    """Resident blocks per multiprocessor: the launch bound, unless the device's shared memory, its thread limit or the
    occupancy read from the compiled kernel allow fewer."""
    kernel = launch.kernel
    believed = min(kernel.min_blocks, device.limits.holds(kernel.threads, launch.dynamic_shared))
    return max(1, min(believed, device.read.get(kernel.symbol, believed)))


def why_not_on(tasks: Iterable[Task], device: CudaDevice) -> str | None:
    """Why the device cannot run one of these launches, or None."""
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
    """Waves of blocks. A partial wave after full ones counts for less than one: fewer blocks share the resources."""
    whole, rest = divmod(blocks, slots)
    return whole + (0.0 if rest == 0 else max(rest / slots, 0.5 if whole else 1.0))


@lru_cache(maxsize=1024)
def moved_bytes(problem: Problem) -> int:
    """Bytes of x and y, each element counted once, without the rows of x that a large stride skips."""
    return int(problem.element_bytes * (prod(problem.x_shape) * _rows_read(problem) + prod(problem.y_shape)))


def _rows_read(problem: Problem) -> float:
    """Share of the rows of x that a pass touches: below 1 if the stride is larger than the kernel."""
    height, top = problem.in_size[0], problem.padding[0]
    if problem.kind is Pass.DGRAD or problem.stride[0] == 1:
        return 1.0
    taps = [tap * problem.dilation[0] - top for tap in range(problem.kernel[0])]
    rows = {out * problem.stride[0] + tap for out in range(problem.out_size[0]) for tap in taps}
    return sum(0 <= row < height for row in rows) / height
