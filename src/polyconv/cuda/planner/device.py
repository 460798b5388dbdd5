"""GPU figures for the cost model, and launch limits."""

from __future__ import annotations

from dataclasses import dataclass

from ...util import gpu_arch
from ...util.cached import cached_property
from .occupancy import LIMITS, SmLimits

OLDEST_ARCH = 70

L2_BYTES_PER_CLOCK = {"sm_70": 2048 / 80, "sm_80": 35.0, "sm_89": 14.7, "sm_90": 37.0}
"""L2 bandwidth per clock and multiprocessor, by architecture. V100: from its paper; A100 (5.4 TB/s), L40 (5.2) and H200
(9.7): measured by gpu-l2-cache of github.com/te42kyfo/gpu-benches. Others are assumed to equal a V100."""

MOST_BY_MMA_SYNC = 1270
"""16-bit multiply-adds per clock and multiprocessor that mma.sync, used by all kernels here, reaches: about 62 % of an
H100's peak, which takes other instructions. Newer GPUs are assumed to be no faster with it."""

RESIDENT_SHARE = 0.4
"""Share of the L2 that data passed between two kernels may take and still be resident for the second. About half as
much streams through meanwhile; and an A100, whose 40 MiB are in two halves, reads at most 26 MiB at full speed (an L40
and an H200 nine tenths of theirs: the measurements cited above)."""


@dataclass(frozen=True)
class CudaDevice:
    """GPU description for the planner. Equal descriptions lead to equal plans."""

    name: str
    arch: str
    """Architecture as passed to the compiler: ``sm_70``."""
    sms: int
    clock_mhz: int
    dram_gbs: float
    shared_per_sm: int
    shared_per_block_optin: int
    registers_per_sm: int
    l2_bytes: int
    threads_per_sm: int
    blocks_per_sm: int
    resident: tuple[tuple[str, int], ...] = ()
    """Kernels (symbol, blocks) with fewer resident blocks per multiprocessor than their launch bound, according to the
    driver."""
    unusable: tuple[tuple[str, str], ...] = ()
    """Kernels (symbol, reason) that could not be compiled, loaded or launched. No plan names them."""

    @cached_property
    def fp32_per_clock(self) -> int:
        """FP32 multiply-adds per clock and multiprocessor."""
        return gpu_arch.fp32_per_clock(self.arch)

    def products_per_clock(self, dtype: str) -> int:
        """16-bit multiply-adds with float32 accumulation per clock and multiprocessor."""
        return min(gpu_arch.half_per_clock(self.arch, self.name, dtype), MOST_BY_MMA_SYNC)

    @cached_property
    def ampere(self) -> bool:
        """Whether it has the matrix instructions of sm_80, as all GPUs since."""
        return gpu_arch.capability(self.arch) >= 80

    @cached_property
    def l2_gbs(self) -> float:
        """L2 bandwidth [GB/s]."""
        of_one = L2_BYTES_PER_CLOCK.get(self.arch, L2_BYTES_PER_CLOCK["sm_70"])
        return self.sms * self.clock_mhz * of_one / 1e3

    @cached_property
    def l2_slab_bytes(self) -> int:
        """Size of the largest slab that stays in the L2 from kernel to kernel."""
        return int(RESIDENT_SHARE * self.l2_bytes)

    @cached_property
    def limits(self) -> SmLimits:
        """Occupancy limits of one multiprocessor."""
        known = LIMITS.get(self.arch)
        unit, reserved = (known.shared_unit, known.shared_reserved) if known else (128, 1024)
        warps = self.threads_per_sm // 32
        return SmLimits(warps, self.blocks_per_sm, self.shared_per_sm, self.registers_per_sm, unit, reserved)

    @cached_property
    def read(self) -> dict[str, int]:
        """:attr:`resident`, by symbol."""
        return dict(self.resident)

    @cached_property
    def refused(self) -> dict[str, str]:
        """:attr:`unusable`, by symbol."""
        return dict(self.unusable)


def has_tf32(device: CudaDevice) -> bool:
    """Whether PyTorch's convolutions use TF32 on the device, if its flags allow that."""
    return gpu_arch.per_clock(device.arch, device.name) > 0


def why_too_old(arch: str, name: str = "") -> str | None:
    """User message why polyconv does not support an architecture; None if it does."""
    digits = arch.removeprefix("sm_").rstrip("af")
    if not digits.isdigit() or int(digits) >= OLDEST_ARCH:
        return None
    return (
        f"polyconv's kernels need compute capability 7.0 (Tesla V100) or newer; {name or 'a GPU of ' + arch} has "
        f"{digits[:-1]}.{digits[-1]}. polyconv.restore(model) gives a model torch's modules back"
    )


MIB = 2**20


def _known(name: str, arch: str, sms: int, clock_mhz: int, dram_gbs: float, l2_mib: int) -> CudaDevice:
    """A GPU by its data-sheet figures; limits per multiprocessor follow from the architecture."""
    limits = LIMITS[arch]
    return CudaDevice(
        name,
        arch,
        sms,
        clock_mhz,
        dram_gbs,
        shared_per_sm=limits.shared_bytes,
        # A block cannot opt in to the bytes that the system reserves.
        shared_per_block_optin=limits.shared_bytes - limits.shared_reserved,
        registers_per_sm=limits.registers,
        l2_bytes=l2_mib * MIB,
        threads_per_sm=32 * limits.warps,
        blocks_per_sm=limits.blocks,
    )


DEVICES = {
    "v100": _known("Tesla V100", "sm_70", 80, 1530, 900.0, 6),
    "t4": _known("Tesla T4", "sm_75", 40, 1590, 320.0, 4),
    "a100": _known("A100", "sm_80", 108, 1410, 1555.0, 40),
    "a30": _known("A30", "sm_80", 56, 1440, 933.0, 24),
    "rtx3090": _known("RTX 3090", "sm_86", 82, 1695, 936.0, 6),
    "a10": _known("A10", "sm_86", 72, 1695, 600.0, 6),
    "orin": _known("Jetson AGX Orin", "sm_87", 16, 1300, 204.8, 4),
    "rtx4090": _known("RTX 4090", "sm_89", 128, 2520, 1008.0, 72),
    "l40s": _known("L40S", "sm_89", 142, 2520, 864.0, 96),
    "l4": _known("L4", "sm_89", 58, 2040, 300.0, 48),
    "h100": _known("H100", "sm_90", 132, 1980, 3350.0, 50),
    # No data sheet has their clocks. 1.1 PFLOPS in TF32 imply 1850 MHz with 148 multiprocessors, 75 TFLOPS in float32
    # 1980: the lower is taken. The number of enabled multiprocessors of a B300, of 160, is not published either.
    "b200": _known("B200", "sm_100", 148, 1850, 8000.0, 126),
    "b300": _known("B300", "sm_103", 148, 1850, 8000.0, 126),
    "rtx5090": _known("RTX 5090", "sm_120", 170, 2407, 1792.0, 96),
    "gb10": _known("GB10", "sm_121", 48, 2418, 273.0, 24),
}
"""Known GPUs by short name, for planning without one. Multiprocessors, boost clocks, bandwidths and L2 from NVIDIA's
data sheets and architecture papers: Turing (T4), Ampere GA100 (A100 with 40 GB, A30) and GA102 (RTX 3090, A10), Jetson
AGX Orin 64 GB, Ada (RTX 4090, L40S, L4), Hopper (H100 SXM), Blackwell, DGX Spark (GB10).

Where a sheet has no clock, it follows from the throughput in float32, which is 2 x 128 x multiprocessors x clock (64
for 128 up to sm_80): 91.6 TFLOPS for the L40S, 30.3 for the L4, 5.3 for the Orin, 67 for the H100. The H100's is that
of float32: with tensor cores at work its paper allows 1830 MHz. ``pytest tests/util/test_tf32.py`` compares them.
"""
