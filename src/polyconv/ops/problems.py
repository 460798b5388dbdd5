"""From tensors to problems."""

from __future__ import annotations

import torch

from ..arguments import Geometry
from ..problem import DEFAULT_TOLERANCE, PaddingMode, Pass, Problem, Strides, channels_last_strides, contiguous_strides
from .layouts import Shape


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
