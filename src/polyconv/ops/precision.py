"""Half precision on a GPU, where it is allowed: the kernels have float32 only, so tensors are widened around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import settings
from ..arguments import CHANNELS_LAST, suggests_channels_last

HALF = (torch.float16, torch.bfloat16)

HOW_TO_ALLOW = "polyconv.allow_low_precision() or POLYCONV_ALLOW_LOW_PRECISION=1"


def is_widened(dtype: torch.dtype) -> bool:
    """Whether a GPU computes with float32 copies of tensors of this dtype."""
    return dtype in HALF and settings.current().allow_low_precision


def widening(run: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's CUDA kernel from one that takes float32 only: widens what it is given, rounds the result once.

    Tensors whose dtypes differ are passed on, to be refused like any others.
    """

    def kernel(*args: Any) -> Any:
        dtype = args[0].dtype
        if not is_widened(dtype) or any(arg.dtype != dtype for arg in args if isinstance(arg, Tensor)):
            return run(*args)
        result = run(*(_widened(arg) if isinstance(arg, Tensor) else arg for arg in args))
        return result.to(dtype) if isinstance(result, Tensor) else tuple(each.to(dtype) for each in result)

    return kernel


def _widened(tensor: Tensor) -> Tensor:
    """A dense float32 copy that torch takes for channels_last if, and only if, it takes the tensor for it."""
    if tensor.dim() == 1:
        return tensor.to(torch.float32)
    last = suggests_channels_last(tensor.shape, tensor.stride())
    return tensor.to(torch.float32, memory_format=CHANNELS_LAST[tensor.dim()] if last else torch.contiguous_format)
