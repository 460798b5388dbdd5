"""What is the same for real and fake tensors: checks, and the layout of the outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import settings
from ..arguments import (
    CHANNELS_LAST,
    Extent,
    Geometry,
    check_shapes,
    check_transposed,
    normalise_transposed,
    statically,
    suggests_channels_last,
)
from .schema import Args

HALF = (torch.float16, torch.bfloat16)
Shape = Sequence[int]
Layout = tuple[Shape, bool]
"""Shape of an output, and whether it is channels_last."""


def check_tensors(
    x: Tensor, x_name: str, w: Tensor, w_name: str, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """Raise unless all tensors share a dtype that can be computed with, and a device."""
    dtype, device = x.dtype, x.device
    for name, tensor in ((w_name, w), ("bias", bias), ("residual", residual)):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            if x.is_quantized:
                raise RuntimeError(
                    f"polyconv does not compute with quantised tensors; got {dtype}. Call dequantize() on it"
                )
            raise RuntimeError(
                f"{x_name} and {name} should be the same type: got {dtype} and {tensor.dtype}. "
                f"Convert one of them, for example {name}.to({dtype})"
            )
        if tensor.device != device:
            raise RuntimeError(f"{x_name} and {name} should be on the same device: got {device} and {tensor.device}")
    if dtype.is_complex:
        raise RuntimeError(f"polyconv computes with real numbers only; got {dtype}. Use torch's own convolution")
    if device.type == "cuda" and dtype != torch.float32 and dtype not in HALF:
        raise RuntimeError(
            f"polyconv's CUDA kernels take float32, float16 and bfloat16 only; got {dtype}. Convert the model and its "
            "input with .float()"
        )


def check_residual(residual: Tensor, expected: Shape) -> None:
    """Raise unless a residual can be added to an output of the ``expected`` shape. Its strides do not matter."""
    if _differ(residual.shape, expected):
        raise RuntimeError(
            f"expected a residual of the output's size {list(expected)}, but got one of size {list(residual.shape)}. "
            "It is added element by element; expand() repeats a smaller one"
        )


def _differ(shape: Shape, expected: Shape) -> bool:
    """Whether two shapes are known to be different."""
    return len(shape) != len(expected) or any(statically(a != b) for a, b in zip(shape, expected, strict=True))


def fprop_layout(
    x_shape: Shape, x_strides: Shape, w_shape: Shape, w_strides: Shape, bias_shape: Shape | None, geometry: Geometry
) -> Layout:
    """The output is channels_last where torch's would be: if the input or the weight is."""
    check_shapes(x_shape, w_shape, bias_shape, geometry)
    channels_last = suggests_channels_last(x_shape, x_strides) or suggests_channels_last(w_shape, w_strides)
    return (x_shape[0], w_shape[0], *geometry.out_size(x_shape[2:], w_shape[2:])), channels_last


def transposed_layout(
    rank: int,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Extent,
    padding: Extent,
    output_padding: Extent,
    groups: int,
    dilation: Extent,
    tolerance: float | None,
) -> tuple[Geometry, Layout]:
    """The convolution whose input gradient a transposed one is, and the layout of the output, from its arguments.

    The output is channels_last where torch's would be: if the input or the weight is.
    """
    x_shape, w_shape = x.shape, w.shape
    numbers = stride, padding, output_padding, groups, dilation, tolerance
    geometry, extents = normalise_transposed(x_shape[2:], w_shape[2:], *numbers, rank=rank)
    check_transposed(x_shape, w_shape, None if bias is None else bias.shape, geometry.groups)
    channels_last = suggests_channels_last(x_shape, x.stride()) or suggests_channels_last(w_shape, w.stride())
    return geometry, ((x_shape[0], w_shape[1] * geometry.groups, *extents), channels_last)


def check_gradient(
    grad_shape: Shape, x_shape: Shape, w_shape: Shape, geometry: Geometry, *, may_be_empty: bool = False
) -> None:
    """``may_be_empty``: an input gradient may have no pixels, as the output of a transposed convolution."""
    check_shapes(x_shape, w_shape, None, geometry, may_be_empty=may_be_empty)
    expected = (x_shape[0], w_shape[0], *geometry.out_size(x_shape[2:], w_shape[2:]))
    if _differ(grad_shape, expected):
        raise RuntimeError(f"expected a gradient of the output's size {list(expected)}; got {list(grad_shape)}")


def check_input_bias(bias_shape: Shape | None, x_shape: Shape) -> None:
    """Raise unless a bias, if there is one, has a number for each channel of the input."""
    if bias_shape is not None and _differ(bias_shape, x_shape[1:2]):
        raise RuntimeError(
            f"expected bias to be 1-dimensional with {x_shape[1]} elements, but got bias of size {list(bias_shape)}"
        )


def empty(layout: Layout, like: Tensor) -> Tensor:
    """A new dense tensor. torch's allocators place it on a 16-byte boundary, so outputs are always aligned."""
    if not layout[1]:
        return like.new_empty(layout[0])
    return torch.empty(layout[0], dtype=like.dtype, device=like.device, memory_format=CHANNELS_LAST[len(layout[0])])


def geometry_of(
    stride: Args, padding: Args, dilation: Args, groups: int, padding_mode: str, tolerance: float | None = None
) -> Geometry:
    """The dispatcher hands lists over; a geometry is made of tuples. A tolerance that was left open is settled here."""
    if tolerance is None:
        tolerance = settings.current().tolerance
    return Geometry(tuple(stride), tuple(padding), tuple(dilation), groups, padding_mode, tolerance)
