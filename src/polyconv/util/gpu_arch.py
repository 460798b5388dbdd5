"""Rates of GPU architectures: multiply-adds per clock and multiprocessor, in float32, TF32 and 16 bits."""

from __future__ import annotations

import re

RATES = {
    "sm_80": 512,
    "sm_86": 256,
    "sm_87": 512,
    "sm_89": 256,
    "sm_90": 1024,
    "sm_100": 2048,
    "sm_103": 2048,
    "sm_120": 256,
    "sm_121": 256,
}
"""Dense TF32 multiply-adds per clock and multiprocessor, from throughputs and clocks in NVIDIA's data sheets: TFLOPS
without sparsity of the A100 (156), A30 (82), A10 (62.5), RTX 3090 (35.6), RTX 4090 (82.6), L40S (183), L4 (60), H100
SXM (495, at 1830 MHz), B200 and B300 (1100 and 1125). The Orin's sheet has 170 TOPS of sparse INT8, of which TF32 is an
eighth; sm_120 is the RTX 5090's 105 TFLOPS, and sm_121 is assumed equal. GPUs before sm_80 have no TF32; GeForce cards
have half, because they accumulate in float32 at half the rate. An H20 has a quarter of an H100's: 74 TFLOPS with 78
multiprocessors."""
_SLOWER = ((re.compile(r"GeForce|^RTX \d{4}$"), 2), (re.compile(r"\bH20\b"), 4))
"""Names of GPUs whose tensor cores are slower than those of their architecture, and how many times."""


def capability(arch: str) -> int:
    """Compute capability of an architecture name: 70 of ``sm_70``, 90 of ``sm_90a``."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def per_clock(arch: str, name: str) -> int:
    """TF32 multiply-adds per clock and multiprocessor; 0 if the GPU has no TF32."""
    return RATES.get(arch, 0) // next((times for names, times in _SLOWER if names.search(name)), 1)


def fp32_per_clock(arch: str) -> int:
    """float32 multiply-adds per clock and multiprocessor: 64 up to sm_80, 128 after it."""
    return 64 if arch in {"sm_70", "sm_72", "sm_75", "sm_80"} else 128


def half_per_clock(arch: str, name: str, dtype: str) -> int:
    """16-bit multiply-adds per clock and multiprocessor, summed in float32; twice those of TF32.

    Tensor cores before sm_80 take float16 only (125 TFLOPS of the V100 make 512, as does the T4), and bfloat16 is
    multiplied as float32. Halves of split float32 numbers are float16.
    """
    if arch in {"sm_70", "sm_72", "sm_75"}:
        return fp32_per_clock(arch) if dtype == "bfloat16" else 512
    return 2 * per_clock(arch, name) or 4 * fp32_per_clock(arch)
