"""Fake-tensor kernels: checks and allocation only. Sizes may be symbolic, so nothing is cached."""

from __future__ import annotations

from torch import Tensor

from ...arguments import activation_name
from ..operands import (
    Shape,
    check_gradient,
    check_input_bias,
    check_residual,
    check_tensors,
    empty,
    fprop_layout,
    geometry_of,
)
from ..schema import Args, split_bias, split_epilogue


def fake_fprop(x: Tensor, w: Tensor, bias: Tensor | None, *args: Args) -> Tensor:
    geometry, residual, activation = split_epilogue(*args)
    check_tensors(x, "input", w, "weight", bias, residual)
    activation_name(activation)
    bias_shape = None if bias is None else bias.shape
    layout = fprop_layout(x.shape, x.stride(), w.shape, w.stride(), bias_shape, geometry_of(*geometry))
    if residual is not None:
        check_residual(residual, layout[0])
    return empty(layout, x)


def fake_dgrad(grad: Tensor, w: Tensor, x_size: Shape, channels_last: bool, *args: Args) -> Tensor:
    geometry, bias = split_bias(*args)
    check_tensors(grad, "gradient", w, "weight", bias)
    check_gradient(grad.shape, x_size, w.shape, geometry_of(*geometry), may_be_empty=True)
    check_input_bias(None if bias is None else bias.shape, x_size)
    return empty((x_size, channels_last), grad)


def fake_wgrad(
    grad: Tensor, x: Tensor, w_size: Shape, channels_last: bool, bias: bool, *args: Args
) -> tuple[Tensor, Tensor]:
    check_tensors(grad, "gradient", x, "input")
    check_gradient(grad.shape, x.shape, w_size, geometry_of(*args))
    return empty((w_size, channels_last), grad), grad.new_empty(w_size[0] if bias else 0)
