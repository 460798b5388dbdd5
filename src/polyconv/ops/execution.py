"""What runs on real tensors. An empty tensor never reaches a backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import prod

import torch
from torch import Tensor

from ..arguments import Geometry
from ..cpu import native
from ..epilogue import apply_epilogue
from ..reduction import Reduction
from .calls import SMALLEST_POOLED, Call, prepare_dgrad, prepare_fprop, prepare_fused, prepare_wgrad
from .layouts import Layout, Shape, check_residual, check_tensors, empty, geometry_of
from .problems import dense_strides
from .reduced import reduced_dgrad, reduced_fprop, reduced_wgrad, with_bias
from .schema import Args


def _allocate(layout: Layout, like: Tensor) -> Tensor:
    """A new tensor that will be computed: a large one on the CPU may come from memory that was used before."""
    shape, channels_last = layout
    if prod(shape) * 4 >= SMALLEST_POOLED and like.is_cpu and like.dtype == torch.float32 and native.is_available():
        if not channels_last:
            return native.empty_output(like, shape)
        n, c, h, w = shape
        return native.empty_output(like, (n, h, w, c)).permute(0, 3, 1, 2)
    return empty(layout, like)


def run_fprop(x: Tensor, w: Tensor, bias: Tensor | None, *args: Args) -> Tensor:
    check_tensors(x, "input", w, "weight", bias)
    call = call_of_fprop(x, w, bias, geometry_of(*args), inference=not _training.now)
    return compute_fprop(call, x, w, bias)


class _Training(threading.local):
    now = False


_training = _Training()


@contextmanager
def training() -> Iterator[None]:
    """Inside, a forward pass is part of training. Grad mode does not tell: autograd turns it off in its functions."""
    before = _training.now
    _training.now = True
    try:
        yield
    finally:
        _training.now = before


def call_of_fprop(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry, *, inference: bool) -> Call:
    """What all forward passes on such tensors share."""
    bias_shape = None if bias is None else bias.shape
    aligned = not x.data_ptr() & 15
    return prepare_fprop(
        (x.shape, x.stride()), (w.shape, w.stride()), bias_shape, x.dtype, aligned, inference, geometry
    )


def run_fused(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, *args: Args
) -> Tensor:
    check_tensors(x, "input", w, "weight", bias)
    aligned = not (x.data_ptr() | (0 if residual is None else residual.data_ptr())) & 15
    call = prepare_fused(
        (x.shape, x.stride()),
        (w.shape, w.stride()),
        None if bias is None else bias.shape,
        residual is not None,
        activation,
        x.dtype,
        aligned,
        not _training.now,
        geometry_of(*args),
    )
    if residual is not None:
        shape, channels_last = call.layout
        check_residual(residual, x, shape)
        # Kernels find an element of the residual where its sum is stored. One that lies so already is not copied.
        residual = residual.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    return compute_fprop(call, x, w, bias, residual)


def compute_fprop(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """The output, for tensors that fit the call."""
    if call.small:
        y = x.new_empty(call.layout[0])
    elif call.reduction is not None:
        return _compute_reduced(call, call.reduction, x, w, bias, residual)
    else:
        y = _allocate(call.layout, x)
        if x.numel() == 0 or y.numel() == 0:  # without input channels: a sum of nothing, and the bias
            return apply_epilogue(with_bias(y, bias), residual, call.problem.activation)
    tensors = {"x": x, "w": w, "y": y}
    if bias is not None:
        tensors["bias"] = bias.contiguous()  # one number per channel: the only input without strides of its own
    if residual is not None:
        tensors["residual"] = residual
    call.run(x.device, tensors)
    return tensors["y"]


def _compute_reduced(
    call: Call, reduction: Reduction, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """The same for extreme geometry: by a call of ordinary geometry on parts of the tensors."""
    activation = call.problem.activation

    def run(x: Tensor, w: Tensor, residual: Tensor | None) -> Tensor:
        with nullcontext() if call.inference else training():
            return run_fused(x, w, bias, residual, activation.value, *reduction.geometry)

    y = reduced_fprop(reduction, run, lambda: _allocate(call.layout, x), x, w, bias, residual, activation)
    return _laid_out(y, call.layout)


def _laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """A result of parts, which may suggest another layout than the whole."""
    return tensor if tensor.stride() == dense_strides(*layout) else _allocate(layout, tensor).copy_(tensor)


def run_dgrad(grad: Tensor, w: Tensor, x_size: Shape, channels_last: bool, *args: Args) -> Tensor:
    check_tensors(grad, "gradient", w, "weight")
    layout = (tuple(x_size), channels_last)
    call = prepare_dgrad(
        (grad.shape, grad.stride()),
        (w.shape, w.stride()),
        layout,
        grad.dtype,
        not grad.data_ptr() & 15,
        geometry_of(*args),
    )
    if call.reduction is not None:
        geometry = call.reduction.geometry
        dx = reduced_dgrad(
            call.reduction, lambda dy, w, size: run_dgrad(dy, w, size, channels_last, *geometry), grad, w, x_size
        )
        return _laid_out(dx, layout)
    dx = _allocate(layout, grad)
    if dx.numel() == 0:
        return dx
    tensors = {"y": grad, "w": w, "x": dx}
    call.run(grad.device, tensors)
    return tensors["x"]


def run_wgrad(
    grad: Tensor, x: Tensor, w_size: Shape, channels_last: bool, bias: bool, *args: Args
) -> tuple[Tensor, Tensor]:
    check_tensors(grad, "gradient", x, "input")
    layout = (tuple(w_size), channels_last)
    call = prepare_wgrad(
        (grad.shape, grad.stride()),
        (x.shape, x.stride()),
        layout,
        bias,
        grad.dtype,
        not (grad.data_ptr() | x.data_ptr()) & 15,
        geometry_of(*args),
    )
    dw, db = empty(layout, grad), grad.new_empty(w_size[0] if bias else 0)
    if grad.numel() == 0:
        return dw.zero_(), db.zero_()
    if dw.numel() == 0:  # without input channels: only the bias has a gradient
        return dw, grad.sum((0, 2, 3)) if bias else db
    if call.reduction is not None:
        geometry = call.reduction.geometry
        return reduced_wgrad(
            call.reduction,
            lambda dy, x, size, bias: run_wgrad(dy, x, size, channels_last, bias, *geometry),
            grad,
            x,
            dw,
            db,
        )
    tensors = {"x": x, "y": grad, "dw": dw}
    if bias:
        tensors["db"] = db
    call.run(grad.device, tensors)
    return dw, db
