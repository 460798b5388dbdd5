"""ATen's convolution as an engine: where it is the fastest known, and where polyconv has no kernel.

It is a candidate like any other. What it cannot express (unequal padding, cropping, a padding mode) needs a padded
copy, which polyconv's kernels avoid.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import partial
from math import prod, sqrt
from typing import NamedTuple

import torch

from ...activation import Activation
from ...backend import Run
from ...lowering.aten import run, takes_tensors
from ...numerics.prediction import HALF_ROUNDING, LARGEST_TO_SCALE, error_of, reduction_of
from ...problem import ELEMENT_BYTES, PaddingMode, Pass, Problem
from ...util.intmath import ceil_div
from .. import native
from ..device import CpuDevice
from ..plan import CpuCandidate
from ..weight_cache import TransformedWeights

__all__ = ["candidates", "prepare", "run", "takes_tensors"]

NAME = "ATen"

_LARGEST_OF_SUMS = 4
"""Largest accumulation error per square root of a term, in unit roundoffs times the output's scale: a result of 3.5
times the scale, with 3.5 standard deviations of its roundings."""
_ASKED_OF_ONEDNN = {"float16": "_is_mkldnn_fp16_supported", "bfloat16": "_is_mkldnn_bf16_supported"}


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate, for any problem. Its summation order is unknown: the error is that of one long sum."""
    padded = "" if problem.has_aten_padding else " on a padded copy"
    apart = _applied_apart(problem)
    yield CpuCandidate(
        NAME,
        f"PyTorch's convolution{padded}" + (f", {' and '.join(apart)} not fused" if apart else ""),
        direct=True,
        cycles=direct_cycles(problem, device) + len(apart) * _pass_cycles(problem, device),
        error=partial(_error, problem),
        refusal=_why_not_in_half(problem) if problem.dtype in HALF_ROUNDING and native.takes(problem) else None,
    )


def _why_not_in_half(problem: Problem) -> str | None:
    """Refusal of a half-precision problem for which ATen has only its reference path on this processor, or whose oneDNN
    kernel may be wrong: with AMX, NaNs in memory beside the tensors were found to reach the result."""
    dtype = problem.dtype
    if not _runs_in_onednn(dtype):
        return f"this processor has no instructions for PyTorch's {dtype} kernels: its reference path would run"
    reach = (problem.kernel[-1] - 1) * problem.dilation[-1] + 1
    if dtype == "bfloat16" and problem.stride[-1] > 1 and any(problem.padding[-2:]) and reach >= problem.in_size[-1]:
        return "oneDNN's bfloat16 kernels may read beyond padded rows that are no longer than a strided kernel"
    return None


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    return partial(run, problem)


def _error(problem: Problem) -> float:
    return error_of(problem, None, reduction_of(problem), ()) + _half_error(problem)


def _half_error(problem: Problem) -> float:
    """Error added by half precision: one rounding of the result, and those of partial sums.

    A sum of n terms in half precision is rounded n - 1 times before the last, each time in proportion to the partial
    sum. These roundings are random. The worst case is a large result with large roundings, not the largest result with
    the worst roundings of all.
    """
    if problem.dtype not in HALF_ROUNDING:
        return 0.0
    on_the_way = _LARGEST_OF_SUMS * sqrt(_terms_in_half(problem) - 1)
    return HALF_ROUNDING[problem.dtype] * (LARGEST_TO_SCALE + on_the_way)


def _terms_in_half(problem: Problem) -> int:
    """Number of half-precision values that ATen adds to one result, rounding each partial sum.

    One in oneDNN. On a processor without the instructions that oneDNN needs for the dtype, ATen multiplies matrices and
    accumulates the input gradient tap by tap, the weight gradient image by image. On ARM64 it adds the products
    themselves in float16. Unfused steps add terms: the residual, the activation, the copies of a pixel in a border.
    """
    terms = 1
    if not _runs_in_onednn(problem.dtype):
        terms = {Pass.FPROP: 1, Pass.DGRAD: prod(problem.kernel), Pass.WGRAD: problem.batch}[problem.kind]
    if adds_in_float16(problem.dtype):
        terms = max(terms, reduction_of(problem))
    if problem.kind is Pass.DGRAD and any(problem.padding) and problem.padding_mode is not PaddingMode.ZEROS:
        terms += 3
    return terms + len(_applied_apart(problem))


def adds_in_float16(dtype: str) -> bool:
    """True if ATen adds products in float16, as on ARM64. Elsewhere it adds them in float32."""
    return dtype == "float16" and instruction_set() == "neon"


def half_products(dtype: str) -> float:
    """Time of a half-precision product over that of a float32 product in oneDNN. Without instructions that multiply the
    dtype's values it converts the operands of each product; AVX512_FP16 has some, which took 1.4 to 2.2 times as long
    as float32's. Products by AVX512_BF16 without AMX were not measured."""
    if dtype == "float16":
        return 0.2 if has_instructions("_is_amx_fp16_supported") else 2.0
    if has_instructions("_is_amx_tile_supported"):
        return 0.2
    return 0.6 if has_instructions("_is_avx512_bf16_supported") else 3.0


def has_instructions(asked: str) -> bool:
    """Answer of a query in ``torch.cpu``; False where this torch does not have it."""
    supported = getattr(torch.cpu, asked, None)
    return bool(supported and supported())


def _runs_in_onednn(dtype: str) -> bool:
    """True if ATen runs a half-precision dtype in oneDNN on this processor."""
    supported = getattr(torch.ops.mkldnn, _ASKED_OF_ONEDNN[dtype], None)
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled() and bool(supported and supported())


def instruction_set() -> str:
    """ATen's instruction set on this processor, by the native kernels' name for it."""
    capability = torch.backends.cpu.get_cpu_capability()
    baseline = "neon" if platform.machine() in ("aarch64", "arm64") else "sse4"
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(capability, baseline)


def why_alone(problem: Problem) -> str:
    """Why no native kernel can run a problem."""
    if problem.dtype not in ELEMENT_BYTES:
        return f"polyconv has no CPU kernels for {problem.dtype}"
    if native.is_available() and not native.takes(problem):
        return f"polyconv's CPU kernels take extents of at most {native.LARGEST_EXTENT}"
    return native.why_absent() or "nothing else can run it"


def _applied_apart(problem: Problem) -> list[str]:
    """Unfused epilogue operations, each a pass over the stored output."""
    if problem.kind is not Pass.FPROP:
        return []
    activation = [] if problem.activation is Activation.NONE else [str(problem.activation)]
    return (["residual"] if problem.residual else []) + activation


def _pass_cycles(problem: Problem, device: CpuDevice) -> float:
    """Estimated cycles of one core to read and write the output once more."""
    return 10.0 * prod(problem.y_shape) / device.lanes


class _Spent(NamedTuple):
    """Cost coefficients [cycles of one core]."""

    call: float
    product: float
    """Per vector of products."""
    moved: float
    """Per vector of input and output, which are reordered."""
    weight: float
    """Per vector of weights, which are reordered and, in a weight gradient, summed over images and threads."""


_SPENT: dict[str, dict[Pass, tuple[_Spent, _Spent]]] = {
    "depthwise": {
        Pass.FPROP: (_Spent(310e3, 1.2, 35, 0), _Spent(235e3, 1.2, 13, 0)),
        Pass.DGRAD: (_Spent(295e3, 0.9, 44, 0), _Spent(215e3, 0.84, 21, 0)),
        Pass.WGRAD: (_Spent(225e3, 14.7, 8, 2200), _Spent(230e3, 1.0, 41, 1300)),
    },
    "depthwise volumes": {
        Pass.FPROP: (_Spent(310e3, 5.0, 35, 0), _Spent(235e3, 1.2, 13, 0)),
        Pass.DGRAD: (_Spent(295e3, 60.0, 44, 0), _Spent(215e3, 0.84, 21, 0)),
        Pass.WGRAD: (_Spent(225e3, 14.7, 8, 2200), _Spent(230e3, 1.0, 41, 1300)),
    },
    "grouped": {
        Pass.FPROP: (_Spent(570e3, 0.43, 40, 52), _Spent(745e3, 0.3, 35, 32)),
        Pass.DGRAD: (_Spent(485e3, 0.35, 54, 62), _Spent(730e3, 0.3, 40, 39)),
        Pass.WGRAD: (_Spent(940e3, 0.46, 45, 30), _Spent(930e3, 0.32, 53, 91)),
    },
    "single taps": {
        Pass.FPROP: (_Spent(46e3, 0.56, 11, 28), _Spent(70e3, 0.61, 11, 11)),
        Pass.DGRAD: (_Spent(89e3, 0.61, 24, 51), _Spent(77e3, 0.6, 21, 10)),
        Pass.WGRAD: (_Spent(94e3, 0.48, 19, 49), _Spent(94e3, 0.58, 7, 47)),
    },
    "few channels": {
        Pass.FPROP: (_Spent(82e3, 0.97, 19, 0), _Spent(68e3, 0.78, 10, 120)),
        Pass.DGRAD: (_Spent(82e3, 0.97, 19, 0), _Spent(68e3, 0.78, 10, 120)),
        Pass.WGRAD: (_Spent(165e3, 0.9, 17, 100), _Spent(94e3, 1.05, 7, 765)),
    },
    "others": {
        Pass.FPROP: (_Spent(290e3, 0.47, 64, 44), _Spent(280e3, 0.46, 20, 41)),
        Pass.DGRAD: (_Spent(180e3, 0.39, 120, 55), _Spent(245e3, 0.44, 35, 55)),
        Pass.WGRAD: (_Spent(235e3, 0.6, 45, 75), _Spent(90e3, 0.6, 36, 100)),
    },
}
"""For NCHW and channels_last. Fitted to some three thousand layers of real networks on a machine with AVX-512 and torch
2.13.0. Measured layers deviate by a factor of 1.3 to 1.8, depthwise weight gradients by 2.5. Of depthwise volumes two
layers were measured, in NCHW; the estimate is below both."""


class _Columns(NamedTuple):
    """The same for im2col, or its inverse, and a matrix product."""

    call: float
    product: float
    """Per vector of products."""
    moved: float
    """Per element of the columns."""
    strided: float
    """The same where a stride picks elements of a row."""
    weight: float
    """Per vector of weights: read from beyond the caches in a network, from the caches in a loop."""


_COLUMNS: dict[Pass, tuple[_Columns, _Columns]] = {
    Pass.FPROP: (_Columns(21e3, 0.7, 0.4, 6.0, 15), _Columns(21e3, 0.7, 0.1, 0.1, 8)),
    Pass.DGRAD: (_Columns(23e3, 0.7, 4.0, 5.0, 13), _Columns(22e3, 0.7, 0.8, 0.8, 6)),
    Pass.WGRAD: (_Columns(50e3, 0.7, 0.7, 6.0, 35), _Columns(45e3, 0.7, 0.1, 0.1, 25)),
}
"""For NCHW and channels_last. Fitted to a thousand layers of one image, of which a half take less than 20 us; the input
gradient to forward passes of transposed convolutions, whose calls cost half of a backward's. Eight in ten estimates are
0.75 to 1.6 times the time."""

LEAST_HALF_CALL = 175e3, 120e3
"""Least cost of a call in half precision, for NCHW and channels_last, per core: the others wait. It always runs
oneDNN, whose calls took 57 to 85 us and 45 to 60 us where float32 has a matrix product of 10 to 20 us (small layers,
forward, one thread, Xeon of family 6, model 207)."""

RUN_CYCLES, ROWS_CYCLES = 20.0, 7.0
"""Cycles per run of the columns (a row of one channel and tap; in channels_last the channels of a pixel and tap), and
per vector of the product's result."""


def direct_cycles(problem: Problem, device: CpuDevice) -> float:
    """Estimated cycles of one core for ATen's kernels on the given strides. They skip taps in the padding (most taps,
    if the dilation is as long as the image), except in the weight gradient."""
    if _lays_out_columns(problem, device):
        return _columns_cycles(problem, device)
    c, k = problem.channels_per_group
    if problem.kind is Pass.DGRAD:
        c, k = k, c
    channels_last = problem.x_strides[1] == 1 and problem.y_strides[1] == 1
    spent = _SPENT[_kind(problem)][problem.kind][channels_last]
    pairs = problem.groups * c * ceil_div(k, device.lanes)
    if problem.depthwise:  # channels of many groups share a vector
        pairs = ceil_div(problem.groups, device.lanes) * max(c, k)
    long = problem.kind is Pass.FPROP and problem.x_strides[1] != 1 and max(problem.dilation) > 6
    products = problem.batch * _taps_met(problem) * pairs * (2.0 if long else 1.0)
    if problem.dtype in HALF_ROUNDING and not problem.depthwise:
        products *= half_products(problem.dtype)
    call = spent.call
    if problem.dtype in HALF_ROUNDING:
        call = max(call, device.cores * LEAST_HALF_CALL[channels_last])
    moved = (prod(problem.x_shape) + prod(problem.y_shape)) / device.lanes
    weights = prod(problem.w_shape) / device.lanes
    return call + spent.product * products + spent.moved * moved + spent.weight * weights


def narrow_gradient_doubt(problem: Problem) -> float:
    """Factor by which :func:`direct_cycles` may be too large where no profile tells: for input gradients of few
    channels from many, which ATen computes as a matrix product, and the estimate in vectors that are mostly empty."""
    c, k = problem.channels_per_group
    return min(8.0, max(1.0, k / c)) if problem.kind is Pass.DGRAD else 1.0


def _lays_out_columns(problem: Problem, device: CpuDevice) -> bool:
    """True if ATen computes a convolution by im2col and a matrix product instead of oneDNN: ATen's rule
    (``use_mkldnn``), whose size limit leaves out the width of a volume. Single taps over two axes are estimated with
    the others of their kind."""
    if problem.groups > 1 or problem.dtype != "float32" or (problem.rank == 2 and max(problem.kernel) == 1):
        return False
    last = problem.kernel[-2:]
    moved = max(problem.stride) > 1 or max(problem.dilation) > 1
    if max(last) == 1 and not moved and problem.batch < 16 and device.cores == 1:
        return True
    largest = prod(problem.x_shape[:4])
    if problem.kind is Pass.DGRAD:  # does not show whether ATen tests the gradient or, transposed, the input
        largest = max(largest, prod(problem.y_shape[:4]))
    return problem.batch == 1 and largest <= 20480 and min(last) <= 3


def _columns_cycles(problem: Problem, device: CpuDevice) -> float:
    """Estimated cycles of one core for im2col, which single taps do not need, and a matrix product."""
    channels_last = problem.x_strides[1] == 1 and problem.y_strides[1] == 1
    spent = _COLUMNS[problem.kind][channels_last]
    products = problem.multiplications / device.lanes
    moved = 0.0
    if max(problem.kernel) > 1:
        elements = problem.multiplications / problem.out_channels
        run = problem.in_channels if channels_last else problem.out_size[-1]
        moved = elements * (RUN_CYCLES / run + (spent.strided if problem.stride[-1] > 1 else spent.moved))
    rows, weights = prod(problem.y_shape) / device.lanes, prod(problem.w_shape) / device.lanes
    return spent.call + spent.product * products + moved + ROWS_CYCLES * rows + spent.weight * weights


def _kind(problem: Problem) -> str:
    if problem.groups > 1:
        depthwise = "depthwise volumes" if problem.rank == 3 else "depthwise"
        return depthwise if problem.depthwise else "grouped"
    if max(problem.kernel) == 1:
        return "single taps"
    return "few channels" if min(problem.channels_per_group) < 16 else "others"


def _taps_met(problem: Problem) -> float:
    """Products per image and pair of channels."""
    met = 1.0
    for axis in range(problem.rank):
        extent, pad, d = problem.in_size[axis], problem.padding[2 * axis], problem.dilation[axis]
        out, stride = problem.out_size[axis], problem.stride[axis]
        if problem.kind is Pass.WGRAD:
            met *= out * problem.kernel[axis]
            continue
        reached = [
            min(out, ceil_div(extent + pad - i * d, stride)) - max(0, ceil_div(pad - i * d, stride))
            for i in range(problem.kernel[axis])
        ]
        met *= sum(max(0, count) for count in reached)
    return met
