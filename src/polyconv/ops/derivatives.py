"""Derivatives. Only what is asked for is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..arguments import suggests_channels_last
from .execution import recorded, run_dgrad, run_wgrad
from .layouts import geometry_of
from .plain import is_plain, is_watched
from .schema import Args, dgrad, fprop, wgrad


def input_gradient(grad: Tensor, w: Tensor, x: Tensor, geometry: Args) -> Tensor:
    """Gradient of the input, in the memory format of the input."""
    op = run_dgrad if _goes_straight(grad, w) else dgrad
    return op(grad, w, x.shape, suggests_channels_last(x.shape, x.stride()), *geometry)


def weight_gradient(grad: Tensor, x: Tensor, w: Tensor, bias: bool, geometry: Args) -> tuple[Tensor, Tensor]:
    """Gradients of the weight, in its memory format, and of the bias."""
    op = run_wgrad if _goes_straight(grad, x) else wgrad
    return op(grad, x, w.shape, suggests_channels_last(w.shape, w.stride()), bias, *geometry)


def _goes_straight(one: Tensor, other: Tensor) -> bool:
    """Whether the dispatcher would only find the kernel: then the way through it is spared."""
    if torch.is_grad_enabled() or is_watched():
        return False
    return is_plain(one) and is_plain(other)


# These are written out, and not left to torch.library.register_autograd, because an operator registered that way has a
# forward-mode derivative of zero, without a word. `apply` takes the dispatcher's key set, then the arguments of the
# operator. A gradient or tangent that is None is zero.

Gradients = tuple[Tensor | None, ...]


def _below_autograd(op: Any, keyset: Any, args: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def autograd_kernel(function: Any, op: Any) -> Callable[..., Any]:
    """What the dispatcher calls where derivatives may be wanted: records the call only if they are."""

    def run(keyset: Any, *args: Any) -> Any:
        recorded = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args[:3])
        if recorded or forward_ad._current_level >= 0:
            return function.apply(keyset, *args)
        return _below_autograd(op, keyset, args)

    return run


def save(ctx: Any, *tensors: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


class Fprop(torch.autograd.Function):
    @staticmethod
    def forward(keyset: Any, *args: Any) -> Any:
        with recorded():
            return _below_autograd(fprop, keyset, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, x, w, _, *geometry = inputs
        ctx.geometry = geometry_of(*geometry)
        save(ctx, x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        (grad,), (x, w) = grads, ctx.saved_tensors
        _, want_x, want_w, want_bias, *rest = (wanted and grad is not None for wanted in ctx.needs_input_grad)
        dx = dw = db = None
        if want_x:
            dx = input_gradient(grad, w, x, ctx.geometry)
        if want_w:
            dw, db = weight_gradient(grad, x, w, want_bias, ctx.geometry)
        elif want_bias:
            db = grad.sum((0, 2, 3))
        return (None, dx, dw, db if want_bias else None, *[None for _ in rest])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (_, dx, dw, db, *_), (x, w) = tangents, ctx.saved_tensors
        from_x = None if dx is None else fprop(dx, w, None, *ctx.geometry)
        from_w = None if dw is None else fprop(x, dw, None, *ctx.geometry)
        total = _add(from_x, from_w)
        if db is None:
            return total
        spread = db.reshape(1, -1, 1, 1)
        if total is not None:
            return total + spread
        return spread.expand(x.shape[0], -1, *ctx.geometry.out_size(x.shape[2:], w.shape[2:])).clone()


class Dgrad(torch.autograd.Function):
    @staticmethod
    def forward(keyset: Any, *args: Any) -> Any:
        return _below_autograd(dgrad, keyset, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, grad, w, *ctx.rest = inputs
        save(ctx, grad, w)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Gradients:
        (grad_dx,), (grad, w), (_, _, *geometry) = grads, ctx.saved_tensors, ctx.rest
        _, want_grad, want_w, *rest = (wanted and grad_dx is not None for wanted in ctx.needs_input_grad)
        for_grad = fprop(grad_dx, w, None, *geometry) if want_grad else None
        for_w = weight_gradient(grad, grad_dx, w, False, geometry)[0] if want_w else None
        return (None, for_grad, for_w, *[None for _ in rest])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (_, dgrad_y, dw, *_), (grad, w) = tangents, ctx.saved_tensors
        from_grad = None if dgrad_y is None else dgrad(dgrad_y, w, *ctx.rest)
        return _add(from_grad, None if dw is None else dgrad(grad, dw, *ctx.rest))


class Wgrad(torch.autograd.Function):
    @staticmethod
    def forward(keyset: Any, *args: Any) -> Any:
        return _below_autograd(wgrad, keyset, args)

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
            for_grad = grad_db.reshape(1, -1, 1, 1).expand(grad.shape)
        if want_x and grad_dw is not None:
            for_x = input_gradient(grad, grad_dw, x, geometry)
        return (None, for_grad, for_x, *[None for _ in rest])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (_, dgrad_y, dx, *_), (grad, x), (w_size, last, bias, *geometry) = tangents, ctx.saved_tensors, ctx.rest
        from_grad, db = (None, None) if dgrad_y is None else wgrad(dgrad_y, x, *ctx.rest)
        from_x = None if dx is None else wgrad(grad, dx, w_size, last, False, *geometry)[0]
        # Of two outputs, neither tangent may be None. The bias gradient does not depend on the input.
        return _add(from_grad, from_x), grad.new_zeros(w_size[0] if bias else 0) if db is None else db
