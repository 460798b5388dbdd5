"""Frames engine: signals (1-D) whose kernel spans a few strides, as in a short-time Fourier transform, by one matrix
product (BLAS, through torch).

The frames of the signal, one per output, are the rows of a matrix. In the input gradient, which is the inverse
transform's synthesis, the product gives frames, and these are added where they overlap.

Cut into rows of one stride, the signal is a sequence of vectors, and a kernel of r strides has r matrices as its taps:
F(m, r) along the rows takes m + r - 1 matrix products where frames take m r.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import lru_cache, partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ....algebra.matrices import Matrix
from ....algebra.segments import AxisScheme, Scheme2d
from ....backend import Run
from ....lowering.border import has_border
from ....lowering.epilogue import apply_epilogue, per_channel, summed_per_channel
from ....numerics.prediction import Way, error_of, reduction_of
from ....problem import Pass, Problem
from ....util.intmath import ceil_div
from ... import native
from ...device import CpuDevice
from ...operators import Instead, Judge
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

FEW_FRAMES, DOUBT_OF_FEW = 96, 2.4
"""Required advantage of a forward pass of fewer frames, or of fewer than twice as many if the weight fits the L2:
PyTorch's convolution then takes less than its estimate, 0.4 of it with 8 to 32 frames."""

OUTPUTS = (2, 4)
"""Rows m of the results of F(m, r) that are compared. With more, errors and weights grow faster than products fall."""

FEWEST_TERMS = 32
"""Least number of products per sum of F(m, r). Its weights are transformed in float32, so that each has a few roundings
in the place of one, which such sums outnumber."""

PRODUCT_CYCLES, TRANSFORMED_CYCLES, READ_CYCLES, WEIGHT_CYCLES = 0.5, 45.0, 16.0, 90.0
"""Of F(m, r): cycles per vector of products, of transformed rows, of weights that are read from beyond the core's
caches (also by direct summation of few frames, which hide nothing of it), and of weights that are transformed."""

MOST_FOR_THE_CHECK = 0.25
"""Largest cost of checking that a cached weight is unchanged, as a share of transforming it in PyTorch's operators."""


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
    """Direct summation and, where frames overlap, F(m, r) but for the weight gradient."""
    why_not = refusal(problem)
    if why_not is not None:
        yield CpuCandidate(NAME, "direct", direct=True, refusal=why_not)
        return
    weight_vectors, rows = prod(problem.w_shape) / device.lanes, problem.batch * problem.out_size[1]
    fits = 4 * prod(problem.w_shape) <= device.l2_bytes
    few = problem.kind is Pass.FPROP and rows < FEW_FRAMES * (2 if fits else 1)
    doubt = (DOUBT_OF_FEW if few else DOUBT) * narrow_gradient_doubt(problem)
    products = 0.75 * problem.multiplications / device.lanes + (READ_CYCLES * weight_vectors if few else 0.0)
    yield CpuCandidate(
        NAME,
        "direct",
        direct=True,
        cycles=narrow_gradient_doubt(problem) * CALL_CYCLES + doubt * (products + 2.0 * _elements(problem)),
        error=partial(_error, problem),
    )
    if problem.kind is Pass.WGRAD or _overlap(problem) == 1 or _terms(problem) < FEWEST_TERMS:
        return
    for m in OUTPUTS:
        scheme = _scheme(m, _overlap(problem))
        per_row = float(scheme.w.multiplications) / device.lanes
        cycles = rows * per_row * (PRODUCT_CYCLES * prod(_sides(problem)) + TRANSFORMED_CYCLES * sum(_sides(problem)))
        cycles += READ_CYCLES * scheme.w.products * weight_vectors / scheme.w.r
        weight_cycles = WEIGHT_CYCLES * weight_vectors
        yield CpuCandidate(
            NAME,
            str(scheme.w),
            m,
            cycles=narrow_gradient_doubt(problem) * 2 * CALL_CYCLES + doubt * (weight_cycles + cycles),
            weight_cycles=doubt * weight_cycles,
            error=partial(error_of, problem, scheme, _terms(problem), ()),
        )


def ways(chosen: CpuCandidate, problem: Problem) -> Iterator[Way]:
    """How outputs are summed by F(m, r). Empty for direct summation and, as in other engines that keep no weights of
    transposed convolutions, the input gradient."""
    if not chosen.direct and problem.kind is Pass.FPROP:
        yield Way(_scheme(chosen.algorithm, _overlap(problem)), _terms(problem), (), (1, _overlap(problem)))


def prepare(
    chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None, instead: Instead | None = None
) -> Run:
    if not chosen.direct:
        return partial(_by_rows, problem, chosen.algorithm, weights, Judge(weights, instead))
    passes = {Pass.FPROP: _forward, Pass.DGRAD: _input_gradient, Pass.WGRAD: _weight_gradient}
    return partial(passes[problem.kind], problem)


def _error(problem: Problem) -> float:
    if problem.kind is not Pass.DGRAD:
        return error_of(problem, None, reduction_of(problem), ())
    return error_of(problem, None, problem.out_channels * _overlap(problem), (problem.out_channels,))


def _overlap(problem: Problem) -> int:
    """Strides that a kernel spans: the taps of its rows."""
    return ceil_div(problem.kernel[1], problem.stride[1])


def _sides(problem: Problem) -> tuple[int, int]:
    """Elements of a row of the signal, and of a frame's spectrum."""
    return problem.in_channels * problem.stride[1], problem.out_channels


def _terms(problem: Problem) -> int:
    """Products of a row's matrix product per result."""
    return _sides(problem)[problem.kind is Pass.DGRAD]


def _elements(problem: Problem) -> int:
    return problem.batch * problem.out_size[1] * prod(problem.w_shape[1:])


def _frames(problem: Problem, x: Tensor) -> Tensor:
    """Images x outputs x (channels and taps)."""
    left, taps, stride, outputs = problem.padding[2], problem.kernel[1], problem.stride[1], problem.out_size[1]
    padded = F.pad(x[:, :, 0], (left, (outputs - 1) * stride + taps - x.shape[3] - left))
    return padded.unfold(2, taps, stride).transpose(1, 2).flatten(2)


def _forward(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    (x, x_exponent), (w, w_exponent) = native.normalised(tensors["x"]), native.normalised(tensors["w"])
    y, filters = tensors["y"], w.flatten(1).expand(problem.batch, -1, -1)
    in_place = y.is_contiguous() and y.dtype == torch.float32 and "residual" not in tensors
    sums = y if in_place else x.new_empty(y.shape)
    # Not matmul, which makes one product of all images and then rearranges it.
    torch.bmm(filters, _frames(problem, x).mT, out=sums[:, :, 0])
    _finish(problem, sums, -x_exponent - w_exponent, tensors)


def _finish(problem: Problem, sums: Tensor, exponent: int, tensors: MutableMapping[str, Tensor]) -> None:
    native.rescale(sums, exponent)
    if "bias" in tensors:
        sums += per_channel(tensors["bias"], sums.dim())
    tensors["y"].copy_(apply_epilogue(sums, tensors.get("residual"), problem.activation))


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
    dx = tensors["x"]
    if problem.padding[2] == 0 and dx.shape[3] == (outputs + ends) * stride and dx.is_contiguous():
        torch.sum(parts, 3, out=dx.view(batch, channels, -1, stride))
    else:
        dx.copy_(_cropped(problem, parts.sum(3)))
    native.rescale(dx, -dy_exponent - w_exponent)


def _cropped(problem: Problem, rows: Tensor) -> Tensor:
    """The input gradient of images x channels x rows x stride."""
    whole, left, size = rows.flatten(2), problem.padding[2], problem.in_size[1]
    return F.pad(whole, (-left, size + left - whole.shape[2])).unsqueeze(2)


def _weight_gradient(problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
    dw = tensors["dw"]
    (x, x_exponent), (dy, dy_exponent) = native.normalised(tensors["x"]), native.normalised(tensors["y"])
    sums = dy.transpose(0, 1).flatten(1) @ _frames(problem, x).flatten(0, 1)
    native.rescale(dw.copy_(sums.view(dw.shape)), -x_exponent - dy_exponent)
    if "db" in tensors:
        native.rescale(tensors["db"].copy_(summed_per_channel(dy)), -dy_exponent)


# ---- F(m, r) along the rows


@lru_cache(maxsize=16)
def _scheme(m: int, r: int) -> Scheme2d:
    return Scheme2d(AxisScheme.direct(1), AxisScheme.cut(m, r))


def _by_rows(
    problem: Problem,
    m: int,
    weights: TransformedWeights | None,
    judge: Judge,
    tensors: MutableMapping[str, Tensor],
) -> None:
    forward, w = problem.kind is Pass.FPROP, tensors["w"]
    exponent = 0
    if weights is not None:

        def transform() -> Tensor:
            return _transformed_weights(problem, m, w.float())

        plan = [-2, m, problem.stride[1], forward]
        frozen = problem.frozen or not forward  # input gradients do not tell; the weight's own mark decides
        filters = weights.of(w, w, w, [], plan, frozen, tensors.get("owner"), transform)
        if filters is None:  # it cannot be kept, which the plan relies on
            tensors["w"] = w.float()  # of half precision
            (_forward if forward else _input_gradient)(problem, tensors)
            return
        if (other := judge(w, filters)) is not None:
            tensors["w"] = w.float()
            other(tensors)
            return
    else:
        w, exponent = native.normalised(w)
        filters = _transformed_weights(problem, m, w)
    if forward:
        _forward_by_rows(problem, m, filters, exponent, tensors)
    else:
        _input_gradient_by_rows(problem, m, filters, exponent, tensors)


def _transformed_weights(problem: Problem, m: int, w: Tensor) -> Tensor:
    """One matrix per point: products x output channels x elements of a row."""
    overlap, stride = _overlap(problem), problem.stride[1]
    g = _matrix(_scheme(m, overlap).w.inner.g, w)
    g = g if problem.kind is Pass.FPROP else g.flip(1)
    parts = F.pad(w, (0, overlap * stride - w.shape[3])).view(*w.shape[:2], overlap, stride)
    return (g @ parts).movedim(2, 0).flatten(2).contiguous()


def _convolved(problem: Problem, m: int, images: Tensor, filters: Tensor, results: int) -> Tensor:
    """Correlation of each image's rows with transformed weights, by groups of m results."""
    inner = _scheme(m, _overlap(problem)).w.inner
    at, bt = _matrix(inner.at, images), _matrix(inner.bt, images)
    batch, rows, width = images.shape
    apart = images.stride(0) // width
    count = ((batch - 1) * apart + rows - len(bt)) // m + 1
    groups = images.as_strided((count, len(bt), width), (m * width, width, 1))
    transformed = torch.bmm(bt.expand(count, -1, -1), groups).transpose(0, 1)
    sums = torch.bmm(transformed, filters)
    found = torch.bmm(at.expand(count, -1, -1), sums.transpose(0, 1))
    width = found.shape[2]
    return found.as_strided((batch, results, width), (apart * width, width, 1))


def _matrix(entries: Matrix, like: Tensor) -> Tensor:
    return like.new_tensor([[float(c) for c in row] for row in entries])


def _room(problem: Problem, m: int, results: int, like: Tensor) -> Tensor:
    """Zeros for the rows of all images, as many as groups of m results read. Images are whole groups apart, so that no
    group reads two of them: an infinity in one does not reach the results of another."""
    rows, width = ceil_div(results, m) * m + _overlap(problem) - 1, _terms(problem)
    apart = ceil_div(rows, m) * m
    zeros = like.new_zeros((problem.batch - 1) * apart + rows, width)
    return zeros.as_strided((problem.batch, rows, width), (apart * width, width, 1))


def _forward_by_rows(
    problem: Problem, m: int, filters: Tensor, w_exponent: int, tensors: MutableMapping[str, Tensor]
) -> None:
    x, x_exponent = native.normalised(tensors["x"])
    stride, channels, outputs = problem.stride[1], problem.in_channels, problem.out_size[1]
    rows = outputs + _overlap(problem) - 1
    padded = F.pad(x[:, :, 0], (problem.padding[2], rows * stride - x.shape[3] - problem.padding[2]))
    images = _room(problem, m, outputs, x)
    images[:, :rows].unflatten(2, (channels, stride)).copy_(padded.unflatten(2, (rows, stride)).transpose(1, 2))
    found = _convolved(problem, m, images, filters.mT, outputs)
    _finish(problem, found.mT.unsqueeze(2), -x_exponent - w_exponent, tensors)


def _input_gradient_by_rows(
    problem: Problem, m: int, filters: Tensor, w_exponent: int, tensors: MutableMapping[str, Tensor]
) -> None:
    dx = tensors["x"]
    dy, dy_exponent = native.normalised(tensors["y"])
    outputs, ends = problem.out_size[1], _overlap(problem) - 1
    images = _room(problem, m, outputs + ends, dy)
    images[:, ends : ends + outputs].copy_(dy[:, :, 0].mT)
    found = _convolved(problem, m, images, filters, outputs + ends).unflatten(2, (problem.in_channels, -1))
    dx.copy_(_cropped(problem, found.transpose(1, 2)))
    native.rescale(dx, -dy_exponent - w_exponent)
