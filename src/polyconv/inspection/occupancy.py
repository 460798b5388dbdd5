"""How many blocks of a kernel a multiprocessor holds at once, from what its cubin asks for."""

from __future__ import annotations

from dataclasses import dataclass

from ..rounding import ceil_div, round_up

REGISTERS_PER_SCHEDULER = 16384
"""Each of the four schedulers of a multiprocessor has a quarter of its registers; a warp's come from one of them."""


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What one multiprocessor offers. Figures from the CUDA programming guide's table of compute capabilities."""

    warps: int
    blocks: int
    shared_bytes: int
    shared_unit: int = 128
    """Shared memory is given to blocks in multiples of this."""
    shared_reserved: int = 1024
    """Bytes that the system takes of every block's share."""


LIMITS = {
    "sm_70": SmLimits(64, 32, 96 * 1024, shared_unit=256, shared_reserved=0),
    "sm_75": SmLimits(32, 16, 64 * 1024, shared_unit=256, shared_reserved=0),
    "sm_80": SmLimits(64, 32, 164 * 1024),
    "sm_86": SmLimits(48, 16, 100 * 1024),
    "sm_89": SmLimits(48, 24, 100 * 1024),
    "sm_90": SmLimits(64, 32, 228 * 1024),
    "sm_100": SmLimits(64, 32, 228 * 1024),
    "sm_120": SmLimits(48, 24, 100 * 1024),
}


def blocks_per_sm(arch: str, registers: int, threads: int, shared: int) -> int | None:
    """The least of four limits: blocks, warps, registers, shared memory. ``None`` for an architecture not listed."""
    limits = LIMITS.get(arch)
    if limits is None:
        return None
    warps = ceil_div(threads, 32)
    registers_of_warp = round_up(max(registers, 1), 8) * 32
    bound = [limits.blocks, limits.warps // warps, 4 * (REGISTERS_PER_SCHEDULER // registers_of_warp) // warps]
    taken = shared + limits.shared_reserved
    if taken:
        bound.append(limits.shared_bytes // round_up(taken, limits.shared_unit))
    return min(bound)
