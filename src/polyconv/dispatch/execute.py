"""Operators on real tensors: allocate the outputs and run the prepared call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..arguments import CHANNELS_LAST, Geometry
from ..lowering.epilogue import per_channel
from ..runtime.frozen_weights import frozen_marks
from .operands import (
    HALF,
    Layout,
    Shape,
    check_residual,
    check_tensors,
    described,
    dgrad_problem,
    empty,
    fprop_problem,
    geometry_of,
    wgrad_problem,
)
from .prepare import Call, recall
from .schema import Args, split_bias, split_epilogue


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
    y = x.new_empty_strided(*call.dense) if call.dense is not None else call.new_output(x)
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


def run_dgrad(grad: Tensor, w: Tensor, x_size: Shape, channels_last: bool, *args: Args) -> Tensor:
    settled, bias = split_bias(*args)
    check_tensors(grad, "gradient", w, "weight", bias)
    description = describe_dgrad(grad, w, (tuple(x_size), channels_last), bias, geometry_of(*settled))
    return compute_dgrad(recall(dgrad_problem, description, grad.device), grad, w, bias)


def describe_dgrad(grad: Tensor, w: Tensor, layout: Layout, bias: Tensor | None, geometry: Geometry) -> tuple[Any, ...]:
    """Arguments of :func:`dgrad_problem`."""
    bias_shape = None if bias is None else bias.shape
    return described(grad), described(w), layout, bias_shape, grad.dtype, not grad.data_ptr() & 15, geometry


def compute_dgrad(call: Call, grad: Tensor, w: Tensor, bias: Tensor | None, residual: None = None) -> Tensor:
    """Run an input gradient on tensors that match ``call``, then add ``bias`` in place. A half-precision run may add it
    before the rounding, and then removes it from the tensors."""
    dx = grad.new_empty_strided(*call.dense) if call.dense is not None else call.new_output(grad)
    tensors = {"y": grad, "w": w, "x": dx}
    if bias is not None and grad.dtype in HALF:
        tensors["bias"] = bias.contiguous()
    call.run(tensors)
    dx = tensors["x"]
    if bias is None or (grad.dtype in HALF and "bias" not in tensors):
        return dx
    return dx.add_(per_channel(bias, dx.dim()))


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
    bias = call.problem.bias
    dw, db = empty(call.layout, grad), grad.new_empty(call.layout[0][0] if bias else 0)
    call.run({"x": x, "y": grad, "dw": dw} | ({"db": db} if bias else {}))
    return dw, db
