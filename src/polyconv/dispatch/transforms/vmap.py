"""``torch.vmap`` rules: a batch of convolutions is one convolution with more images, channels or groups.

No rule loops. A pass has two tensors; which of them are batched determines where the mapped dimension goes:

===================  ==========================  ========================  ==========================
operator             the first tensor alone      the second alone          both
===================  ==========================  ========================  ==========================
fprop(x, w)          more images                 more output channels      more groups
dgrad(grad, w)       more images                 more input channels       more groups
wgrad(grad, x)       more output channels        more input channels       more groups
===================  ==========================  ========================  ==========================

In a grouped convolution the new channels are inside each group: the order is (group, batch, channel). New groups are
outside the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...activation import Activation
from ...lowering.epilogue import per_channel
from ..operands import Shape
from ..schema import Args, dgrad, fprop, library, split_bias, split_epilogue, wgrad

Dim = int | None
"""Position of the mapped dimension in a tensor; None if it has none."""
Rule = Callable[..., tuple[Any, Any]]
"""Takes vmap's info, a :data:`Dim` per argument and the arguments; returns the results and their :data:`Dim`."""


def register_vmap(name: str, rule: Rule) -> None:
    if hasattr(torch.library, "register_vmap"):  # from PyTorch 2.5 on
        torch.library.register_vmap(f"polyconv::{name}", rule, lib=library)


def fold(tensor: Tensor, batch_dim: int, dim: int, groups: int = 1) -> Tensor:
    """Merge the mapped dimension into ``dim`` (counted without it), inside each of the groups of ``dim``."""
    tensor = tensor.movedim(batch_dim, 0)
    if groups == 1:
        return tensor.movedim(0, dim).flatten(dim, dim + 1)
    grouped: Tensor = tensor.unflatten(dim + 1, (groups, tensor.shape[dim + 1] // groups))
    return grouped.movedim(0, dim + 1).flatten(dim, dim + 2)


def unfold(tensor: Tensor, batch: int, dim: int, groups: int = 1) -> Tensor:
    """Inverse of :func:`fold`. The mapped dimension comes first."""
    grouped: Tensor = tensor.unflatten(dim, (groups, batch, tensor.shape[dim] // (groups * batch)))
    return grouped.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def _multiplied(size: Shape, dim: int, batch: int) -> list[int]:
    return [extent * batch if axis == dim else extent for axis, extent in enumerate(size)]


def _fold_bias(bias: Tensor | None, dim: Dim, batch: int, groups: int) -> Tensor | None:
    """Bias of ``batch`` times as many output channels: folded, or repeated if it is not mapped."""
    if bias is None:
        return None
    return fold(bias.expand(batch, -1), 0, 0, groups) if dim is None else fold(bias, dim, 0, groups)


def vmap_fprop(
    info: Any, in_dims: Sequence[Dim], x: Tensor, w: Tensor, bias: Tensor | None, *args: Args
) -> tuple[Tensor, int]:
    """Forward pass. The epilogue is applied separately: folding the residual as the output is would copy it."""
    geometry, residual, activation = split_epilogue(*args)
    y = _vmap_sums(info.batch_size, in_dims, x, w, bias, *geometry)
    if residual is not None:
        residual_dim = in_dims[3 + len(geometry)]
        y = y + (residual if residual_dim is None else residual.movedim(residual_dim, 0))
    return Activation(activation)(y), 0


def _vmap_sums(batch: int, in_dims: Sequence[Dim], x: Tensor, w: Tensor, bias: Tensor | None, *args: Args) -> Tensor:
    """Forward pass without epilogue. The mapped dimension comes first, if any of these tensors has it."""
    x_dim, w_dim, bias_dim, *_ = in_dims
    stride, padding, dilation, groups, *rest = args
    if w_dim is None and bias_dim is not None:
        assert bias is not None
        biases = per_channel(bias.movedim(bias_dim, 0), w.dim()).unsqueeze(1)
        return _vmap_sums(batch, (x_dim, None, None), x, w, None, *args) + biases
    if w_dim is None:
        if x_dim is None:
            return fprop(x, w, bias, *args)
        images = x.shape[1 if x_dim == 0 else 0]
        y: Tensor = fprop(fold(x, x_dim, 0), w, bias, *args).unflatten(0, (batch, images))
        return y
    if x_dim is None:
        w, bias = fold(w, w_dim, 0, groups), _fold_bias(bias, bias_dim, batch, groups)
        return unfold(fprop(x, w, bias, *args), batch, 1, groups)
    x, w, bias = fold(x, x_dim, 1), fold(w, w_dim, 0), _fold_bias(bias, bias_dim, batch, 1)
    return unfold(fprop(x, w, bias, stride, padding, dilation, groups * batch, *rest), batch, 1)


def vmap_dgrad(
    info: Any, in_dims: Sequence[Dim], grad: Tensor, w: Tensor, x_size: Shape, channels_last: bool, *args: Args
) -> tuple[Tensor, int]:
    """Input gradient. The bias of a transposed convolution is added separately, as an epilogue is."""
    geometry, bias = split_bias(*args)
    dx = _vmap_input_gradient(info.batch_size, in_dims, grad, w, x_size, channels_last, *geometry)
    if bias is not None:
        bias_dim = in_dims[4 + len(geometry)]
        biases = bias.unsqueeze(0) if bias_dim is None else bias.movedim(bias_dim, 0)
        dx = dx + per_channel(biases, len(x_size)).unsqueeze(1)
    return dx, 0


def _vmap_input_gradient(
    batch: int, in_dims: Sequence[Dim], grad: Tensor, w: Tensor, x_size: Shape, channels_last: bool, *args: Args
) -> Tensor:
    """Input gradient without bias. The mapped dimension comes first; its size is 1 if neither tensor has it."""
    grad_dim, w_dim, *_ = in_dims
    stride, padding, dilation, groups, *rest = args
    if w_dim is None:
        if grad_dim is None:
            return dgrad(grad, w, x_size, channels_last, *args).unsqueeze(0)
        size = _multiplied(x_size, 0, batch)
        dx: Tensor = dgrad(fold(grad, grad_dim, 0), w, size, channels_last, *args).unflatten(0, (batch, x_size[0]))
        return dx
    size = _multiplied(x_size, 1, batch)
    if grad_dim is None:
        return unfold(dgrad(grad, fold(w, w_dim, 1), size, channels_last, *args), batch, 1, groups)
    grad, w, groups = fold(grad, grad_dim, 1), fold(w, w_dim, 0), groups * batch
    return unfold(dgrad(grad, w, size, channels_last, stride, padding, dilation, groups, *rest), batch, 1)


def vmap_wgrad(
    info: Any,
    in_dims: Sequence[Dim],
    grad: Tensor,
    x: Tensor,
    w_size: Shape,
    channels_last: bool,
    bias: bool,
    *args: Args,
) -> tuple[tuple[Tensor, Tensor], tuple[Dim, Dim]]:
    grad_dim, x_dim, *_ = in_dims
    batch, (stride, padding, dilation, groups, *rest) = info.batch_size, args
    if grad_dim is None:
        assert x_dim is not None
        size = _multiplied(w_size, 1, batch)
        dw, db = wgrad(grad, fold(x, x_dim, 1, groups), size, channels_last, bias, *args)
        return (unfold(dw, batch, 1), db), (0, None)
    size = _multiplied(w_size, 0, batch)
    if x_dim is None:
        dw, db = wgrad(fold(grad, grad_dim, 1, groups), x, size, channels_last, bias, *args)
        inside = groups
    else:
        grad, x, groups = fold(grad, grad_dim, 1), fold(x, x_dim, 1), groups * batch
        dw, db = wgrad(grad, x, size, channels_last, bias, stride, padding, dilation, groups, *rest)
        inside = 1
    # A bias gradient that is not wanted has no elements to unfold.
    return (unfold(dw, batch, 0, inside), unfold(db, batch, 0, inside) if bias else db), (0, 0 if bias else None)
