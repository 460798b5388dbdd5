"""Names, schemas and handles of the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Args = Any
"""Trailing arguments of an operator: the six of :class:`~polyconv.arguments.Geometry`, in its order, then the epilogue
of ``fprop`` or the bias of ``dgrad``."""

_GEOMETRY = (
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups, str padding_mode, float? tolerance=None"
)
_BIAS = "Tensor? bias=None"
_EPILOGUE = 'Tensor? residual=None, str activation="none"'
_SCHEMAS = {
    "conv2d_fprop": f"(Tensor x, Tensor weight, Tensor? bias, {_GEOMETRY}, {_EPILOGUE}) -> Tensor",
    "conv2d_dgrad": (
        f"(Tensor grad, Tensor weight, SymInt[] x_size, bool channels_last, {_GEOMETRY}, {_BIAS}) -> Tensor"
    ),
    "conv2d_wgrad": (
        f"(Tensor grad, Tensor x, SymInt[] weight_size, bool channels_last, bool bias, {_GEOMETRY}) -> (Tensor, Tensor)"
    ),
    "conv_transpose": (
        "(Tensor x, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, "
        "SymInt groups, SymInt[] dilation, float? tolerance=None) -> Tensor"
    ),
}

library = torch.library.Library("polyconv", "DEF")
for _name, _schema in _SCHEMAS.items():
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

fprop: Callable[..., Tensor] = torch.ops.polyconv.conv2d_fprop.default
dgrad: Callable[..., Tensor] = torch.ops.polyconv.conv2d_dgrad.default
wgrad: Callable[..., tuple[Tensor, Tensor]] = torch.ops.polyconv.conv2d_wgrad.default
transposed: Callable[..., Tensor] = torch.ops.polyconv.conv_transpose.default


def split_epilogue(
    stride: Args,
    padding: Args,
    dilation: Args,
    groups: Args,
    padding_mode: Args,
    tolerance: float | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> tuple[tuple[Args, ...], Tensor | None, str]:
    """Split the arguments of ``fprop`` after the bias. The dispatcher omits trailing defaults."""
    return (stride, padding, dilation, groups, padding_mode, tolerance), residual, activation


def split_bias(
    stride: Args,
    padding: Args,
    dilation: Args,
    groups: Args,
    padding_mode: Args,
    tolerance: float | None = None,
    bias: Tensor | None = None,
) -> tuple[tuple[Args, ...], Tensor | None]:
    """Split the arguments of ``dgrad`` after the layout into geometry and bias."""
    return (stride, padding, dilation, groups, padding_mode, tolerance), bias
