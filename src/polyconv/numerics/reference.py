"""Float64 reference in plain PyTorch: pad a copy, and call ATen's convolution or its gradients.

:func:`fprop`, :func:`dgrad` and :func:`wgrad` take whole tensors; ``moves`` is a :class:`~polyconv.problem.Problem` or
a :class:`~polyconv.arguments.Geometry`. :func:`part` computes a part of a pass, image by image in bands of output rows:
PyTorch's float64 convolution lays out all products of a call in memory (im2col).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activation import Activation
from ..arguments import Geometry
from ..problem import PaddingMode, Pass, Problem
from ..runtime.bypass import bypassing

PRODUCTS = 2**25
"""Products laid out at once by :func:`part`: 256 MiB in float64."""

Moves = Problem | Geometry
Tensors = Mapping[str, Tensor]
"""By the names of :class:`~polyconv.backend.Backend`."""
Place = tuple[slice, ...]


def pad(moves: Moves, x: Tensor) -> Tensor:
    """Padded copy of ``x``. Negative sides are cropped before the mode fills the others."""
    mode, sides = str(moves.padding_mode), _sides(moves)
    x = F.pad(x, [min(side, 0) for side in sides])
    return F.pad(x, [max(side, 0) for side in sides], mode="constant" if mode == "zeros" else mode)


def fprop(moves: Moves, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Output, in float64; differentiable."""
    bias = None if bias is None else bias.double()
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(moves.stride)]
    return bypassing(convolve, pad(moves, x.double()), w.double(), bias, moves.stride, 0, moves.dilation, moves.groups)


def with_epilogue(
    moves: Moves,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
) -> Tensor:
    """Output after residual and activation, in float64."""
    y = fprop(moves, x, w, bias)
    if residual is not None:
        y = y + residual.double()
    return Activation(activation)(y)


def dgrad(moves: Moves, dy: Tensor, w: Tensor, x_shape: Sequence[int]) -> Tensor:
    """Input gradient, in float64."""
    size = [extent + sum(moves.padding[2 * axis : 2 * axis + 2]) for axis, extent in enumerate(x_shape[2:])]
    x = dy.new_empty((), dtype=torch.float64).expand(*x_shape[:2], *size)  # only its shape is read
    return _unpad(moves, _backward(moves, dy, x, w, 0), x_shape)


def wgrad(moves: Moves, x: Tensor, dy: Tensor, w_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Weight and bias gradients, in float64."""
    w = dy.new_empty((), dtype=torch.float64).expand(*w_shape)  # only its shape is read
    return _backward(moves, dy, pad(moves, x.detach().double()), w, 1), bias_gradient(dy)


def bias_gradient(dy: Tensor, power: int = 1) -> Tensor:
    """Bias gradient, in float64; with ``power`` 2, the sums of squares."""
    nothing = dy.new_zeros(dy.shape[1], dtype=torch.float64)
    return sum((image.detach().double().pow(power).flatten(1).sum(1) for image in dy), nothing)


def _backward(moves: Moves, dy: Tensor, x: Tensor, w: Tensor, which: int) -> Tensor:
    """Gradient of the padded input (0) or of the weight (1)."""
    nothing = [0] * len(moves.stride)
    rest = list(moves.stride), nothing, list(moves.dilation), False, nothing, moves.groups
    given = (tensor.detach().double() for tensor in (dy, x, w))
    wanted = [which == 0, which == 1, False]
    result: Tensor = bypassing(torch.ops.aten.convolution_backward, *given, None, *rest, wanted)[which]
    return result


def _unpad(moves: Moves, gradient: Tensor, x_shape: Sequence[int]) -> Tensor:
    """Derivative of :func:`pad`."""
    if str(moves.padding_mode) == "zeros":
        return F.pad(gradient, [-side for side in _sides(moves)])
    with torch.enable_grad():
        x = gradient.new_zeros(tuple(x_shape), requires_grad=True)
        return torch.autograd.grad(pad(moves, x), x, gradient)[0]


def _sides(moves: Moves) -> list[int]:
    """Padding as ``torch.nn.functional.pad`` takes it, the last axis first."""
    return [side for axis in range(len(moves.padding) - 2, -1, -2) for side in moves.padding[axis : axis + 2]]


# ---- parts


def part(problem: Problem, tensors: Tensors, place: Place = (), power: int = 1) -> Tensor:
    """The result of a pass at ``place``: slices of its leading axes, that is images, channels and rows, or the channels
    of a weight. Channels of several groups must be those of whole groups.

    Args:
        problem: a pass.
        tensors: its operands.
        place: the part; the whole result by default.
        power: 2 gives the sum of the squares of each element's terms (products, bias, residual), before an activation.
    """
    shape = {Pass.FPROP: problem.y_shape, Pass.DGRAD: problem.x_shape, Pass.WGRAD: problem.w_shape}[problem.kind]
    slices = (*place, *(slice(None) for _ in shape[len(place) :]))
    ranges = [range(extent)[chosen] for extent, chosen in zip(shape, slices, strict=True)]
    return _PARTS[problem.kind](problem, tensors, ranges, power)


def _output(problem: Problem, tensors: Tensors, ranges: Sequence[range], power: int) -> Tensor:
    (images, channels, rows, *_), (c, k) = ranges, problem.channels_per_group
    groups, inner, products = _inner(problem, channels, k)
    w, bias, residual = tensors["w"][_slice(channels)], tensors.get("bias"), tensors.get("residual")
    w, bias = w.double().pow(power), None if bias is None else bias[_slice(channels)].double().pow(power)
    activation, found = str(problem.activation) if power == 1 else "none", []
    for some in _cut(images, products * len(rows)):
        x, bands = pad(problem, tensors["x"][some, _slice(groups, c)].double()), []
        for band in _cut(rows, products):
            added = None if residual is None else residual[some, _slice(channels), band].double().pow(power)
            read = x[:, :, _read_by(problem, band)].pow(power)
            bands.append(with_epilogue(inner, read, w, bias, added, activation))
        found.append(torch.cat(bands, 2))
    return torch.cat(found)


def _input_gradient(problem: Problem, tensors: Tensors, ranges: Sequence[range], power: int) -> Tensor:
    """Computed for the padded image, whose border is then added to the pixels that it was copied from."""
    (images, channels, rows, *_), (c, k) = ranges, problem.channels_per_group
    groups, inner, products = _inner(problem, channels, c)
    first, readers = channels.start - groups.start * c, _readers(problem, rows)
    w = tensors["w"][_slice(groups, k), first : first + min(c, len(channels))].double().pow(power)
    size = map(sum, zip(problem.in_size, problem.padding[::2], problem.padding[1::2], strict=True))
    found, shape = [], (len(channels), *size)
    for some in _cut(images, products * problem.out_size[0]):
        padded = w.new_zeros(some.stop - some.start, *shape)
        for band in _cut(readers, products):
            read = padded[:, :, _read_by(problem, band)]
            read += dgrad(inner, tensors["y"][some, _slice(groups, k), band].double().pow(power), w, read.shape)
        whole = _unpad(problem, padded, (len(padded), len(channels), *problem.in_size))
        found.append(whole[:, :, _slice(rows)])
    return torch.cat(found)


def _weight_gradient(problem: Problem, tensors: Tensors, ranges: Sequence[range], power: int) -> Tensor:
    (channels, others, *_), (c, k) = ranges, problem.channels_per_group
    groups, inner, products = _inner(problem, channels, k)
    first, rows = groups.start * c + others.start, range(problem.out_size[0])
    dw = tensors["y"].new_zeros(len(channels), len(others), *problem.kernel, dtype=torch.float64)
    for some in _cut(range(problem.batch), products * len(rows)):
        x = pad(problem, tensors["x"][some, first : first + len(groups) * len(others)].double())
        for band in _cut(rows, products):
            dy = tensors["y"][some, _slice(channels), band].double().pow(power)
            dw += wgrad(inner, x[:, :, _read_by(problem, band)].pow(power), dy, dw.shape)[0]
    return dw


_PARTS = {Pass.FPROP: _output, Pass.DGRAD: _input_gradient, Pass.WGRAD: _weight_gradient}


def _inner(problem: Problem, channels: range, per_group: int) -> tuple[range, Geometry, int]:
    """Groups of the channels, their convolution on a padded image, and products that a row of outputs lays out."""
    groups = range(channels.start // per_group, ceil(channels.stop / per_group))
    inner = Geometry(problem.stride, (0, 0) * problem.rank, problem.dilation, len(groups))
    taps = len(groups) * problem.channels_per_group[0] * prod(problem.kernel)
    return groups, inner, taps * prod(problem.out_size[1:])


def _cut(whole: range, products: int) -> Iterator[slice]:
    """Slices with at most :data:`PRODUCTS` products, but at least one element; an element has ``products``."""
    step = max(1, PRODUCTS // max(1, products))
    for start in range(whole.start, whole.stop, step):
        yield slice(start, min(start + step, whole.stop))


def _slice(chosen: range, times: int = 1) -> slice:
    return slice(chosen.start * times, chosen.stop * times)


def _read_by(problem: Problem, rows: slice) -> slice:
    """Rows of the padded image that output rows read."""
    stride, reach = problem.stride[0], problem.dilation[0] * (problem.kernel[0] - 1)
    return slice(rows.start * stride, (rows.stop - 1) * stride + reach + 1)


def _readers(problem: Problem, rows: range) -> range:
    """Output rows that read input rows; all of them if a border copies pixels to other rows."""
    outputs, top, stride = problem.out_size[0], problem.padding[0], problem.stride[0]
    if problem.padding_mode is not PaddingMode.ZEROS:
        return range(outputs)
    first = ceil((rows.start + top - problem.dilation[0] * (problem.kernel[0] - 1)) / stride)
    return range(max(0, first), min(outputs, (rows.stop - 1 + top) // stride + 1))
