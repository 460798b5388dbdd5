"""Half precision on a GPU without half-precision kernels: tensors are widened to float32 around float32 kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...arguments import CHANNELS_LAST, Geometry, suggests_channels_last
from ...lowering.extreme_geometry import reduce_geometry
from ...problem import HALF_DTYPES, Pass, Problem
from ..extreme_geometry_run import runs_as
from ..operands import HALF, Shape, geometry_of
from ..schema import split_bias, split_epilogue

HOW_TO_ALLOW = "polyconv.allow_low_precision() or POLYCONV_ALLOW_LOW_PRECISION=1"


def is_widened(problem: Problem) -> bool:
    """Whether a GPU computes with float32 copies of the problem's tensors.

    Depthwise kernels exist in float32 only; parts of an extreme geometry or slices of a volume are summed before the
    result is rounded.
    """
    alone = problem.depthwise or problem.rank == 3
    return problem.dtype in HALF_DTYPES and (alone or runs_as(problem) is not problem)


def widening(kind: Pass, run: Callable[..., Any]) -> Callable[..., Any]:
    """CUDA kernel of a pass: where :func:`is_widened` holds, widens the tensors and rounds the result once.

    Tensors of different dtypes are passed on: ``run`` rejects them.
    """

    def kernel(*args: Any) -> Any:
        dtype = args[0].dtype
        if dtype not in HALF or any(arg.dtype != dtype for arg in args if isinstance(arg, Tensor)):
            return run(*args)
        if not _is_widened(kind, *_described(kind, *args)):
            return run(*args)
        result = run(*(_widened(arg) if isinstance(arg, Tensor) else arg for arg in args))
        return result.to(dtype) if isinstance(result, Tensor) else tuple(each.to(dtype) for each in result)

    return kernel


def _described(kind: Pass, one: Tensor, other: Any, *rest: Any) -> tuple[Shape, Shape, Geometry]:
    """Input size, weight size and geometry, from an operator's arguments."""
    if kind is Pass.FPROP:
        return tuple(one.shape), tuple(other.shape), geometry_of(*split_epilogue(*rest[1:])[0])
    if kind is Pass.DGRAD:
        return tuple(rest[0]), tuple(other.shape), geometry_of(*split_bias(*rest[2:])[0])
    return tuple(other.shape), tuple(rest[0]), geometry_of(*rest[3:])


@lru_cache(maxsize=1024)
def _is_widened(kind: Pass, x_size: Sequence[int], w_size: Sequence[int], geometry: Geometry) -> bool:
    if len(x_size) != len(w_size):
        return False  # rejected by the operator
    alone = (w_size[1] == 1 and x_size[1] > 1) or len(x_size) == 5
    return alone or reduce_geometry(kind, x_size[2:], w_size[2:], geometry) is not None


def _widened(tensor: Tensor) -> Tensor:
    """Dense float32 copy in the memory format that torch infers from the tensor's strides."""
    if tensor.dim() == 1:
        return tensor.to(torch.float32)
    last = suggests_channels_last(tensor.shape, tensor.stride())
    return tensor.to(torch.float32, memory_format=CHANNELS_LAST[tensor.dim()] if last else torch.contiguous_format)
