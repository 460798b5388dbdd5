"""An analytic estimate of a kernel's time: pure arithmetic on the device's figures, never a measurement.

A kernel is bound by whichever is slowest: its FP32 pipe, its shared-memory port, its issue slots or the memory. Blocks
come in waves; a last wave that does not fill the device still takes its whole time. The figures rank candidates; they
do not promise milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from .device import CudaDevice
from .tiles import GemmTile

LAUNCH_US = 3.0
"""What a launch costs beside its work."""
DRAM_SHARE = 0.85
"""Share of the data-sheet bandwidth that streaming kernels reach."""


@dataclass(frozen=True, slots=True)
class GemmWork:
    """What a step of eight reduction rows costs a block beside the multiplications and the shared-memory tile."""

    gather_instructions: float
    """Integer and load instructions per gathered element of the larger operand."""
    lines: float
    """128-byte lines of global memory that the block's loads of one step touch: cycles of the L1."""


def gemm_step_cycles(tile: GemmTile, work: GemmWork, device: CudaDevice) -> float:
    """Multiprocessor cycles that one block's step of eight reduction rows takes at full occupancy."""
    warps = tile.threads / 32
    ffma = tile.thread_m * tile.thread_n * 8
    loads = (tile.thread_m + tile.thread_n) / 4 * 8
    gathered = tile.m * 8 / tile.threads
    packed = tile.n * 8 / 4 / tile.threads
    other = loads + gathered * (2 + work.gather_instructions) + 4 * packed + 30
    # Address arithmetic is partly integer multiply-adds, which share the FP32 pipe: fitted to what tools/volta counts.
    fp32 = warps * (ffma + 5 + gathered * (1.5 + 0.15 * work.gather_instructions)) * 32 / device.fp32_per_clock
    issue = warps * (ffma + other) / 4
    # Shared memory and L1 are one unit: a quarter of a 16-byte fragment load, a stored row or a line per cycle.
    stores = (tile.m + tile.n) * 8 / 32
    memory = warps * loads * 4 + stores + work.lines
    return max(fp32, issue, memory)


def waves(blocks: int, slots: int) -> float:
    """Waves that the device needs, counting a last partial wave as the share of a wave that its latency costs."""
    whole, rest = divmod(blocks, slots)
    return whole + (0.0 if rest == 0 else max(rest / slots, 0.5 if whole else 1.0))


def gemm_us(
    tile: GemmTile, work: GemmWork, blocks: int, steps: float, resident: int, moved_bytes: float, device: CudaDevice
) -> float:
    """Microseconds for ``blocks`` blocks of ``steps`` steps, ``resident`` of them on a multiprocessor at a time."""
    prologue = 400 + 8 * tile.thread_m * tile.thread_n
    per_block = steps * gemm_step_cycles(tile, work, device) + prologue
    # Fewer than thirteen warps on a multiprocessor hide less of the latency of loads and barriers.
    present = min(resident, -(-blocks // device.sms)) * tile.threads / 32
    hidden = min(1.0, 0.6 + 0.4 * present / 13)
    cycles = waves(blocks, device.sms * resident) * resident * per_block / hidden
    return max(cycles / device.clock_mhz, memory_us(moved_bytes, device)) + LAUNCH_US


def memory_us(moved_bytes: float, device: CudaDevice) -> float:
    return moved_bytes / (device.dram_gbs * DRAM_SHARE * 1e3)
