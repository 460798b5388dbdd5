"""The three passes of a convolution as operators of PyTorch's dispatcher.

========================  =======================================================================
``conv2d_fprop``          output from input, weight and bias
``conv2d_dgrad``          gradient of the input from the gradient of the output and the weight
``conv2d_wgrad``          gradients of weight and bias from the gradient of the output and the input
========================  =======================================================================

They are operators, and not plain functions, so that ``torch.compile``, ``torch.export``, fake tensors, autocast and
autograd all see one well-described call. The weight and bias gradients share an operator because they share a read of
the incoming gradient. Each pass is linear in each of its tensors, so the derivative of any of them is again made of
these three: that is all that double backward needs.

The operators take 4-D tensors of any strides and never copy an input: the gradient of ``y.sum()``, a tensor of stride
zero everywhere, reaches the backend as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import settings
from .arguments import Geometry, check_shapes, suggests_channels_last
from .backends import backend_for
from .problem import DEFAULT_TOLERANCE, PaddingMode, Pass, Problem, Strides, channels_last_strides, contiguous_strides

Args = Any
"""The last six arguments of every operator, in the order of :class:`~polyconv.arguments.Geometry`."""

_GEOMETRY = (
    "SymInt[2] stride, SymInt[4] padding, SymInt[2] dilation, SymInt groups, str padding_mode, float? tolerance=None"
)
_SCHEMAS = {
    "conv2d_fprop": f"(Tensor x, Tensor weight, Tensor? bias, {_GEOMETRY}) -> Tensor",
    "conv2d_dgrad": f"(Tensor grad, Tensor weight, SymInt[4] x_size, bool channels_last, {_GEOMETRY}) -> Tensor",
    "conv2d_wgrad": (
        "(Tensor grad, Tensor x, SymInt[4] weight_size, bool channels_last, bool bias, "
        f"{_GEOMETRY}) -> (Tensor, Tensor)"
    ),
}

_library = torch.library.Library("polyconv", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))

fprop: Callable[..., Tensor] = torch.ops.polyconv.conv2d_fprop.default
dgrad: Callable[..., Tensor] = torch.ops.polyconv.conv2d_dgrad.default
wgrad: Callable[..., tuple[Tensor, Tensor]] = torch.ops.polyconv.conv2d_wgrad.default


# ---- what is the same for real and fake tensors: checks, and the layout of the outputs

SMALLEST_POOLED = 16 * 2**20
"""Bytes of an output from which on its pages cost more than looking for used ones: see ``cpu/native.py``."""

Shape = Sequence[int]
Layout = tuple[Shape, bool]
"""Shape of an output, and whether it is channels_last."""


def _check_tensors(x: Tensor, x_name: str, w: Tensor, w_name: str, bias: Tensor | None = None) -> None:
    """Raise unless all tensors share a dtype that can be computed with, and a device."""
    dtype, device = x.dtype, x.device
    for name, tensor in ((w_name, w), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise RuntimeError(
                f"{x_name} and {name} should be the same type: got {dtype} and {tensor.dtype}. "
                f"Convert one of them, for example {name}.to({dtype})"
            )
        if tensor.device != device:
            raise RuntimeError(f"{x_name} and {name} should be on the same device: got {device} and {tensor.device}")
    if dtype.is_complex:
        raise RuntimeError(f"polyconv computes with real numbers only; got {dtype}. Use torch.nn.functional.conv2d")
    if device.type == "cuda" and dtype != torch.float32:
        raise RuntimeError(
            f"polyconv's CUDA kernels compute in float32 only; got {dtype}. Convert the model and its input with "
            ".float(), or run under torch.autocast, which does that for each convolution"
        )


def _fprop_layout(
    x_shape: Shape, x_strides: Shape, w_shape: Shape, w_strides: Shape, bias_shape: Shape | None, geometry: Geometry
) -> Layout:
    """The output is channels_last where torch's would be: if the input or the weight is."""
    check_shapes(x_shape, w_shape, bias_shape, geometry)
    channels_last = suggests_channels_last(x_shape, x_strides) or suggests_channels_last(w_shape, w_strides)
    return (x_shape[0], w_shape[0], *geometry.out_size(x_shape[2:], w_shape[2:])), channels_last


def _check_gradient(grad_shape: Shape, x_shape: Shape, w_shape: Shape, geometry: Geometry) -> None:
    check_shapes(x_shape, w_shape, None, geometry)
    expected = (x_shape[0], w_shape[0], *geometry.out_size(x_shape[2:], w_shape[2:]))
    if tuple(grad_shape) != expected:
        raise RuntimeError(f"expected a gradient of the output's size {list(expected)}; got {list(grad_shape)}")


def _empty(layout: Layout, like: Tensor) -> Tensor:
    """A new dense tensor. torch's allocators place it on a 16-byte boundary, so outputs are always aligned."""
    memory_format = torch.channels_last if layout[1] else torch.contiguous_format
    return torch.empty(layout[0], dtype=like.dtype, device=like.device, memory_format=memory_format)


def _allocate(layout: Layout, like: Tensor) -> Tensor:
    """The same for a tensor that will be computed: a large one on the CPU may come from memory that was used before."""
    shape, channels_last = layout
    if like.device.type == "cpu" and like.dtype == torch.float32 and prod(shape) * 4 >= SMALLEST_POOLED:
        from .cpu import native  # here, because importing polyconv loads no kernels

        if native.is_available():
            if not channels_last:
                return native.empty_output(like, shape)
            n, c, h, w = shape
            return native.empty_output(like, (n, h, w, c)).permute(0, 3, 1, 2)
    return _empty(layout, like)


def geometry_of(
    stride: Args, padding: Args, dilation: Args, groups: int, padding_mode: str, tolerance: float | None = None
) -> Geometry:
    """The dispatcher hands lists over; a geometry is made of tuples. A tolerance that was left open is settled here."""
    if tolerance is None:
        tolerance = settings.current().tolerance
    return Geometry(tuple(stride), tuple(padding), tuple(dilation), groups, padding_mode, tolerance)


# ---- from tensors to problems


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
def _prepare_fprop(
    x: tuple[Shape, Shape],
    w: tuple[Shape, Shape],
    bias_shape: Shape | None,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> tuple[Problem, Layout]:
    layout = _fprop_layout(*x, *w, bias_shape, geometry)
    bias = bias_shape is not None
    y_strides = dense_strides(*layout)
    return problem_of(Pass.FPROP, x, w, y_strides, geometry, bias=bias, dtype=dtype, vector_aligned=aligned), layout


@lru_cache(maxsize=4096)
def _prepare_dgrad(
    grad: tuple[Shape, Shape],
    w: tuple[Shape, Shape],
    layout: Layout,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> Problem:
    _check_gradient(grad[0], layout[0], w[0], geometry)
    x = (layout[0], dense_strides(*layout))
    return problem_of(Pass.DGRAD, x, w, grad[1], geometry, bias=False, dtype=dtype, vector_aligned=aligned)


@lru_cache(maxsize=4096)
def _prepare_wgrad(
    grad: tuple[Shape, Shape],
    x: tuple[Shape, Shape],
    layout: Layout,
    bias: bool,
    dtype: torch.dtype,
    aligned: bool,
    geometry: Geometry,
) -> Problem:
    _check_gradient(grad[0], x[0], layout[0], geometry)
    w = (layout[0], dense_strides(*layout))
    return problem_of(Pass.WGRAD, x, w, grad[1], geometry, bias=bias, dtype=dtype, vector_aligned=aligned)


# ---- what runs on real tensors. An empty tensor never reaches a backend.


def _run_fprop(x: Tensor, w: Tensor, bias: Tensor | None, *args: Args) -> Tensor:
    _check_tensors(x, "input", w, "weight", bias)
    problem, layout = _prepare_fprop(
        (x.shape, x.stride()),
        (w.shape, w.stride()),
        None if bias is None else bias.shape,
        x.dtype,
        not x.data_ptr() & 15,
        geometry_of(*args),
    )
    y = _allocate(layout, x)
    if x.numel() == 0 or y.numel() == 0:  # without input channels: a sum of nothing, and the bias
        return y.zero_() if bias is None else y.copy_(bias.reshape(1, -1, 1, 1).expand(y.shape))
    tensors = {"x": x, "w": w, "y": y}
    if bias is not None:
        tensors["bias"] = bias.contiguous()  # one number per channel: the only input without strides of its own
    backend_for(x.device).run(problem, tensors)
    return tensors["y"]


def _run_dgrad(grad: Tensor, w: Tensor, x_size: Shape, channels_last: bool, *args: Args) -> Tensor:
    _check_tensors(grad, "gradient", w, "weight")
    layout = (tuple(x_size), channels_last)
    problem = _prepare_dgrad(
        (grad.shape, grad.stride()),
        (w.shape, w.stride()),
        layout,
        grad.dtype,
        not grad.data_ptr() & 15,
        geometry_of(*args),
    )
    dx = _allocate(layout, grad)
    if dx.numel() == 0:
        return dx
    tensors = {"y": grad, "w": w, "x": dx}
    backend_for(grad.device).run(problem, tensors)
    return tensors["x"]


def _run_wgrad(
    grad: Tensor, x: Tensor, w_size: Shape, channels_last: bool, bias: bool, *args: Args
) -> tuple[Tensor, Tensor]:
    _check_tensors(grad, "gradient", x, "input")
    layout = (tuple(w_size), channels_last)
    problem = _prepare_wgrad(
        (grad.shape, grad.stride()),
        (x.shape, x.stride()),
        layout,
        bias,
        grad.dtype,
        not (grad.data_ptr() | x.data_ptr()) & 15,
        geometry_of(*args),
    )
    dw, db = _empty(layout, grad), grad.new_empty(w_size[0] if bias else 0)
    if grad.numel() == 0:
        return dw.zero_(), db.zero_()
    if dw.numel() == 0:  # without input channels: only the bias has a gradient
        return dw, grad.sum((0, 2, 3)) if bias else db
    tensors = {"x": x, "y": grad, "dw": dw}
    if bias:
        tensors["db"] = db
    backend_for(grad.device).run(problem, tensors)
    return dw, db


# ---- what fake tensors do: the same checks and allocation, no work. Their sizes may be symbols, so nothing is cached.


def _fake_fprop(x: Tensor, w: Tensor, bias: Tensor | None, *args: Args) -> Tensor:
    _check_tensors(x, "input", w, "weight", bias)
    bias_shape = None if bias is None else bias.shape
    return _empty(_fprop_layout(x.shape, x.stride(), w.shape, w.stride(), bias_shape, geometry_of(*args)), x)


def _fake_dgrad(grad: Tensor, w: Tensor, x_size: Shape, channels_last: bool, *args: Args) -> Tensor:
    _check_tensors(grad, "gradient", w, "weight")
    _check_gradient(grad.shape, x_size, w.shape, geometry_of(*args))
    return _empty((x_size, channels_last), grad)


def _fake_wgrad(
    grad: Tensor, x: Tensor, w_size: Shape, channels_last: bool, bias: bool, *args: Args
) -> tuple[Tensor, Tensor]:
    _check_tensors(grad, "gradient", x, "input")
    _check_gradient(grad.shape, x.shape, w_size, geometry_of(*args))
    return _empty((w_size, channels_last), grad), grad.new_empty(w_size[0] if bias else 0)


# ---- derivatives. Only what is asked for is computed.


def input_gradient(grad: Tensor, w: Tensor, x: Tensor, geometry: Args) -> Tensor:
    """Gradient of the input, in the memory format of the input."""
    return dgrad(grad, w, x.shape, suggests_channels_last(x.shape, x.stride()), *geometry)


def weight_gradient(grad: Tensor, x: Tensor, w: Tensor, bias: bool, geometry: Args) -> tuple[Tensor, Tensor]:
    """Gradients of the weight, in its memory format, and of the bias."""
    return wgrad(grad, x, w.shape, suggests_channels_last(w.shape, w.stride()), bias, *geometry)


# These are written out, and not left to torch.library.register_autograd, because an operator registered that way has a
# forward-mode derivative of zero, without a word. `apply` takes the dispatcher's key set, then the arguments of the
# operator. A gradient or tangent that is None is zero.

Gradients = tuple[Tensor | None, ...]


def _below_autograd(op: Any, keyset: Any, args: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)


def _autograd_kernel(function: Any, op: Any) -> Callable[..., Any]:
    """What the dispatcher calls where derivatives may be wanted: records the call only if they are."""

    def run(keyset: Any, *args: Any) -> Any:
        recorded = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args[:3])
        if recorded or forward_ad._current_level >= 0:
            return function.apply(keyset, *args)
        return _below_autograd(op, keyset, args)

    return run


def _save(ctx: Any, *tensors: Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


class _Fprop(torch.autograd.Function):
    @staticmethod
    def forward(keyset: Any, *args: Any) -> Any:
        return _below_autograd(fprop, keyset, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, x, w, _, *geometry = inputs
        ctx.geometry = geometry_of(*geometry)
        _save(ctx, x, w)

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


class _Dgrad(torch.autograd.Function):
    @staticmethod
    def forward(keyset: Any, *args: Any) -> Any:
        return _below_autograd(dgrad, keyset, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, grad, w, *ctx.rest = inputs
        _save(ctx, grad, w)

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


class _Wgrad(torch.autograd.Function):
    @staticmethod
    def forward(keyset: Any, *args: Any) -> Any:
        return _below_autograd(wgrad, keyset, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, grad, x, *ctx.rest = inputs
        _save(ctx, grad, x)

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


# ---- autocast: a convolution of polyconv computes in float32, whatever the region's dtype


def _register_autocast(name: str, op: Callable[..., Any], device_type: str, key: str) -> None:
    def up(value: Any) -> Any:
        cast = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(torch.float32) if cast else value

    def run(*args: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return op(*map(up, args))

    _library.impl(name, run, key)


def _register(name: str, op: Any, run: Any, fake: Any, function: Any) -> None:
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"polyconv::{name}", fake, lib=_library)
    _library.impl(name, _autograd_kernel(function, op), "Autograd", with_keyset=True)
    _register_autocast(name, op, "cpu", "AutocastCPU")
    _register_autocast(name, op, "cuda", "AutocastCUDA")


_register("conv2d_fprop", fprop, _run_fprop, _fake_fprop, _Fprop)
_register("conv2d_dgrad", dgrad, _run_dgrad, _fake_dgrad, _Dgrad)
_register("conv2d_wgrad", wgrad, _run_wgrad, _fake_wgrad, _Wgrad)
