"""Depthwise convolutions of volumes (``csrc/cpu/depthwise``): each output slice sums over all taps in one pass.

The kernels walk along the depth and keep the slices that the next output slice reads. A sum of 2-D problems
(:mod:`.volumes`) reads and writes the output once per tap along the depth instead.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from math import prod

from torch import Tensor

from ...activation import Activation
from ...backend import Run
from ...lowering.border import has_border
from ...lowering.epilogue import apply_epilogue, per_channel
from ...numerics.prediction import error_of, reduction_of
from ...problem import Pass, Problem
from ...util.intmath import round_up
from .. import native
from ..device import CpuDevice
from ..plan import CpuCandidate
from ..weight_cache import TransformedWeights

NAME = "depthwise volumes"

CALL_CYCLES, SLICE_CYCLES, MOVED_CYCLES, PRODUCT_CYCLES = 40e3, 500.0, 24.0, 1.2
"""Cost of a call and of an output slice; cycles per vector that is packed or written, and per vector of products. Of 16
shapes measured in one thread with AVX-512, most estimates deviate by less than 25%."""

UNROLLED, UNROLLED_CYCLES = (3, 5, 7), 0.8
"""Taps of square slices without a stride whose products have a kernel of their own, and cycles per vector of them."""

TILE_ROWS = 4
"""Rows that are computed together (``kTileRows`` in ``csrc/cpu/depthwise/rows-inl.h``)."""

DOUBT = 1.1
"""Required advantage over other estimates: no profile has measurements of this engine."""


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
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate."""
    error = partial(error_of, problem, None, reduction_of(problem), ())
    yield CpuCandidate.single(NAME, refusal(problem), lambda: DOUBT * _cycles(problem, device.lanes), error)


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    return partial(_run, problem)


def _padding(problem: Problem) -> tuple[int, ...]:
    """Zeros before the input of each axis; in an input gradient, before the gradient of the output."""
    before = problem.padding[::2]
    if problem.kind is Pass.FPROP:
        return before
    axes = zip(problem.kernel, problem.dilation, before, strict=True)
    return tuple((kernel - 1) * dilation - pad for kernel, dilation, pad in axes)


def _cycles(problem: Problem, lanes: int) -> float:
    moved = prod(problem.x_shape) + prod(problem.y_shape)
    depth, height, width = problem.out_size if problem.kind is Pass.FPROP else problem.in_size
    slices = problem.batch * problem.groups * depth
    products = slices * round_up(height, TILE_ROWS) * round_up(width, lanes) * prod(problem.kernel)
    rows, columns = problem.kernel[1:]
    unrolled = rows == columns in UNROLLED and problem.stride[1:] == problem.dilation[1:] == (1, 1)
    product = UNROLLED_CYCLES if unrolled else PRODUCT_CYCLES
    return CALL_CYCLES + SLICE_CYCLES * slices + (MOVED_CYCLES * moved + product * products) / lanes


def _run(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    forward = problem.kind is Pass.FPROP
    given, y = (tensors["x"], tensors["y"]) if forward else (tensors["y"], tensors["x"])
    (x, x_exponent), (w, w_exponent) = native.normalised(given), native.normalised(tensors["w"])
    exponent, bias = -x_exponent - w_exponent, tensors.get("bias")
    w = (w[:, 0] if forward else w[:, 0].flip(1, 2, 3)).contiguous()
    geometry = [*problem.stride, *_padding(problem), *problem.dilation]
    native.operator("depthwise_volumes")(x, w, None if exponent else bias, y, geometry)
    native.rescale(y, exponent)
    if exponent and bias is not None:
        y += per_channel(bias, y.dim())
    if forward and (problem.residual or problem.activation is not Activation.NONE):
        apply_epilogue(y, tensors.get("residual"), problem.activation)
