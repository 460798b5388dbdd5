"""Convolutions whose kernel is as large as their stride, as in a patch embedding: one matrix product by PyTorch.

Patches do not overlap, so they are a rearrangement of the input, which is gathered once; where each image is one patch,
it is a view. The product is float32, and half precision is widened while it is gathered and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from math import prod

import torch
from torch import Tensor

from ....activation import Activation
from ....backend import Run
from ....lowering.epilogue import apply_epilogue
from ....numerics.prediction import HALF_ROUNDING, error_of, reduction_of, rounding_error
from ....problem import Pass, Problem
from ...device import CpuDevice
from ...plan import CpuCandidate
from ...weight_cache import TransformedWeights
from ..aten import half_products

NAME = "patches"

CALL_CYCLES, GATHERED_CYCLES, PRODUCT_CYCLES = 60e3, 20.0, 0.8
"""Cost of a call of several PyTorch operators; cycles per vector that is rearranged, and per vector of products."""

RUN_CYCLES, RUN_CYCLES_OF_SIGNALS = 40.0, 8.0
"""Per row of a patch and channel that is rearranged. Of patches of 2x2 they are nine tenths of the time."""

WEIGHT_CYCLES, DOUBT = 11.0, 1.15
"""Of a single patch, a matrix times a vector: cycles per vector of weights, and the required advantage over ATen, which
computes the same. A gradient is written, and counts twice."""

FORWARD_DOUBT = 1.25
"""The required advantage of a forward pass of images of several patches: where 1.09 to 1.22 were estimated, 0.89 to
1.07 were measured, with one thread and two. Gradients were faster than estimated."""

LEAST_PRODUCTS = 256
"""Least number of products per output: with fewer, rearranging takes as long as multiplying."""

FEW_PATCHES = 32
"""Patches of an image up to which all images are one product, whose result is rearranged; else a product each."""


def refusal(problem: Problem) -> str | None:
    if problem.groups != 1 or any(problem.padding) or max(problem.dilation) > 1:
        return "of convolutions without groups, padding and dilation"
    if problem.kernel != problem.stride:
        return "of kernels as large as their stride"
    if prod(problem.w_shape[1:]) < LEAST_PRODUCTS:
        return f"of sums of at least {LEAST_PRODUCTS} products"
    if max(problem.kernel) == 1 and prod(problem.out_size) > 1 and problem.dtype == "float32":
        return "of patches, not of single pixels"
    if problem.dtype not in ("float32", *HALF_ROUNDING):
        return f"computes in float32, not {problem.dtype}"
    if problem.dtype in HALF_ROUNDING and half_products(problem.dtype) < 1.0:
        return f"computes in float32, and this processor has faster instructions for {problem.dtype}"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate. PyTorch's order of summation is unknown: the error is that of one long sum."""
    cycles = partial(_cycles, problem, device.lanes)
    yield CpuCandidate.single(NAME, refusal(problem), cycles, partial(_error, problem), "matrix product")


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    return partial({Pass.FPROP: _fprop, Pass.DGRAD: _dgrad, Pass.WGRAD: _wgrad}[problem.kind], problem)


def _error(problem: Problem) -> float:
    return error_of(problem, None, reduction_of(problem), ()) + rounding_error(problem)


def _cycles(problem: Problem, lanes: int) -> float:
    moved = prod(problem.x_shape) + prod(problem.y_shape) + prod(problem.w_shape) * (problem.dtype != "float32")
    epilogue = (problem.residual + (problem.activation is not Activation.NONE)) * prod(problem.y_shape)
    products = (GATHERED_CYCLES * (moved + epilogue) + PRODUCT_CYCLES * problem.multiplications) / lanes
    if problem.in_size != problem.kernel or problem.x_strides[1] == 1:  # else a view
        by_run = RUN_CYCLES if min(problem.in_size) > 1 else RUN_CYCLES_OF_SIGNALS
        products += by_run * prod(problem.x_shape) / problem.kernel[-1]
    if problem.batch * prod(problem.out_size) > 1:
        doubt = FORWARD_DOUBT if problem.kind is Pass.FPROP and prod(problem.out_size) > 1 else 1.0
        return doubt * (CALL_CYCLES + products)
    weights = (2 if problem.kind is Pass.WGRAD else 1) * WEIGHT_CYCLES * prod(problem.w_shape) / lanes
    return DOUBT * (CALL_CYCLES + products + weights)


def _fprop(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    y, bias, residual = tensors["y"], tensors.get("bias"), tensors.get("residual")
    columns, count = prod(problem.w_shape[1:]), prod(problem.out_size)
    w = _columns(tensors["w"])
    patches, w = _rows(_patches(problem, tensors["x"], tensors["w"]), columns), _rows(w, columns)
    bias = None if bias is None else bias.float()
    if count > FEW_PATCHES and y.dtype == torch.float32 and y.is_contiguous():
        images, filters = patches.view(-1, count, columns).transpose(1, 2), w.expand(problem.batch, *w.shape)
        out = y.view(problem.batch, -1, count)
        if bias is None:
            torch.bmm(filters, images, out=out)
        else:
            torch.baddbmm(bias[:, None], filters, images, out=out)
        apply_epilogue(y, residual, problem.activation)
    else:
        product = torch.mm(patches, w.t()) if bias is None else torch.addmm(bias, patches, w.t())
        sums = product.view(problem.batch, *problem.out_size, -1).movedim(-1, 1)
        y.copy_(apply_epilogue(sums, residual, problem.activation))


def _dgrad(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    dx = tensors["x"]
    if any(extent % size for extent, size in zip(problem.in_size, problem.kernel, strict=True)):
        dx.zero_()  # pixels behind the last patch
    target, w = _patches(problem, dx, tensors["w"]), _columns(tensors["w"])
    dy = _rows(tensors["y"].movedim(1, -1), problem.out_channels)
    target.copy_(torch.mm(dy, _rows(w, prod(problem.w_shape[1:]))).view(target.shape))


def _wgrad(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    dy, dw = _rows(tensors["y"].transpose(0, 1), problem.batch * prod(problem.out_size)), tensors["dw"]
    patches, target = _rows(_patches(problem, tensors["x"], dw), prod(problem.w_shape[1:])), _columns(dw)
    if dw.dtype == torch.float32 and target.is_contiguous():
        torch.mm(dy, patches, out=target.view(dy.shape[0], -1))
    else:
        target.copy_(torch.mm(dy, patches).view(target.shape))
    if "db" in tensors:
        tensors["db"].copy_(dy.sum(1))


def _columns(w: Tensor) -> Tensor:
    """View of a weight with its terms in memory order: in channels_last the channels are last."""
    return w.movedim(1, -1) if _is_channels_last(w) else w


def _is_channels_last(w: Tensor) -> bool:
    return w.shape[1] > 1 and w.stride(1) == 1


def _patches(problem: Problem, x: Tensor, w: Tensor) -> Tensor:
    """View of an input as (image, patch, ..., channel, pixel, ...), without pixels behind the last patches; or with the
    channel behind the pixel, as in the columns of the weight."""
    for axis, (count, size) in enumerate(zip(problem.out_size, problem.kernel, strict=True)):
        x = x.narrow(2 + 2 * axis, 0, count * size).unflatten(2 + 2 * axis, (count, size))
    pixels = range(3, x.dim(), 2)
    return x.permute(0, *range(2, x.dim(), 2), *((*pixels, 1) if _is_channels_last(w) else (1, *pixels)))


def _rows(tensor: Tensor, columns: int) -> Tensor:
    """Matrix of float32 with a row per filter or per patch; a view if that is possible."""
    if tensor.dtype != torch.float32:
        tensor = tensor.to(torch.float32, memory_format=torch.contiguous_format)
    return tensor.reshape(-1, columns)
