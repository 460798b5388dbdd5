"""``conv1d`` to ``conv3d`` and their transposes: the functions of ``torch.nn.functional`` with additional options."""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_compiling

from .arguments import Extent, Padding
from .dispatch import fastpath, operator_path
from .dispatch.op import CONV1D, CONV2D, CONV3D, CONV_TRANSPOSE1D, CONV_TRANSPOSE2D, CONV_TRANSPOSE3D, PUBLIC
from .dispatch.transforms.interop import refuse_scripting
from .problem import Tolerance


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Padding = 0,
    dilation: Extent = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    tolerance: Tolerance | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A 1-D convolution: :func:`torch.nn.functional.conv1d` with the options of :func:`conv2d`.

    The input is (batch, in_channels, length); ``padding`` may also be (left, right).
    """
    args = stride, padding, dilation, groups, padding_mode
    call = operator_path.call if is_compiling() else fastpath.call
    return call(CONV1D, input, weight, bias, args, tolerance, activation, residual)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Padding = 0,
    dilation: Extent = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    tolerance: Tolerance | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A 2-D convolution: :func:`torch.nn.functional.conv2d` with additional options.

    Args:
        input: (batch, in_channels, height, width), or without the batch. Any strides in memory; never copied.
        weight: (out_channels, in_channels / groups, kernel height, kernel width).
        bias: out_channels numbers to add, or ``None``.
        stride, dilation: one integer, or (height, width).
        padding: one integer, (height, width), ``"same"``, ``"valid"``, or, beyond torch, the four sides
            (top, bottom, left, right). A negative side, in the four-sided form only, crops the image.
        groups: number of independent convolutions that the channels are split into.
        padding_mode: values outside the image: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``, as in
            ``torch.nn.Conv2d``. Negative sides crop the image before it is padded.
        tolerance: error budget of this call and of its backward pass, instead of :func:`polyconv.set_tolerance`'s.
        activation: applied to the sums before they are stored: ``"relu"``, ``"relu6"``, ``"silu"``, ``"gelu"``,
            ``"gelu_tanh"``, ``"leaky_relu"``, ``"hardtanh"``, ``"hardswish"``, ``"hardsigmoid"`` or ``"sigmoid"``.
            Parameters other than torch's defaults follow in brackets: ``"leaky_relu(0.2)"``, ``"hardtanh(0, 1)"``.
        residual: a tensor of the output's size, dtype and device, added before the activation:
            ``activation(conv(input, weight) + bias + residual)``. Any strides; if they differ from the output's
            (channels_last if input or weight is), the residual is copied into that layout first.

    Raises:
        RuntimeError, TypeError: where torch raises them.
    """
    args = stride, padding, dilation, groups, padding_mode
    call = operator_path.call if is_compiling() else fastpath.call
    return call(CONV2D, input, weight, bias, args, tolerance, activation, residual)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Padding = 0,
    dilation: Extent = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    tolerance: Tolerance | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A 3-D convolution: :func:`torch.nn.functional.conv3d` with the options of :func:`conv2d`.

    The input is (batch, in_channels, depth, height, width); ``padding`` may also be (front, back, top, bottom, left,
    right).
    """
    args = stride, padding, dilation, groups, padding_mode
    call = operator_path.call if is_compiling() else fastpath.call
    return call(CONV3D, input, weight, bias, args, tolerance, activation, residual)


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Extent = 0,
    output_padding: Extent = 0,
    groups: int = 1,
    dilation: Extent = 1,
    *,
    tolerance: Tolerance | None = None,
) -> Tensor:
    """A transposed 1-D convolution: as :func:`conv_transpose2d`, with an input of (batch, in_channels, length)."""
    args = stride, padding, output_padding, groups, dilation
    call = operator_path.call if is_compiling() else fastpath.call
    return call(CONV_TRANSPOSE1D, input, weight, bias, args, tolerance)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Extent = 0,
    output_padding: Extent = 0,
    groups: int = 1,
    dilation: Extent = 1,
    *,
    tolerance: Tolerance | None = None,
) -> Tensor:
    """A transposed 2-D convolution: :func:`torch.nn.functional.conv_transpose2d` with an error budget.

    It is computed as the input gradient of a convolution, by the kernels of that pass.

    Args:
        input: (batch, in_channels, height, width), or without the batch. Any strides in memory; never copied.
        weight: (in_channels, out_channels / groups, kernel height, kernel width).
        bias: out_channels numbers to add, or ``None``.
        stride, dilation: one integer, or (height, width): of the convolution whose input gradient this is.
        padding: one integer, or (height, width): outputs left out at each end.
        output_padding: one integer, or (height, width): outputs added at the end.
        groups: number of independent convolutions that the channels are split into.
        tolerance: error budget of this call and of its backward pass, instead of :func:`polyconv.set_tolerance`'s.

    Raises:
        RuntimeError, TypeError: where torch raises them.
    """
    args = stride, padding, output_padding, groups, dilation
    call = operator_path.call if is_compiling() else fastpath.call
    return call(CONV_TRANSPOSE2D, input, weight, bias, args, tolerance)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Extent = 0,
    output_padding: Extent = 0,
    groups: int = 1,
    dilation: Extent = 1,
    *,
    tolerance: Tolerance | None = None,
) -> Tensor:
    """A transposed 3-D convolution: as :func:`conv_transpose2d`, with (batch, in_channels, depth, height, width)."""
    args = stride, padding, output_padding, groups, dilation
    call = operator_path.call if is_compiling() else fastpath.call
    return call(CONV_TRANSPOSE3D, input, weight, bias, args, tolerance)


PUBLIC |= {
    CONV1D: conv1d,
    CONV2D: conv2d,
    CONV3D: conv3d,
    CONV_TRANSPOSE1D: conv_transpose1d,
    CONV_TRANSPOSE2D: conv_transpose2d,
    CONV_TRANSPOSE3D: conv_transpose3d,
}
for _function in PUBLIC.values():
    _function.__prepare_scriptable__ = refuse_scripting  # type: ignore[attr-defined]
