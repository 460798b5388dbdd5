"""TF32: the 19-bit format in which PyTorch convolves float32 tensors on newer GPUs by default.

polyconv computes in float32 and is compared with PyTorch under the user's own flags; reports of times name PyTorch's
format. A warning is given for layers in which PyTorch's TF32 is expected to be faster and does not run.
Functions import torch themselves: plans need only :mod:`~polyconv.util.gpu_arch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .gpu_arch import per_clock

if TYPE_CHECKING:
    import torch


def advice(name: str, layers: str) -> str:
    """Text of the warning for a class of layers of which some are expected to be faster in TF32 on a GPU."""
    return (
        f"on {name} PyTorch convolves float32 tensors in TF32 (torch.backends.cudnn.allow_tf32 is on), which keeps 10 "
        f"bits of a fraction and is likely to be faster than polyconv's float32 in {layers} layers of this program: "
        'policy="auto" leaves such layers to PyTorch, polyconv.explain(model, x) names them, and polyconv.optimize('
        "model, x) measures; for float32 throughout, set torch.backends.cudnn.allow_tf32 = False"
    )


# ---- PyTorch's flags


def is_allowed() -> bool:
    """Whether PyTorch may convolve in TF32 under the current flags: those of convolutions, if they have their own.

    In that case ``torch.backends.cudnn.allow_tf32`` would raise an error if other operators had other flags.
    """
    from torch.backends import cudnn

    conv: Any = getattr(cudnn, "conv", None)  # from PyTorch 2.9 on
    return bool(cudnn.allow_tf32) if conv is None else conv.fp32_precision == "tf32"


@contextmanager
def switched_off() -> Iterator[None]:
    """Make PyTorch convolve and multiply matrices in float32 inside a ``with`` block, whatever its flags."""
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
    """Format in which PyTorch convolves float32 tensors on a device under its current flags: ``float32``, ``TF32``."""
    if device.type != "cuda" or not is_allowed():
        return "float32"
    from torch.cuda import get_device_properties

    gpu = get_device_properties(device)
    return "TF32" if per_clock(f"sm_{gpu.major}{gpu.minor}", gpu.name) else "float32"


def in_words(torch_computes_in: str) -> str:
    """Note for times of PyTorch that were not measured in float32."""
    return (
        f"PyTorch computed in {torch_computes_in}, as its flags say, and polyconv in float32: "
        "torch.backends.cudnn.allow_tf32 = False compares in float32"
    )
