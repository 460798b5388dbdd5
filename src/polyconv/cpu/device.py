"""Description of the processor, as the cost model needs it; read from the machine once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..util.cpuinfo import usable_cores
from .profiles import Profile

VECTOR_LANES = {"avx512": 16, "avx2": 8, "sse4": 4, "neon": 4}
"""Floats per vector, by the native kernels' instruction set."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """A processor. Costs are cycles of one core; the defaults describe a server core with AVX-512."""

    instruction_set: str = "avx512"
    cores: int = 1
    l1_bytes: int = 48 * 2**10
    l2_bytes: int = 2 * 2**20
    profile: Profile | None = None
    """Measured corrections, possibly of another processor. None: the cost model's estimates are used uncorrected."""

    @property
    def lanes(self) -> int:
        return VECTOR_LANES[self.instruction_set]

    @property
    def tile_channels(self) -> int:
        """Output channels of a register tile: AVX-512 and NEON have 32 registers, the others 16."""
        return 8 if self.instruction_set in ("avx512", "neon") else 4

    def __str__(self) -> str:
        return (
            f"{self.cores} cores with {self.instruction_set}, {self.l1_bytes // 2**10} KiB L1 and "
            f"{self.l2_bytes // 2**10} KiB L2 each"
        )


@lru_cache(maxsize=8)
def this_machine(instruction_set: str) -> CpuDevice:
    """The current processor, with the instruction set used by the native kernels."""
    found = {level: size for level in (1, 2) if (size := _cache_bytes(level))}
    default = CpuDevice()
    return CpuDevice(
        instruction_set,
        cores=usable_cores(),
        l1_bytes=found.get(1, default.l1_bytes),
        l2_bytes=found.get(2, default.l2_bytes),
    )


def _cache_bytes(level: int) -> int | None:
    """Size of a data or unified cache [bytes] from sysfs, or None if it is not there."""
    for index in sorted(_CACHES.glob("index*")):
        try:
            if int((index / "level").read_text()) != level or (index / "type").read_text().strip() == "Instruction":
                continue
            text = (index / "size").read_text().strip()
            return int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1], 1)
        except (OSError, ValueError):
            return None
    return None
