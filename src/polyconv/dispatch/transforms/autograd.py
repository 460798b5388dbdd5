"""Derivatives of the operators. Only those that are wanted are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from ...activation import Activation
from ...arguments import Geometry, statically, suggests_channels_last
from ...lowering.epilogue import per_channel, summed_per_channel
from ...runtime.guards import are_plain, is_watched
from ..execute import run_dgrad, run_fprop, run_wgrad, training
from ..operands import geometry_of
from ..schema import Args, dgrad, fprop, split_bias, split_epilogue, wgrad
from .dtensor_import import expect_dtensors


def input_gradient(grad: Tensor, w: Tensor, x: Tensor, geometry: Args, straight: bool | None = None) -> Tensor:
    """Input gradient, in the input's memory format. ``straight``: the result of :func:`_go_straight`, if known."""
    op = run_dgrad if _asked(straight, grad, w) else dgrad
    return op(grad, w, x.shape, suggests_channels_last(x.shape, x.stride()), *geometry)


def weight_gradient(
    grad: Tensor, x: Tensor, w: Tensor, bias: bool, geometry: Args, straight: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Weight gradient, in the weight's memory format, and bias gradient."""
    op = run_wgrad if _asked(straight, grad, x) else wgrad
    return op(grad, x, w.shape, suggests_channels_last(w.shape, w.stride()), bias, *geometry)


def _asked(straight: bool | None, *tensors: Tensor) -> bool:
    return _go_straight(*tensors) if straight is None else straight


def _go_straight(*tensors: Tensor) -> bool:
    """Whether the dispatcher would only find the kernel."""
    return not torch.is_grad_enabled() and not is_watched() and are_plain(*tensors)


# Not by torch.library.register_autograd: an operator registered that way silently has a zero forward-mode derivative.
# `apply` takes the dispatcher's key set, then the arguments of the operator. A gradient or tangent of None is zero.

Gradients = tuple[Tensor | None, ...]


def _below_autograd(op: Any, keyset: Any, args: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _forward(op: Any, keyset: Any, args: Sequence[Any]) -> Any:
    """Call ``op`` inside an autograd.Function. Under ``torch.func``, lower levels may need derivatives: enable them."""
    if not torch._C._are_functorch_transforms_active():
        with training():
            return _below_autograd(op, keyset, args)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _below_autograd(op, keyset, args)


def _apply(function: Any, keyset: Any, args: Sequence[Any]) -> Any:
    """``function.apply`` for the level of derivatives that the dispatcher is at.

    Under ``torch.func``, ``torch.autograd.Function`` would start again from the outermost level; otherwise it inspects
    the signature of ``forward`` on each call, which costs more than all the rest. Its base class, from which
    ``torch.func`` itself derives, does neither.
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(keyset, *args)
    with enable_single_level_autograd_function():
        return function.apply(keyset, *args)


def _is_differentiated(tensors: Sequence[Any]) -> bool:
    recorded = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in tensors)
    return recorded or forward_ad._current_level >= 0


# Autograd kernels. A call is recorded only if derivatives are wanted.


def fprop_kernel(keyset: Any, x: Tensor, w: Tensor, bias: Tensor | None, *args: Any) -> Any:
    """Autograd kernel of ``fprop``. An activation whose derivative needs the sums is applied by torch."""
    expect_dtensors()
    geometry, residual, activation = split_epilogue(*args)
    if not _is_differentiated((x, w, bias, residual)):
        return _below_autograd(fprop, keyset, (x, w, bias, *args))
    applied = Activation(activation)
    if not applied.is_saved_by_output:
        return applied(fprop(x, w, bias, *geometry, residual))
    return _apply(Fprop, keyset, (x, w, bias, *geometry, residual, activation))


def dgrad_kernel(keyset: Any, grad: Tensor, w: Tensor, x_size: Any, channels_last: bool, *args: Any) -> Any:
    """Autograd kernel of ``dgrad``, which has a bias if it is a transposed convolution."""
    expect_dtensors()
    geometry, bias = split_bias(*args)
    if not _is_differentiated((grad, w, bias)):
        return _below_autograd(dgrad, keyset, (grad, w, x_size, channels_last, *args))
    return _apply(Dgrad, keyset, (grad, w, x_size, channels_last, *geometry, bias))


def wgrad_kernel(keyset: Any, *args: Any) -> Any:
    expect_dtensors()
    return _apply(Wgrad, keyset, args) if _is_differentiated(args[:2]) else _below_autograd(wgrad, keyset, args)


def save(ctx: Any, *tensors: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _geometry_to_keep(arguments: Sequence[Any]) -> Geometry:
    """Geometry for the backward pass. A traced graph keeps a tolerance of None: settings may differ when it runs."""
    traced = torch._C._len_torch_dispatch_stack() > 0
    return Geometry(*arguments) if traced else geometry_of(*arguments)


def _forward_mode(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Make a ``jvp`` from a formula that takes the context, the saved tensors without tangents, and the tangents.

    Autograd calls a ``jvp`` with forward mode disabled, on tensors that carry the very tangents it is given. Under
    ``torch.func`` an outer level may differentiate the formula in forward mode, so forward mode is enabled and this
    level's tangents are stripped from the saved tensors.
    """

    def jvp(ctx: Any, *tangents: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            primals = [forward_ad.unpack_dual(tensor, level=0).primal for tensor in ctx.saved_tensors]
            return formula(ctx, primals, *tangents)

    return jvp


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def fprop_gradients(
    ctx: Any, grad: Tensor | None, wanted: Sequence[bool], prepared: Callable[..., Gradients] | None = None
) -> Gradients:
    """Gradients of input, weight, bias and residual, None where not wanted. ``prepared``: ``GuardedCall.gradients``."""
    want_x, want_w, want_bias, want_residual = wanted
    if grad is None:
        return None, None, None, None
    x, w, *y = ctx.saved_tensors
    grad = _through_relu(grad, y)
    straight = _go_straight(grad, x, w)
    if straight and prepared is not None:
        return *prepared(grad, x, w, want_x, want_w, want_bias), grad if want_residual else None
    dx = input_gradient(grad, w, x, ctx.geometry, straight) if want_x else None
    dw = db = None
    if want_w:
        dw, db = weight_gradient(grad, x, w, want_bias, ctx.geometry, straight)
    elif want_bias:
        db = summed_per_channel(grad)
    return dx, dw, db if want_bias else None, grad if want_residual else None


def _fprop_tangent(
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None], x: Tensor, w: Tensor, geometry: Args
) -> Tensor | None:
    """Tangent of the output, from those of input, weight and bias."""
    dx, dw, db = tangents
    from_x = None if dx is None else fprop(dx, w, None, *geometry)
    from_w = None if dw is None else fprop(x, dw, None, *geometry)
    total = _add(from_x, from_w)
    if db is None:
        return total
    spread = per_channel(db, x.dim())
    if total is not None:
        return total + spread
    return spread.expand(x.shape[0], -1, *geometry.out_size(x.shape[2:], w.shape[2:])).clone()


class Fprop(_SingleLevelFunction):
    """Forward pass without activation or with ReLU, whose gradient needs only the output: that is saved."""

    @staticmethod
    def forward(keyset: Any, *args: Any) -> Any:
        return _forward(fprop, keyset, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, x, w, _, *geometry, _, activation = inputs
        ctx.geometry = _geometry_to_keep(geometry)
        save(ctx, x, w, *([output] if activation == "relu" else []))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        _, x, w, bias, *geometry, residual, _ = ctx.needs_input_grad
        *found, for_residual = fprop_gradients(ctx, grads[0], (x, w, bias, residual))
        return (None, *found, *[None for _ in geometry], for_residual, None)

    @staticmethod
    @_forward_mode
    def jvp(ctx: Any, primals: Sequence[Tensor], *tangents: Any) -> Any:
        (_, dx, dw, db, *_, dr, _), (x, w, *y) = tangents, primals
        change = _add(_fprop_tangent((dx, dw, db), x, w, ctx.geometry), dr)
        return None if change is None else _through_relu(change, y)


def _through_relu(change: Tensor, y: Sequence[Tensor]) -> Tensor:
    """Mask a gradient or tangent by the saved output of a ReLU; unchanged if no output was saved."""
    return torch.ops.aten.threshold_backward(change, y[0], 0) if y else change


def dgrad_gradients(ctx: Any, grad_dx: Tensor | None, wanted: Sequence[bool]) -> Gradients:
    """Gradients of ``dgrad`` (or a transposed convolution) with respect to its first tensor, weight and bias.

    ``dgrad`` is the transpose of the forward pass; in its weight gradient, input and output gradient change roles.
    """
    if grad_dx is None:
        return None, None, None
    want_grad, want_w, want_bias = wanted
    grad, w = ctx.saved_tensors
    if any(statically(extent == 0) for extent in grad_dx.shape[2:]):  # no output: all gradients are zero
        zeros = (
            grad_dx.sum().expand(tensor.shape).clone() for tensor in (grad, w, grad_dx.new_empty(grad_dx.shape[1]))
        )
        return tuple(zero if want else None for zero, want in zip(zeros, wanted, strict=True))
    straight = _go_straight(grad_dx, grad, w)
    for_grad = for_w = None
    if want_grad:
        with training():
            for_grad = (run_fprop if straight else fprop)(grad_dx, w, None, *ctx.geometry)
    if want_w:
        for_w = weight_gradient(grad, grad_dx, w, False, ctx.geometry, straight)[0]
    return for_grad, for_w, summed_per_channel(grad_dx) if want_bias else None


class Dgrad(_SingleLevelFunction):
    @staticmethod
    def forward(keyset: Any, *args: Any) -> Any:
        return _forward(dgrad, keyset, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, grad, w, ctx.x_size, ctx.channels_last, *geometry, _ = inputs
        ctx.geometry = _geometry_to_keep(geometry)
        save(ctx, grad, w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        _, grad, w, *rest, bias = ctx.needs_input_grad
        for_grad, for_w, for_bias = dgrad_gradients(ctx, grads[0], (grad, w, bias))
        return (None, for_grad, for_w, *[None for _ in rest], for_bias)

    @staticmethod
    @_forward_mode
    def jvp(ctx: Any, primals: Sequence[Tensor], *tangents: Any) -> Any:
        (_, dgrad_y, dw, *_, db), (grad, w) = tangents, primals
        rest = (ctx.x_size, ctx.channels_last, *ctx.geometry)
        from_grad = None if dgrad_y is None else dgrad(dgrad_y, w, *rest)
        change = _add(from_grad, None if dw is None else dgrad(grad, dw, *rest))
        if db is None:
            return change
        spread = per_channel(db, grad.dim())
        return spread.expand(*ctx.x_size).clone() if change is None else change + spread


class Wgrad(_SingleLevelFunction):
    @staticmethod
    def forward(keyset: Any, *args: Any) -> Any:
        return _forward(wgrad, keyset, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, grad, x, *ctx.rest = inputs
        save(ctx, grad, x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        (grad_dw, grad_db), (grad, x), (_, _, bias, *geometry) = grads, ctx.saved_tensors, ctx.rest
        _, want_grad, want_x, *rest = ctx.needs_input_grad
        for_grad = for_x = None
        if want_grad and grad_dw is not None:
            for_grad = fprop(x, grad_dw, grad_db if bias else None, *geometry)
        elif want_grad and bias and grad_db is not None:
            for_grad = per_channel(grad_db, grad.dim()).expand(grad.shape)
        if want_x and grad_dw is not None:
            for_x = input_gradient(grad, grad_dw, x, geometry)
        return (None, for_grad, for_x, *[None for _ in rest])

    @staticmethod
    @_forward_mode
    def jvp(ctx: Any, primals: Sequence[Tensor], *tangents: Any) -> Any:
        (_, dgrad_y, dx, *_), (grad, x), (w_size, last, bias, *geometry) = tangents, primals, ctx.rest
        from_grad, db = (None, None) if dgrad_y is None else wgrad(dgrad_y, x, *ctx.rest)
        from_x = None if dx is None else wgrad(grad, dx, w_size, last, False, *geometry)[0]
        # With two outputs, neither tangent may be None. The bias gradient does not depend on the input.
        return _add(from_grad, from_x), grad.new_zeros(w_size[0] if bias else 0) if db is None else db
