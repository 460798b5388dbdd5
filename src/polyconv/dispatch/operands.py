"""Checks, output layouts and problems of the operators, for real and fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import settings
from ..activation import Activation
from ..arguments import (
    CHANNELS_LAST,
    EITHER,
    Extent,
    Geometry,
    activation_name,
    check_shapes,
    check_transposed,
    normalise_transposed,
    statically,
    suggests_channels_last,
)
from ..problem import (
    DEFAULT_TOLERANCE,
    TF32,
    TORCH_FLOAT32,
    TORCH_TOLERANCE,
    PaddingMode,
    Pass,
    Problem,
    Tolerance,
    dense_strides,
)
from ..util import tf32
from .schema import Args

HALF = (torch.float16, torch.bfloat16)
Shape = Sequence[int]
Layout = tuple[Shape, bool]
"""Output shape, and whether it is channels_last."""


def check_tensors(
    x: Tensor, x_name: str, w: Tensor, w_name: str, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """Raise unless all tensors share a device and a supported dtype."""
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
    """Raise unless a residual has the ``expected`` output shape. Any strides are accepted."""
    if _differ(residual.shape, expected):
        raise RuntimeError(
            f"expected a residual of the output's size {list(expected)}, but got one of size {list(residual.shape)}. "
            "It is added element by element; expand() repeats a smaller one"
        )


def _differ(shape: Shape, expected: Shape) -> bool:
    """Whether two shapes are known to differ; False if that depends on a size that is unknown while tracing."""
    return len(shape) != len(expected) or any(statically(a != b) for a, b in zip(shape, expected, strict=True))


def fprop_layout(
    x_shape: Shape, x_strides: Shape, w_shape: Shape, w_strides: Shape, bias_shape: Shape | None, geometry: Geometry
) -> Layout:
    """Output layout of a forward pass: channels_last if the input or the weight is, as in torch."""
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
    tolerance: Tolerance | None,
) -> tuple[Geometry, Layout]:
    """Geometry of the convolution whose input gradient this is, and the output layout (channels_last as in torch)."""
    x_shape, w_shape = x.shape, w.shape
    numbers = stride, padding, output_padding, groups, dilation, tolerance
    geometry, extents = normalise_transposed(x_shape[2:], w_shape[2:], *numbers, rank=rank)
    check_transposed(x_shape, w_shape, None if bias is None else bias.shape, geometry.groups)
    channels_last = suggests_channels_last(x_shape, x.stride()) or suggests_channels_last(w_shape, w.stride())
    return geometry, ((x_shape[0], w_shape[1] * geometry.groups, *extents), channels_last)


def check_gradient(
    grad_shape: Shape, x_shape: Shape, w_shape: Shape, geometry: Geometry, *, may_be_empty: bool = False
) -> None:
    """Check the output gradient's shape. ``may_be_empty``: allow an input without pixels (transposed convolution)."""
    check_shapes(x_shape, w_shape, None, geometry, may_be_empty=may_be_empty)
    expected = (x_shape[0], w_shape[0], *geometry.out_size(x_shape[2:], w_shape[2:]))
    if _differ(grad_shape, expected):
        raise RuntimeError(f"expected a gradient of the output's size {list(expected)}; got {list(grad_shape)}")


def check_input_bias(bias_shape: Shape | None, x_shape: Shape) -> None:
    """Raise unless the bias, if any, has one element per input channel."""
    if bias_shape is not None and _differ(bias_shape, x_shape[1:2]):
        raise RuntimeError(
            f"expected bias to be 1-dimensional with {x_shape[1]} elements, but got bias of size {list(bias_shape)}"
        )


def empty(layout: Layout, like: Tensor) -> Tensor:
    """Allocate a dense tensor. torch's allocators align to 16 bytes, so outputs are always vector-aligned."""
    if not layout[1]:
        return like.new_empty(layout[0])
    return torch.empty(layout[0], dtype=like.dtype, device=like.device, memory_format=CHANNELS_LAST[len(layout[0])])


def geometry_of(
    stride: Args, padding: Args, dilation: Args, groups: int, padding_mode: str, tolerance: float | None = None
) -> Geometry:
    """Build a geometry from the dispatcher's lists. A tolerance of None becomes that of the current settings, and
    :data:`~polyconv.arguments.EITHER` the format of PyTorch's current flags."""
    if tolerance is None:
        tolerance = settings.current().tolerance
    if tolerance == TORCH_TOLERANCE and not tf32.is_allowed():
        tolerance = TORCH_FLOAT32
    if padding_mode.endswith(EITHER):
        padding_mode = padding_mode.removesuffix("torch") + (TF32 if tf32.is_allowed() else "float32")
    return Geometry(tuple(stride), tuple(padding), tuple(dilation), groups, padding_mode, tolerance)


Described = tuple[Shape, Shape]
"""Shape and strides of a tensor."""


def described(tensor: Tensor) -> Described:
    return tensor.shape, tensor.stride()


def problem_of(
    kind: Pass,
    x: Described,
    w: Described,
    y_strides: Shape,
    geometry: Geometry,
    dtype: torch.dtype,
    aligned: bool = True,
    bias: bool = False,
    residual: bool = False,
    activation: str = "none",
    frozen: bool = False,
) -> Problem:
    """Build a problem. Only the strides of ``y`` are needed: its shape follows from input, weight and geometry."""
    (n, c, *in_size), (k, _, *kernel) = x[0], w[0]
    return Problem(
        kind=kind,
        batch=n,
        in_channels=c,
        out_channels=k,
        in_size=tuple(in_size),
        kernel=tuple(kernel),
        stride=geometry.stride,
        padding=geometry.padding,
        dilation=geometry.dilation,
        groups=geometry.groups,
        padding_mode=PaddingMode(geometry.border),
        bias=bias,
        residual=residual,
        activation=Activation(activation_name(activation)),
        x_strides=tuple(x[1]),
        w_strides=tuple(w[1]),
        y_strides=tuple(y_strides),
        vector_aligned=aligned,
        dtype=str(dtype).removeprefix("torch."),
        tolerance=DEFAULT_TOLERANCE if geometry.tolerance is None else geometry.tolerance,
        frozen=frozen,
        torch_format=_format(geometry.torch_format, dtype),
    )


def _format(torch_format: str, dtype: torch.dtype) -> str:
    """Format in which PyTorch computes with tensors of a dtype, given that for float32; empty if it is not asked."""
    return str(dtype).removeprefix("torch.") if torch_format and dtype in HALF else torch_format


def fprop_problem(
    x: Described,
    w: Described,
    bias_shape: Shape | None,
    residual: bool,
    activation: str,
    frozen: bool,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> tuple[Problem, Layout]:
    """Problem of a forward pass, and the layout of its output."""
    layout = fprop_layout(*x, *w, bias_shape, geometry)
    bias, y = bias_shape is not None, dense_strides(*layout)
    return problem_of(Pass.FPROP, x, w, y, geometry, dtype, aligned, bias, residual, activation, frozen), layout


def dgrad_problem(
    grad: Described,
    w: Described,
    layout: Layout,
    bias_shape: Shape | None,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> tuple[Problem, Layout]:
    """Problem of an input gradient of this ``layout``. The bias is not part of the problem: it is added afterwards."""
    check_gradient(grad[0], layout[0], w[0], geometry, may_be_empty=True)
    check_input_bias(bias_shape, layout[0])
    x = (layout[0], dense_strides(*layout))
    return problem_of(Pass.DGRAD, x, w, grad[1], geometry, dtype, aligned), layout


def wgrad_problem(
    grad: Described, x: Described, layout: Layout, bias: bool, dtype: torch.dtype, aligned: bool, geometry: Geometry
) -> tuple[Problem, Layout]:
    """Problem of a weight gradient of this ``layout``, with a bias gradient if ``bias``."""
    check_gradient(grad[0], x[0], layout[0], geometry)
    w = (layout[0], dense_strides(*layout))
    return problem_of(Pass.WGRAD, x, w, grad[1], geometry, dtype, aligned, bias), layout
