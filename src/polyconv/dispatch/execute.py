"""Operators on real tensors: allocate the outputs and run the backend. Empty tensors never reach a backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..arguments import CHANNELS_LAST, Geometry
from ..cpu import native
from ..lowering.epilogue import apply_epilogue, per_channel, summed_per_channel, with_bias
from ..runtime.frozen_weights import frozen_marks
from .extreme_geometry_run import reduced_dgrad, reduced_fprop, reduced_wgrad
from .operands import (
    Layout,
    Shape,
    check_residual,
    check_tensors,
    dense_strides,
    described,
    dgrad_problem,
    empty,
    fprop_problem,
    geometry_of,
    wgrad_problem,
)
from .prepare import SMALLEST_POOLED, Call, recall
from .schema import Args, split_bias, split_epilogue


def _allocate(layout: Layout, like: Tensor) -> Tensor:
    """Allocate an uninitialised output. Large float32 outputs on the CPU come from the output pool."""
    shape, _ = layout
    if prod(shape) * 4 >= SMALLEST_POOLED and like.is_cpu and like.dtype == torch.float32 and native.is_available():
        return native.empty_output(like, shape, dense_strides(*layout))
    return empty(layout, like)


class _Training(threading.local):
    now = False


_training = _Training()


@contextmanager
def training() -> Iterator[None]:
    """Scope of this thread in which forward passes are training. Autograd functions run with grad mode off."""
    before = _training.now
    _training.now = True
    try:
        yield
    finally:
        _training.now = before


def is_training() -> bool:
    return _training.now


def run_fprop(x: Tensor, w: Tensor, bias: Tensor | None, *args: Args) -> Tensor:
    settled, residual, activation = split_epilogue(*args)
    check_tensors(x, "input", w, "weight", bias, residual)
    inference = not is_training()
    # Compiled graphs come here and may allocate in a CUDA graph's memory pool, where no cached weight may be kept.
    frozen = inference and id(w) in frozen_marks and not x.is_cuda
    description = describe_fprop(x, w, bias, residual, activation, frozen, geometry_of(*settled))
    call = recall(fprop_problem, description, x.device, inference=inference)
    if residual is not None:
        check_residual(residual, call.layout[0])
    return compute_fprop(call, x, w, bias, residual)


def describe_fprop(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    frozen: bool,
    geometry: Geometry,
) -> tuple[Any, ...]:
    """Arguments of :func:`fprop_problem`."""
    address = x.data_ptr() | (0 if residual is None else residual.data_ptr())
    bias_shape = None if bias is None else bias.shape
    how = bias_shape, residual is not None, activation, frozen, x.dtype, not address & 15
    return described(x), described(w), *how, geometry


def compute_fprop(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Run a forward pass on tensors that match ``call``."""
    if call.run is None:
        return _compute_without_run(call, x, w, bias, residual)
    y = x.new_empty_strided(*call.dense) if call.dense is not None else _allocate(call.layout, x)
    tensors = {"x": x, "w": w, "y": y}
    if bias is not None:
        tensors["bias"] = bias.contiguous()  # the only input whose strides are not part of the problem
    if residual is not None:
        # Kernels read the residual at the offsets of the output, so it needs the output's layout. No copy if it has it.
        last = call.layout[1]
        tensors["residual"] = residual.contiguous(
            memory_format=CHANNELS_LAST[residual.dim()] if last else torch.contiguous_format
        )
    call.run(tensors)
    return tensors["y"]


def _compute_without_run(call: Call, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Forward pass of a call without ``run``: an empty sum, or extreme geometry, which runs on parts of the tensors."""
    activation, reduction = call.problem.activation, call.reduction
    if reduction is None:  # no input channels or no images: the output is bias and epilogue
        return apply_epilogue(with_bias(_allocate(call.layout, x), bias), residual, activation)

    def run(x: Tensor, w: Tensor, residual: Tensor | None) -> Tensor:
        with nullcontext() if call.inference else training():
            return run_fprop(x, w, bias, *reduction.geometry, residual, activation.value)

    y = reduced_fprop(reduction, run, lambda: _allocate(call.layout, x), x, w, bias, residual, activation)
    return _laid_out(y, call.layout)


def _laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    """Copy ``tensor`` into ``layout`` if it has another: parts may suggest another memory format than the whole."""
    return tensor if tensor.stride() == dense_strides(*layout) else _allocate(layout, tensor).copy_(tensor)


def run_dgrad(grad: Tensor, w: Tensor, x_size: Shape, channels_last: bool, *args: Args) -> Tensor:
    settled, bias = split_bias(*args)
    check_tensors(grad, "gradient", w, "weight", bias)
    description = describe_dgrad(grad, w, (tuple(x_size), channels_last), bias, geometry_of(*settled))
    return compute_dgrad(recall(dgrad_problem, description, grad.device), grad, w, bias)


def describe_dgrad(grad: Tensor, w: Tensor, layout: Layout, bias: Tensor | None, geometry: Geometry) -> tuple[Any, ...]:
    """Arguments of :func:`dgrad_problem`."""
    bias_shape = None if bias is None else bias.shape
    return described(grad), described(w), layout, bias_shape, grad.dtype, not grad.data_ptr() & 15, geometry


def compute_dgrad(call: Call, grad: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Run an input gradient on tensors that match ``call``, then add ``bias`` in place."""
    dx = _compute_dgrad(call, grad, w)
    return dx if bias is None else dx.add_(per_channel(bias, dx.dim()))


def _compute_dgrad(call: Call, grad: Tensor, w: Tensor) -> Tensor:
    if call.reduction is not None:
        geometry, (x_size, channels_last) = call.reduction.geometry, call.layout
        dx = reduced_dgrad(
            call.reduction, lambda dy, w, size: run_dgrad(dy, w, size, channels_last, *geometry), grad, w, x_size
        )
        return _laid_out(dx, call.layout)
    dx = grad.new_empty_strided(*call.dense) if call.dense is not None else _allocate(call.layout, grad)
    if call.run is None:
        return dx
    tensors = {"y": grad, "w": w, "x": dx}
    call.run(tensors)
    return tensors["x"]


def run_wgrad(
    grad: Tensor, x: Tensor, w_size: Shape, channels_last: bool, bias: bool, *args: Args
) -> tuple[Tensor, Tensor]:
    check_tensors(grad, "gradient", x, "input")
    description = describe_wgrad(grad, x, (tuple(w_size), channels_last), bias, geometry_of(*args))
    return compute_wgrad(recall(wgrad_problem, description, grad.device), grad, x)


def describe_wgrad(grad: Tensor, x: Tensor, layout: Layout, bias: bool, geometry: Geometry) -> tuple[Any, ...]:
    """Arguments of :func:`wgrad_problem`."""
    aligned = not (grad.data_ptr() | x.data_ptr()) & 15
    return described(grad), described(x), layout, bias, grad.dtype, aligned, geometry


def compute_wgrad(call: Call, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Run a weight gradient on tensors that match ``call``. The bias gradient is empty if the problem has no bias."""
    bias, (w_size, channels_last) = call.problem.bias, call.layout
    dw, db = empty(call.layout, grad), grad.new_empty(w_size[0] if bias else 0)
    if call.run is not None:
        call.run({"x": x, "y": grad, "dw": dw} | ({"db": db} if bias else {}))
        return dw, db
    if grad.numel() == 0:
        return dw.zero_(), db.zero_()
    if call.reduction is None or dw.numel() == 0:  # no input channels: only the bias has a gradient
        return dw, summed_per_channel(grad) if bias else db
    geometry = call.reduction.geometry
    return reduced_wgrad(
        call.reduction,
        lambda dy, x, size, bias: run_wgrad(dy, x, size, channels_last, bias, *geometry),
        grad,
        x,
        dw,
        db,
    )
