"""Occupancy: resident blocks of a kernel per multiprocessor, from the resources of a block."""

from __future__ import annotations

from dataclasses import dataclass

from ...util.intmath import ceil_div, round_up

SCHEDULERS = 4
"""Warp schedulers per multiprocessor. Each has its share of the registers; a warp's come from one of them."""


@dataclass(frozen=True, slots=True)
class SmLimits:
    """Limits of one multiprocessor, from the CUDA programming guide's table of compute capabilities."""

    warps: int
    blocks: int
    shared_bytes: int
    registers: int = 65536
    shared_unit: int = 128
    """Allocation granularity of shared memory [bytes]."""
    shared_reserved: int = 1024
    """Shared memory per block that the system reserves [bytes]."""

    def holds(self, threads: int, shared: int, registers: int = 0) -> int:
        """Resident blocks, given threads and shared bytes per block and registers per thread (0: no limit)."""
        warps = ceil_div(threads, 32)
        bound = [self.blocks, self.warps // warps]
        if registers:
            of_warp = round_up(registers, 8) * 32
            bound.append(SCHEDULERS * (self.registers // SCHEDULERS // of_warp) // warps)
        taken = shared + self.shared_reserved
        if taken:
            bound.append(self.shared_bytes // round_up(taken, self.shared_unit))
        return min(bound)


LIMITS = {
    "sm_70": SmLimits(64, 32, 96 * 1024, shared_unit=256, shared_reserved=0),
    "sm_75": SmLimits(32, 16, 64 * 1024, shared_unit=256, shared_reserved=0),
    "sm_80": SmLimits(64, 32, 164 * 1024),
    "sm_86": SmLimits(48, 16, 100 * 1024),
    "sm_87": SmLimits(48, 16, 164 * 1024),
    "sm_89": SmLimits(48, 24, 100 * 1024),
    "sm_90": SmLimits(64, 32, 228 * 1024),
    "sm_100": SmLimits(64, 32, 228 * 1024),
    "sm_103": SmLimits(64, 32, 228 * 1024),
    "sm_120": SmLimits(48, 24, 100 * 1024),
    "sm_121": SmLimits(48, 24, 100 * 1024),
}


def blocks_per_sm(arch: str, registers: int, threads: int, shared: int) -> int | None:
    """Resident blocks of a compiled kernel; None for an architecture not in :data:`LIMITS`."""
    limits = LIMITS.get(arch)
    return None if limits is None else limits.holds(threads, shared, max(registers, 1))
