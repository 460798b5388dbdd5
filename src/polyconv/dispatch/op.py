"""The six convolutions as data: what one function needs to know to call any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..lowering.aten import CONVOLUTIONS

Args = tuple[Any, Any, Any, Any, Any]
"""Geometry of a call: (stride, padding, dilation, groups, padding mode) or, if transposed, (stride, padding, output
padding, groups, dilation)."""


class Op:
    """A convolution or transposed convolution over ``rank`` axes."""

    __slots__ = ("aten", "rank", "transposed")

    def __init__(self, rank: int, transposed: bool, aten: Callable[..., Tensor]) -> None:
        self.rank = rank
        self.transposed = transposed
        self.aten = aten
        """ATen's function with the same positional arguments, but for the padding mode."""

    @property
    def name(self) -> str:
        return f"conv_transpose{self.rank}d" if self.transposed else f"conv{self.rank}d"

    @property
    def attributes(self) -> tuple[str, ...]:
        """Module attributes that a call depends on: its geometry, as :func:`polyconv.dispatch.fastpath.call` takes it,
        the tolerance, one more, and the policy."""
        if self.transposed:
            return "stride", "padding", "output_padding", "groups", "dilation", "tolerance", "padding_mode", "policy"
        return "stride", "padding", "dilation", "groups", "padding_mode", "tolerance", "activation", "policy"


CONV1D, CONV2D, CONV3D = (Op(rank, False, aten) for rank, aten in CONVOLUTIONS.items())
CONV_TRANSPOSE1D, CONV_TRANSPOSE2D, CONV_TRANSPOSE3D = (
    Op(rank, True, f)
    for rank, f in enumerate((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), start=1)
)
PUBLIC: dict[Op, Callable[..., Tensor]] = {}
"""Public functions, for ``__torch_function__``; filled by :mod:`polyconv.functional`."""
FORWARD = {op.rank: op for op in (CONV1D, CONV2D, CONV3D)}
TRANSPOSED = {op.rank: op for op in (CONV_TRANSPOSE1D, CONV_TRANSPOSE2D, CONV_TRANSPOSE3D)}
