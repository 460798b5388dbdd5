"""From tensors, as (shape, strides), to problems."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import Geometry, activation_name
from ..problem import (
    DEFAULT_TOLERANCE,
    Activation,
    PaddingMode,
    Pass,
    Problem,
    Strides,
    channels_last_strides,
    contiguous_strides,
)
from .layouts import Layout, Shape, check_gradient, check_input_bias, fprop_layout

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
    """The problem for an input and a weight; ``y`` needs only strides, its shape follows."""
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
        padding_mode=PaddingMode(geometry.padding_mode),
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
    )


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
    """A forward pass, and the layout of its output."""
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
    """The gradient of an input, which is laid out so. A bias is no part of the problem: it is added afterwards."""
    check_gradient(grad[0], layout[0], w[0], geometry, may_be_empty=True)
    check_input_bias(bias_shape, layout[0])
    x = (layout[0], dense_strides(*layout))
    return problem_of(Pass.DGRAD, x, w, grad[1], geometry, dtype, aligned), layout


def wgrad_problem(
    grad: Described, x: Described, layout: Layout, bias: bool, dtype: torch.dtype, aligned: bool, geometry: Geometry
) -> tuple[Problem, Layout]:
    """The gradient of a weight, which is laid out so, and of a bias if there is one."""
    check_gradient(grad[0], x[0], layout[0], geometry)
    w = (layout[0], dense_strides(*layout))
    return problem_of(Pass.WGRAD, x, w, grad[1], geometry, dtype, aligned, bias), layout


def dense_strides(shape: Shape, channels_last: bool) -> Strides:
    """Strides of an output that an operator allocates."""
    return (channels_last_strides if channels_last else contiguous_strides)(tuple(shape))
