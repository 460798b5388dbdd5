"""The figures of a GPU that the planner reckons with."""

from __future__ import annotations

from dataclasses import dataclass

OLDEST_ARCH = 70


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """What the cost model needs to know of a GPU. Equal descriptions lead to equal plans."""

    name: str
    arch: str
    """As the compiler is told: ``sm_70``."""
    sms: int
    clock_mhz: int
    dram_gbs: float
    shared_per_sm: int
    shared_per_block_optin: int
    registers_per_sm: int
    l2_bytes: int

    @property
    def fp32_per_clock(self) -> int:
        """FP32 multiply-adds per clock and multiprocessor: 64 up to sm_80, 128 after it."""
        return 64 if self.arch in {"sm_70", "sm_72", "sm_75", "sm_80"} else 128


def why_too_old(arch: str, name: str = "") -> str | None:
    """Why no kernel of polyconv runs on GPUs of an architecture, in words for who has one; None if they do."""
    digits = arch.removeprefix("sm_").rstrip("af")
    if not digits.isdigit() or int(digits) >= OLDEST_ARCH:
        return None
    return (
        f"polyconv's kernels need compute capability 7.0 (Tesla V100) or newer; {name or 'a GPU of ' + arch} has "
        f"{digits[:-1]}.{digits[-1]}. polyconv.restore(model) gives a model its torch.nn.Conv2d modules back"
    )


KIB = 1024
DEVICES = {
    "v100": CudaDevice("Tesla V100", "sm_70", 80, 1530, 900.0, 96 * KIB, 96 * KIB, 65536, 6 * KIB * KIB),
    "a100": CudaDevice("A100", "sm_80", 108, 1410, 1555.0, 164 * KIB, 163 * KIB, 65536, 40 * KIB * KIB),
    "rtx3090": CudaDevice("RTX 3090", "sm_86", 82, 1695, 936.0, 100 * KIB, 99 * KIB, 65536, 6 * KIB * KIB),
    "rtx4090": CudaDevice("RTX 4090", "sm_89", 128, 2520, 1008.0, 100 * KIB, 99 * KIB, 65536, 72 * KIB * KIB),
    "h100": CudaDevice("H100", "sm_90", 132, 1755, 3350.0, 228 * KIB, 227 * KIB, 65536, 50 * KIB * KIB),
    "b200": CudaDevice("B200", "sm_100", 148, 1850, 8000.0, 228 * KIB, 227 * KIB, 65536, 126 * KIB * KIB),
    "rtx5090": CudaDevice("RTX 5090", "sm_120", 170, 2400, 1792.0, 100 * KIB, 99 * KIB, 65536, 96 * KIB * KIB),
}
"""Known GPUs by short name, to plan without one. Figures from the vendor's data sheets; clocks are boost clocks."""
