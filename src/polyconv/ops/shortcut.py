"""A forward pass without the dispatcher, where the dispatcher would add nothing.

Between :func:`polyconv.conv2d` and the kernels PyTorch's dispatcher finds out whether anything wants to see the call:
autocast, ``torch.func``, a mode, a tracer, a subclass of tensors. For an operator that is written in Python that alone
costs some 30 microseconds. Here it is one lookup: the key of a call holds, beside shapes and arguments, the dispatch
keys of the tensors and of the thread. A call in a state in which nothing is going on is remembered with its plan; in
any other state, :func:`conv2d` declines and the operator is called.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from .. import settings
from ..arguments import Extent, Padding, normalise
from .calls import Call
from .derivatives import Fprop
from .execution import call_of_fprop, compute_fprop
from .layouts import check_tensors, geometry_of
from .plain import TYPES, excluded, included, is_plain, is_watched, keys_of

CAPACITY = 4096
"""Calls to remember; when there are more, all are forgotten."""

_known: dict[Hashable, Call] = {}

_is_grad_enabled = torch.is_grad_enabled


def conv2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    stride: Extent,
    padding: Padding,
    dilation: Extent,
    groups: int,
    padding_mode: str,
    tolerance: float | None,
) -> Tensor | None:
    """The output, or None where the operator has to be called."""
    if type(x) not in TYPES or type(w) not in TYPES or not (bias is None or type(bias) in TYPES) or is_watched():
        return None
    recorded = _is_grad_enabled() and (x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad))
    try:
        key: Hashable = (
            recorded,
            x.shape,
            x.stride(),
            x.data_ptr() & 15,
            x.dtype,
            x.device,
            keys_of(x).raw_repr(),
            w.shape,
            w.stride(),
            w.dtype,
            w.device,
            keys_of(w).raw_repr(),
            None if bias is None else (bias.shape, bias.dtype, bias.device, keys_of(bias).raw_repr()),
            included().raw_repr(),
            excluded().raw_repr(),
            stride,
            padding,
            dilation,
            groups,
            padding_mode,
            settings.current().tolerance if tolerance is None else tolerance,
        )
        call = _known.get(key)
    except (TypeError, RuntimeError):  # a list among the arguments; a tensor without strides or memory
        return None
    # 1.0 and True are equal to 1, but no integers.
    for argument in (stride, padding, dilation):
        if type(argument) is not int and not _is_exact(argument):
            return None
    if type(groups) is not int:
        return None
    if call is None:
        if x.dtype not in (torch.float32, torch.float64):  # may be widened on the way
            return None
        if not (is_plain(x) and is_plain(w) and (bias is None or is_plain(bias))) or x.dim() != 4 or w.dim() != 4:
            return None
        call = _prepare(x, w, bias, (stride, padding, dilation, groups, padding_mode, tolerance), recorded)
        if len(_known) >= CAPACITY:
            _known.clear()
        _known[key] = call
    return _record(call, x, w, bias) if recorded else compute_fprop(call, x, w, bias)


class _Recorded(torch.autograd.Function):
    """The operator's derivative, on a prepared call. Without ``setup_context``, whose arguments torch inspects."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        ctx.geometry = call.geometry
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w)
        return compute_fprop(call, x, w, bias)

    backward = staticmethod(Fprop.backward)


# `Function.apply` looks for transforms of torch.func first: here there are none.
_record = super(torch.autograd.Function, _Recorded).apply


def _prepare(x: Tensor, w: Tensor, bias: Tensor | None, arguments: tuple[Any, ...], recorded: bool) -> Call:
    geometry = geometry_of(*normalise(w.shape[2:], *arguments))
    check_tensors(x, "input", w, "weight", bias)
    return call_of_fprop(x, w, bias, geometry, inference=not recorded)


def _is_exact(argument: object) -> bool:
    """A pair of integers, or a word."""
    if type(argument) is tuple:
        return len(argument) == 2 and type(argument[0]) is int and type(argument[1]) is int
    return type(argument) is str
