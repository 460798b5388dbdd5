"""The chips whose machine code is executed: what a launch may ask for, and what each resource does in a cycle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LANES = 32
SCHEDULERS = 4
"""Sub-partitions of an SM. Each has a quarter of the registers, and warps do not share one across them."""
WARPS_PER_SM, BLOCKS_PER_SM, REGISTERS_PER_SM = 64, 32, 65536
THREADS_PER_BLOCK = 1024

PIPE_CYCLES = {"fma": 2, "alu": 2, "fp64": 4, "xu": 8, "lsu": 1, "control": 1, "uniform": 1, "fp16": 1}
"""Cycles for which one warp instruction occupies its pipe in one sub-partition. Of the tensor pipe, see the chips."""


@dataclass(frozen=True)
class Chip:
    """One GPU. Figures from NVIDIA's architecture papers and the table of compute capabilities."""

    name: str
    arch: str
    sms: int
    clock_mhz: float
    dram_gbs: float
    l2_bytes: int
    l2_bytes_per_clk: float
    shared_per_sm: int
    shared_unit: int
    """Shared memory is given to blocks in multiples of this."""
    shared_reserved: int
    """Bytes that the system takes of every block's share."""
    tensor_rates: Mapping[str, int] = field(hash=False)
    """Multiply-adds that one sub-partition's tensor core does in a cycle, by the type of their factors."""

    @property
    def shared_per_block(self) -> int:
        """The most that one block can have, with the opt-in."""
        return self.shared_per_sm - self.shared_reserved

    def blocks_per_sm(self, registers: int, threads: int, shared: int) -> int:
        """How many blocks an SM holds at once: the least of four limits."""
        warps = -(-threads // LANES)
        if warps == 0 or threads > THREADS_PER_BLOCK:
            return 0
        limits = [BLOCKS_PER_SM, WARPS_PER_SM // warps]
        if registers:
            per_warp = -(-registers // 8) * 8 * LANES
            limits.append(SCHEDULERS * (REGISTERS_PER_SM // SCHEDULERS // per_warp) // warps)
        if taken := shared + self.shared_reserved:
            limits.append(self.shared_per_sm // (-(-taken // self.shared_unit) * self.shared_unit))
        return min(limits)


V100 = Chip(
    name="V100",
    arch="sm_70",
    sms=80,
    clock_mhz=1530,
    dram_gbs=900,
    l2_bytes=6 * 2**20,
    l2_bytes_per_clk=2048,
    shared_per_sm=96 * 1024,
    shared_unit=256,
    shared_reserved=0,
    tensor_rates={"F16": 128},
)
A100 = Chip(
    name="A100",
    arch="sm_80",
    sms=108,
    clock_mhz=1410,
    dram_gbs=1555,
    l2_bytes=40 * 2**20,
    l2_bytes_per_clk=5120,
    shared_per_sm=164 * 1024,
    shared_unit=128,
    shared_reserved=1024,
    tensor_rates={"F16": 256, "BF16": 256, "TF32": 128},
)
CHIPS = {chip.arch: chip for chip in (V100, A100)}
