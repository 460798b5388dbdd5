"""Depthwise convolutions of volumes (``csrc/cpu/depthwise``): each output slice sums over all taps in one pass.

The 2-D kernels can sum over several channels, here neighbouring slices of one channel, which are views. A sum of 2-D
problems (:mod:`.volumes`) reads and writes the output once per tap along the depth instead.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from itertools import groupby
from math import prod
from typing import NamedTuple

from torch import Tensor

from ...activation import Activation
from ...backend import Run
from ...lowering.border import has_border
from ...lowering.epilogue import apply_epilogue, per_channel
from ...numerics.prediction import error_of, reduction_of
from ...problem import Pass, Problem
from .. import native
from ..device import CpuDevice
from ..plan import CpuCandidate
from ..weight_cache import TransformedWeights

NAME = "depthwise volumes"

CALL_CYCLES, MOVED_CYCLES, PRODUCT_CYCLES = 40e3, 20.0, 1.2
"""Cost of a call; cycles per vector that is packed or written, and per vector of products."""

DOUBT = 1.1
"""Required advantage over other estimates: no profile has measurements of this engine."""


class _Slices(NamedTuple):
    """Consecutive output slices that meet the same taps along the depth."""

    first: int
    length: int
    tap: int
    taps: int


def refusal(problem: Problem) -> str | None:
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    if not problem.depthwise or problem.out_channels != problem.in_channels:
        return "of depthwise convolutions, one output channel per input channel"
    if problem.kind is Pass.WGRAD or (problem.kind is Pass.DGRAD and max(problem.stride) > 1):
        return "computes outputs, and input gradients without a stride"
    if has_border(problem) or min(_padding(problem)) < 0:
        return "of zeros around the volume"
    if problem.x_strides[-1] != 1 or problem.y_strides[-1] != 1:
        return "of contiguous rows"
    if not all(some.taps for some in _slices(problem)):
        return "of output slices that meet the input"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate."""
    error = partial(error_of, problem, None, reduction_of(problem), ())
    yield CpuCandidate.single(NAME, refusal(problem), lambda: DOUBT * _cycles(problem, device.lanes), error)


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    return partial(_run, problem, _slices(problem))


def _padding(problem: Problem) -> tuple[int, ...]:
    """Zeros before the input of each axis; in an input gradient, before the gradient of the output."""
    before = problem.padding[::2]
    if problem.kind is Pass.FPROP:
        return before
    axes = zip(problem.kernel, problem.dilation, before, strict=True)
    return tuple((kernel - 1) * dilation - pad for kernel, dilation, pad in axes)


def _slices(problem: Problem) -> tuple[_Slices, ...]:
    sizes = problem.in_size[0], problem.out_size[0]
    read, written = sizes if problem.kind is Pass.FPROP else sizes[::-1]
    before, stride, dilation = _padding(problem)[0], problem.stride[0], problem.dilation[0]

    def taps_of(output: int) -> tuple[int, int]:
        first = output * stride - before
        met = [tap for tap in range(problem.kernel[0]) if 0 <= first + tap * dilation < read]
        return (met[0], len(met)) if met else (0, 0)

    return tuple(
        _Slices(places[0], len(places), *taps)
        for taps, group in groupby(range(written), taps_of)
        for places in [list(group)]
    )


def _cycles(problem: Problem, lanes: int) -> float:
    calls = problem.batch * len(_slices(problem))
    moved = problem.kernel[0] * prod(problem.x_shape) + prod(problem.y_shape)
    return CALL_CYCLES * calls + (MOVED_CYCLES * moved + PRODUCT_CYCLES * problem.multiplications) / lanes


def _run(problem: Problem, slices: tuple[_Slices, ...], tensors: MutableMapping[str, Tensor]) -> None:
    forward = problem.kind is Pass.FPROP
    given, y = (tensors["x"], tensors["y"]) if forward else (tensors["y"], tensors["x"])
    (x, x_exponent), (w, w_exponent) = native.normalised(given), native.normalised(tensors["w"])
    exponent, bias = -x_exponent - w_exponent, tensors.get("bias")
    w = w[:, 0] if forward else w[:, 0].flip(1, 2, 3)
    before, stride, dilation = _padding(problem), problem.stride, problem.dilation
    geometry = [*stride[1:], *before[1:], *dilation[1:], problem.groups, 0]
    operator, depth = native.operator("depthwise_slices"), x.stride(2)
    for first, length, tap, taps in slices:
        filters = w[:, tap : tap + taps].contiguous()
        start = first * stride[0] - before[0] + tap * dilation[0]
        shape = length, problem.groups, taps, *x.shape[3:]
        strides = stride[0] * depth, x.stride(1), dilation[0] * depth, *x.stride()[3:]
        for image, target in zip(x, y[:, :, first : first + length].transpose(1, 2), strict=True):
            seen = image.as_strided(shape, strides, image.storage_offset() + start * depth)
            operator(seen, filters, None if exponent else bias, target, geometry)
    native.rescale(y, exponent)
    if exponent and bias is not None:
        y += per_channel(bias, y.dim())
    if forward and (problem.residual or problem.activation is not Activation.NONE):
        apply_epilogue(y, tensors.get("residual"), problem.activation)
