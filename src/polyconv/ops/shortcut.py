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
import torch.nn.functional as F
from torch import Tensor

from .. import epoch
from ..arguments import Extent, Padding, activation_name, normalise
from ..problem import Activation
from .calls import Call, known, remember
from .derivatives import Gradients, fprop_gradients
from .execution import compute_fprop, describe_fprop
from .layouts import check_residual, check_tensors, geometry_of
from .plain import TYPES, excluded, included, is_plain, is_watched, keys_of
from .problems import fprop_problem

_OPTIONAL = (*TYPES, type(None))

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
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor | None:
    """The output, or None where the operator has to be called."""
    if type(x) not in TYPES or type(w) not in TYPES or is_watched():
        return None
    if type(bias) not in _OPTIONAL or type(residual) not in _OPTIONAL:
        return None
    recorded = _is_grad_enabled() and (
        x.requires_grad
        or w.requires_grad
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    )
    if recorded and activation == "silu":  # its derivative needs the sums before it, so it is applied apart
        sums = conv2d(x, w, bias, stride, padding, dilation, groups, padding_mode, tolerance, None, residual)
        return None if sums is None else F.silu(sums)
    number = epoch.now()
    try:
        key: Hashable = (
            number,
            recorded,
            x.shape,
            x.stride(),
            x.data_ptr() & 15,
            x.dtype,
            x.get_device(),
            keys_of(x).raw_repr(),
            w.shape,
            w.stride(),
            w.dtype,
            w.get_device(),
            keys_of(w).raw_repr(),
            None if bias is None else (bias.shape, bias.dtype, bias.get_device(), keys_of(bias).raw_repr()),
            None if residual is None else _about(residual),
            included().raw_repr(),
            excluded().raw_repr(),
            stride,
            padding,
            dilation,
            groups,
            padding_mode,
            tolerance,
            activation,
        )
        call = known.get(key)
    except (TypeError, RuntimeError):  # a list among the arguments; a tensor without strides or memory
        return None
    if call is not None:
        # 1.0 and True are equal to 1, but no integers.
        one, two, three, four = call.arguments
        same = one is stride and two is padding and three is dilation and four is groups
        if not same and not _are_exact(stride, padding, dilation, groups):
            return None
    else:
        if x.dtype not in (torch.float32, torch.float64):  # may be widened on the way
            return None
        if any(not is_plain(tensor) or tensor.dim() != 4 for tensor in (x, w, residual) if tensor is not None):
            return None
        if not (bias is None or is_plain(bias)) or not _are_exact(stride, padding, dilation, groups):
            return None
        check_tensors(x, "input", w, "weight", bias, residual)
        geometry = geometry_of(*normalise(w.shape[2:], stride, padding, dilation, groups, padding_mode, tolerance))
        description = describe_fprop(x, w, bias, residual, activation_name(activation), geometry)
        problem, layout = fprop_problem(*description)
        if residual is not None:
            check_residual(residual, layout[0])
        arguments = (stride, padding, dilation, groups)
        call = Call(problem, layout, geometry, x.device, inference=not recorded, arguments=arguments)
        remember(key, number, call)
    return _record(call, x, w, bias, residual) if recorded else compute_fprop(call, x, w, bias, residual)


class _Recorded(torch.autograd.Function):
    """The operator's derivative, on a prepared call. Without ``setup_context``, whose arguments torch inspects."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        y = compute_fprop(call, x, w, bias, residual)
        ctx.geometry = call.geometry
        ctx.set_materialize_grads(False)
        if call.problem.activation is Activation.RELU:
            ctx.save_for_backward(x, w, y)
        else:
            ctx.save_for_backward(x, w)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        return (None, *fprop_gradients(ctx, grads[0], ctx.needs_input_grad[1:]))


# `Function.apply` looks for transforms of torch.func first: here there are none.
_record = super(torch.autograd.Function, _Recorded).apply


def _about(tensor: Tensor) -> Hashable:
    keys, device = keys_of(tensor).raw_repr(), tensor.get_device()
    return tensor.shape, tensor.stride(), tensor.data_ptr() & 15, tensor.dtype, device, keys


def _are_exact(stride: object, padding: object, dilation: object, groups: object) -> bool:
    """Whether these are integers, pairs of integers, or words."""
    for argument in (stride, padding, dilation):
        if type(argument) is tuple:
            if len(argument) != 2 or type(argument[0]) is not int or type(argument[1]) is not int:
                return False
        elif type(argument) is not int and type(argument) is not str:
            return False
    return type(groups) is int
