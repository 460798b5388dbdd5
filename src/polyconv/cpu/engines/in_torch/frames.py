"""Frames engine: signals (1-D) whose kernel spans a few strides, as in a short-time Fourier transform, by one matrix
product (BLAS, through torch).

The frames of the signal, one per output, are the rows of a matrix. In the input gradient, which is the inverse
transform's synthesis, the product gives frames, and these are added where they overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ....backend import Run
from ....lowering.border import has_border
from ....lowering.epilogue import apply_epilogue, per_channel, summed_per_channel
from ....numerics.prediction import error_of, reduction_of
from ....problem import Pass, Problem
from ....util.intmath import ceil_div
from ... import native
from ...device import CpuDevice
from ...plan import CpuCandidate
from ...weight_cache import TransformedWeights
from ..aten import narrow_gradient_doubt

NAME = "frames"

LEAST_STRIDE = 8
"""Signals of smaller strides have faster algorithms than to copy each pixel so often."""

MOST_OVERLAP = 8
"""Largest number of frames that a pixel is in."""

MOST_FRAMES = 256 * 2**20
"""Largest size of all frames [bytes]."""

CALL_CYCLES = 400e3
"""Cost of the calls into torch."""

DOUBT = 1.2
"""Required advantage over other estimates: no profile has measurements of this engine."""


def refusal(problem: Problem) -> str | None:
    (height, _), (rows, taps), (_, stride) = problem.in_size, problem.kernel, problem.stride
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    if height != 1 or rows != 1 or any(problem.padding[:2]) or has_border(problem):
        return "of signals, with zeros around them"
    if problem.groups > 1 or problem.dilation[1] > 1:
        return "of dense convolutions without dilation"
    if stride < LEAST_STRIDE or taps < stride or taps > MOST_OVERLAP * stride:
        return f"of strides from {LEAST_STRIDE} and kernels of 1 to {MOST_OVERLAP} strides, not {taps} taps by {stride}"
    if 4 * _elements(problem) > MOST_FRAMES:
        return f"the frames take more than {MOST_FRAMES // 2**20} MiB"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate."""
    why_not = refusal(problem)
    if why_not is not None:
        yield CpuCandidate(NAME, "direct", direct=True, refusal=why_not)
        return
    products = 0.75 * problem.multiplications / device.lanes
    yield CpuCandidate(
        NAME,
        "direct",
        direct=True,
        cycles=narrow_gradient_doubt(problem) * (CALL_CYCLES + DOUBT * (products + 2.0 * _elements(problem))),
        error=partial(_error, problem),
    )


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    passes = {Pass.FPROP: _forward, Pass.DGRAD: _input_gradient, Pass.WGRAD: _weight_gradient}
    return partial(passes[problem.kind], problem)


def _error(problem: Problem) -> float:
    if problem.kind is not Pass.DGRAD:
        return error_of(problem, None, reduction_of(problem), ())
    overlap = ceil_div(problem.kernel[1], problem.stride[1])
    return error_of(problem, None, problem.out_channels * overlap, (problem.out_channels,))


def _elements(problem: Problem) -> int:
    return problem.batch * problem.out_size[1] * prod(problem.w_shape[1:])


def _frames(problem: Problem, x: Tensor) -> Tensor:
    """Images x outputs x (channels and taps)."""
    left, taps, stride, outputs = problem.padding[2], problem.kernel[1], problem.stride[1], problem.out_size[1]
    padded = F.pad(x[:, :, 0], (left, (outputs - 1) * stride + taps - x.shape[3] - left))
    return padded.unfold(2, taps, stride).transpose(1, 2).flatten(2)


def _forward(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    y = tensors["y"]
    (x, x_exponent), (w, w_exponent) = native.normalised(tensors["x"]), native.normalised(tensors["w"])
    sums = (w.flatten(1) @ _frames(problem, x).mT).unsqueeze(2)
    native.rescale(sums, -x_exponent - w_exponent)
    if "bias" in tensors:
        sums += per_channel(tensors["bias"], sums.dim())
    y.copy_(apply_epilogue(sums, tensors.get("residual"), problem.activation))


def _input_gradient(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    (dy, dy_exponent), (w, w_exponent) = native.normalised(tensors["y"]), native.normalised(tensors["w"])
    taps, stride, outputs = problem.kernel[1], problem.stride[1], problem.out_size[1]
    batch, channels, overlap = problem.batch, problem.in_channels, ceil_div(taps, stride)
    size, ends = overlap * stride, overlap - 1
    w = F.pad(w, (0, size - taps)) if size > taps else w
    frames = dy.new_empty(batch, outputs + 2 * ends, channels * size)
    frames[:, :ends] = frames[:, ends + outputs :] = 0.0
    filters = w.flatten(1).expand(batch, -1, -1)
    torch.bmm(dy[:, :, 0].mT, filters, out=frames[:, ends : ends + outputs])
    # One sum adds the parts of all frames: part `overlap - 1 - j` of frame `row + j`, between frames of zeros.
    row = channels * size
    strides = frames.stride(0), size, row, row - stride, 1
    parts = frames.as_strided((batch, channels, outputs + ends, overlap, stride), strides, ends * stride)
    dx, left = tensors["x"], problem.padding[2]
    if left == 0 and dx.shape[3] == (outputs + ends) * stride and dx.is_contiguous():
        torch.sum(parts, 3, out=dx.view(batch, channels, -1, stride))
    else:
        whole = parts.sum(3).flatten(2)
        dx.copy_(F.pad(whole, (-left, dx.shape[3] + left - whole.shape[2])).unsqueeze(2))
    native.rescale(dx, -dy_exponent - w_exponent)


def _weight_gradient(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    dw = tensors["dw"]
    (x, x_exponent), (dy, dy_exponent) = native.normalised(tensors["x"]), native.normalised(tensors["y"])
    sums = dy.transpose(0, 1).flatten(1) @ _frames(problem, x).flatten(0, 1)
    native.rescale(dw.copy_(sums.view(dw.shape)), -x_exponent - dy_exponent)
    if "db" in tensors:
        native.rescale(tensors["db"].copy_(summed_per_channel(dy)), -dy_exponent)
