"""What the operators are called and what they take; the handles to call them by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Args = Any
"""Six arguments of every operator, in the order of :class:`~polyconv.arguments.Geometry`; behind them, forward, two."""

_GEOMETRY = (
    "SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, SymInt groups, str padding_mode, float? tolerance=None"
)
_EPILOGUE = 'Tensor? residual=None, str activation="none"'
_SCHEMAS = {
    "conv2d_fprop": f"(Tensor x, Tensor weight, Tensor? bias, {_GEOMETRY}, {_EPILOGUE}) -> Tensor",
    "conv2d_dgrad": f"(Tensor grad, Tensor weight, SymInt[4] x_size, bool channels_last, {_GEOMETRY}) -> Tensor",
    "conv2d_wgrad": (
        "(Tensor grad, Tensor x, SymInt[4] weight_size, bool channels_last, bool bias, "
        f"{_GEOMETRY}) -> (Tensor, Tensor)"
    ),
}

library = torch.library.Library("polyconv", "DEF")
for _name, _schema in _SCHEMAS.items():
    library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

fprop: Callable[..., Tensor] = torch.ops.polyconv.conv2d_fprop.default
dgrad: Callable[..., Tensor] = torch.ops.polyconv.conv2d_dgrad.default
wgrad: Callable[..., tuple[Tensor, Tensor]] = torch.ops.polyconv.conv2d_wgrad.default


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
    """Geometry, residual and activation, from what follows the bias. The dispatcher leaves out defaults at the end."""
    return (stride, padding, dilation, groups, padding_mode, tolerance), residual, activation
