"""TF32: the format of 19 bits in which PyTorch convolves float32 tensors on newer GPUs unless it is told not to.

polyconv computes in float32. So it is compared with what a user has: PyTorch under the user's own flags; and who has a
GPU whose tensor cores are far faster in TF32 than its other units are in float32 is told so. Whoever times PyTorch says
what it computed in. PyTorch is asked where it is there already: plans need the numbers alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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
"""Dense multiply-adds per clock and multiprocessor, from the throughputs and clocks in NVIDIA's data sheets: TFLOPS
without sparsity of the A100 (156), A30 (82), A10 (62.5), RTX 3090 (35.6), RTX 4090 (82.6), L40S (183), L4 (60), H100
SXM (495, at 1830 MHz), B200 and B300 (1100 and 1125). The Orin's sheet has 170 TOPS of sparse INT8, of which TF32 is an
eighth; sm_120 is that of the RTX 5090, 105 TFLOPS, and sm_121 is taken to be the same. GPUs before sm_80 have none;
GeForce cards have half, because they accumulate in float32 at half the rate."""
_GEFORCE = re.compile(r"GeForce|^RTX \d{4}$")
SAVED = 4.0
"""Times fewer multiplications that a fast algorithm makes at best where it is used most: F(4, 3) along both axes."""


def capability(arch: str) -> int:
    """Of an architecture as the compiler is told: 70 of ``sm_70``, 90 of ``sm_90a``."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def per_clock(arch: str, name: str) -> int:
    """Multiply-adds in TF32 per clock and multiprocessor of a GPU; 0 if it has none."""
    return RATES.get(arch, 0) // (2 if _GEFORCE.search(name) else 1)


def fp32_per_clock(arch: str) -> int:
    """Multiply-adds in float32 per clock and multiprocessor: 64 up to sm_80, 128 after it."""
    return 64 if arch in {"sm_70", "sm_72", "sm_75", "sm_80"} else 128


def half_per_clock(arch: str, name: str, dtype: str) -> int:
    """Multiply-adds per clock and multiprocessor of two elements of 16 bits, summed in float32.

    Twice those of TF32. Before that there were tensor cores for float16 alone (125 TFLOPS of the V100 make 512; the T4
    has as many), and bfloat16 is multiplied as float32. Halves of split float32 numbers are float16.
    """
    if arch in {"sm_70", "sm_72", "sm_75"}:
        return fp32_per_clock(arch) if dtype == "bfloat16" else 512
    return 2 * per_clock(arch, name) or 4 * fp32_per_clock(arch)


def is_likely_faster(arch: str, name: str) -> bool:
    """Whether TF32 on a GPU gains more over float32 than an algorithm that saves multiplications can."""
    return per_clock(arch, name) > SAVED * fp32_per_clock(arch)


def advice(name: str) -> str:
    """What is said to who has such a GPU."""
    return (
        f"on {name} PyTorch convolves float32 tensors in TF32 (torch.backends.cudnn.allow_tf32 is on), which keeps 10 "
        "bits of a fraction and is likely to be faster than polyconv's float32. polyconv.optimize(model, x) measures "
        "both and swaps what gains; for float32 throughout, set torch.backends.cudnn.allow_tf32 = False"
    )


# ---- what PyTorch does


def is_allowed() -> bool:
    """Whether PyTorch may convolve in TF32, by the flags of now: those of convolutions, where they have their own.

    Then ``torch.backends.cudnn.allow_tf32`` raises an error where other operators have other flags.
    """
    from torch.backends import cudnn

    conv: Any = getattr(cudnn, "conv", None)  # from PyTorch 2.9 on
    return bool(cudnn.allow_tf32) if conv is None else conv.fp32_precision == "tf32"


@contextmanager
def switched_off() -> Iterator[None]:
    """Inside, PyTorch convolves and multiplies matrices in float32, whatever its flags say."""
    from torch.backends import cuda, cudnn

    conv: Any = getattr(cudnn, "conv", None)
    holders: list[Any] = [cudnn if conv is None else conv, cuda.matmul]
    name, off = ("allow_tf32", False) if conv is None else ("fp32_precision", "ieee")
    before = [getattr(holder, name) for holder in holders]
    for holder in holders:
        setattr(holder, name, off)
    try:
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            setattr(holder, name, value)


def torchs_format(device: torch.device) -> str:
    """What PyTorch convolves float32 tensors in on a device, under the flags of now: ``float32`` or ``TF32``."""
    if device.type != "cuda" or not is_allowed():
        return "float32"
    from torch.cuda import get_device_properties

    gpu = get_device_properties(device)
    return "TF32" if per_clock(f"sm_{gpu.major}{gpu.minor}", gpu.name) else "float32"


def in_words(torch_computes_in: str) -> str:
    """What stands beside times of PyTorch's, where it was not float32 that was timed."""
    return (
        f"PyTorch computed in {torch_computes_in}, as its flags say, and polyconv in float32: "
        "torch.backends.cudnn.allow_tf32 = False compares in float32"
    )
