"""From tensors to problems: what a call needs to know, apart from addresses."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

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
from .layouts import Layout, Shape, check_gradient, fprop_layout


def problem_of(
    kind: Pass,
    x: tuple[Shape, Shape],
    w: tuple[Shape, Shape],
    y_strides: Shape,
    geometry: Geometry,
    *,
    bias: bool,
    dtype: torch.dtype,
    vector_aligned: bool = True,
) -> Problem:
    """The problem for tensors of known (shape, strides); ``y`` needs only strides, its shape follows."""
    (n, c, height, width), (k, _, r, s) = x[0], w[0]
    return Problem(
        kind=kind,
        batch=n,
        in_channels=c,
        out_channels=k,
        in_size=(height, width),
        kernel=(r, s),
        stride=geometry.stride,
        padding=geometry.padding,
        dilation=geometry.dilation,
        groups=geometry.groups,
        padding_mode=PaddingMode(geometry.padding_mode),
        bias=bias,
        x_strides=_four(x[1]),
        w_strides=_four(w[1]),
        y_strides=_four(y_strides),
        vector_aligned=vector_aligned,
        dtype=str(dtype).removeprefix("torch."),
        tolerance=DEFAULT_TOLERANCE if geometry.tolerance is None else geometry.tolerance,
    )


def _four(strides: Shape) -> Strides:
    a, b, c, d = strides
    return (a, b, c, d)


def dense_strides(shape: Shape, channels_last: bool) -> Strides:
    """Strides of an output that an operator allocates."""
    n, c, h, w = shape
    return (channels_last_strides if channels_last else contiguous_strides)((n, c, h, w))


# What a call needs to know, apart from addresses, follows from numbers that rarely change between calls. So each of
# these is worked out once: a repeated call costs one lookup, and hands the backend the very same Problem.


@lru_cache(maxsize=4096)
def prepare_fprop(
    x: tuple[Shape, Shape],
    w: tuple[Shape, Shape],
    bias_shape: Shape | None,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> tuple[Problem, Layout]:
    layout = fprop_layout(*x, *w, bias_shape, geometry)
    bias = bias_shape is not None
    y_strides = dense_strides(*layout)
    return problem_of(Pass.FPROP, x, w, y_strides, geometry, bias=bias, dtype=dtype, vector_aligned=aligned), layout


@lru_cache(maxsize=4096)
def prepare_fused(
    x: tuple[Shape, Shape],
    w: tuple[Shape, Shape],
    bias_shape: Shape | None,
    residual: bool,
    activation: str,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> tuple[Problem, Layout]:
    problem, layout = prepare_fprop(x, w, bias_shape, dtype, aligned, geometry)
    return replace(problem, residual=residual, activation=Activation(activation_name(activation))), layout


@lru_cache(maxsize=4096)
def prepare_dgrad(
    grad: tuple[Shape, Shape],
    w: tuple[Shape, Shape],
    layout: Layout,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> Problem:
    check_gradient(grad[0], layout[0], w[0], geometry)
    x = (layout[0], dense_strides(*layout))
    return problem_of(Pass.DGRAD, x, w, grad[1], geometry, bias=False, dtype=dtype, vector_aligned=aligned)


@lru_cache(maxsize=4096)
def prepare_wgrad(
    grad: tuple[Shape, Shape],
    x: tuple[Shape, Shape],
    layout: Layout,
    bias: bool,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> Problem:
    check_gradient(grad[0], x[0], layout[0], geometry)
    w = (layout[0], dense_strides(*layout))
    return problem_of(Pass.WGRAD, x, w, grad[1], geometry, bias=bias, dtype=dtype, vector_aligned=aligned)
