"""Measured error of a result: its largest deviation from float64, in units of the output map's scale.

Predictions use the same unit (:mod:`polyconv.numerics.scale`), so figures of different layers are comparable. A float64
convolution of a large layer takes minutes; there only a sample is compared: some channels of the last image, in bands
of rows at the top, in the middle and at the bottom, or the weights between some channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lowering.aten import CONVOLUTIONS
from ..lowering.border import sides_for_torch
from ..numerics.scale import largest, scales
from ..problem import RESULTS, Pass, Problem
from .operands import Operands

WHOLE = 2e9
"""Largest problem [multiply-adds] whose whole result is compared."""
SAMPLE = 2.5e8
"""Size of a sample [multiply-adds]."""
CHANNELS = 8
"""Channels of a sample."""
BANDS = 3


@dataclass(frozen=True, slots=True)
class Accuracy:
    error: float
    """Largest |result - exact| of the compared elements, relative to the scale of its output map."""
    compared: float
    """Compared share of the result."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a result: ranges of images, groups, channels within a group, and rows. Channels are narrowed only
    within a single group, so that a part is again a grouped convolution. ``others`` are the channels on the other side,
    which only weights have."""

    images: range
    groups: range
    channels: range
    rows: range
    others: range


def scale(problem: Problem, operands: Operands) -> Tensor:
    """The scale of every map of the result, for broadcasting."""
    given = {"x": operands.x, "w": operands.w, "bias": operands.bias, "y": operands.dy}
    found = scales(problem, {name: tensor for name, tensor in given.items() if tensor is not None})
    return found[RESULTS[problem.kind]]


def measure(
    problem: Problem, operands: Operands, result: Tensor, *, whole: float = WHOLE, sample: float = SAMPLE
) -> Accuracy:
    """Error of ``result``: output, input gradient or weight gradient, by the pass. A NaN makes it infinite."""
    return measure_all(problem, operands, {"": result}, whole=whole, sample=sample)[""]


def measure_all(
    problem: Problem,
    operands: Operands,
    results: Mapping[str, Tensor],
    *,
    whole: float = WHOLE,
    sample: float = SAMPLE,
) -> dict[str, Accuracy]:
    """:func:`measure` for several results, by name."""
    errors, compared, unit = dict.fromkeys(results, 0.0), 0, scale(problem, operands)
    for part in parts(problem, whole, sample):
        expected = _REFERENCES[problem.kind](problem, operands, part)
        for name, result in results.items():
            deviation = (_cut(problem, result, part).double() - expected).abs()
            errors[name] = max(errors[name], largest(deviation, _cut(problem, unit.expand(result.shape), part)))
        compared += expected.numel()
    return {name: Accuracy(errors[name], compared / result.numel()) for name, result in results.items()}


# ---- sampling


def parts(problem: Problem, whole: float, sample: float) -> Iterator[Part]:
    """The parts to compare: the whole result, or a few cheap samples."""
    c, k = problem.channels_per_group
    own, other = (c, k) if problem.kind is Pass.DGRAD else (k, c)
    rows = problem.in_size[0] if problem.kind is Pass.DGRAD else problem.out_size[0]
    images, groups = range(problem.batch), range(problem.groups)
    if problem.multiplications <= whole:
        yield Part(images, groups, range(own), range(rows), range(other))
        return
    channels = range(min(own, CHANNELS))
    groups = range(min(problem.groups, ceil(CHANNELS / own)))  # several groups only if each is taken whole
    per_image_and_other = problem.multiplications / problem.batch / other * len(channels) * len(groups)
    per_image_and_other /= own * problem.groups
    if problem.kind is Pass.WGRAD:
        affordable = int(sample / (per_image_and_other * problem.batch))
        others = range(other) if len(groups) > 1 else range(max(1, min(other, affordable)))
        yield Part(images, groups, channels, range(rows), others)
        return
    band = max(1, int(rows * sample / BANDS / (per_image_and_other * other)))
    starts = [0] if band >= rows else sorted({0, (rows - band) // 2, rows - band})
    for start in starts:
        yield Part(images[-1:], groups, channels, range(start, min(start + band, rows)), range(other))


def _cut(problem: Problem, result: Tensor, part: Part) -> Tensor:
    if problem.kind is Pass.WGRAD:
        return _slice(
            _channels(result, problem.channels_per_group[1], part.groups, part.channels, dim=0), 1, part.others
        )
    own = problem.channels_per_group[0 if problem.kind is Pass.DGRAD else 1]
    images = _slice(result, 0, part.images)
    return _slice(_channels(images, own, part.groups, part.channels), 2, part.rows)


def _channels(tensor: Tensor, per_group: int, groups: range, channels: range, dim: int = 1) -> Tensor:
    start = groups.start * per_group + channels.start
    length = len(groups) * per_group if len(groups) > 1 else len(channels)
    return tensor.narrow(dim, start, length)


def _slice(tensor: Tensor, dim: int, chosen: range) -> Tensor:
    return tensor.narrow(dim, chosen.start, len(chosen))


# ---- float64 references


def _output(problem: Problem, operands: Operands, part: Part) -> Tensor:
    c, k = problem.channels_per_group
    stride, dilation, top = problem.stride[0], problem.dilation[0], problem.padding[0]
    # Input rows read by the output rows, before cropping to the image.
    first = part.rows.start * stride - top
    last = (part.rows.stop - 1) * stride - top + dilation * (problem.kernel[0] - 1)
    begin, end = max(first, 0), min(last + 1, problem.in_size[0])
    x = _channels(_slice(operands.x, 0, part.images), c, part.groups, range(c))
    x = _slice(x, 2, range(begin, max(begin, end))).double()
    x = F.pad(x, [*sides_for_torch(problem)[:-2], begin - first, last + 1 - max(begin, end)])
    w = _channels(operands.w, k, part.groups, part.channels, dim=0).double()
    bias = None
    if operands.bias is not None:
        bias = _channels(operands.bias, k, part.groups, part.channels, dim=0).double()
    return CONVOLUTIONS[problem.rank](x, w, bias, problem.stride, 0, problem.dilation, len(part.groups))


def _input_gradient(problem: Problem, operands: Operands, part: Part) -> Tensor:
    assert operands.dy is not None
    _, k = problem.channels_per_group
    stride, dilation, top = problem.stride[0], problem.dilation[0], problem.padding[0]
    # Output rows that read the part's input rows; at least one row, even if it reads none of them.
    begin = max(0, (part.rows.start + top - dilation * (problem.kernel[0] - 1)) // stride)
    begin = min(begin, problem.out_size[0] - 1)
    end = max(begin + 1, min(problem.out_size[0], (part.rows.stop - 1 + top) // stride + 1))
    dy = _channels(_slice(operands.dy, 0, part.images), k, part.groups, range(k))
    dy = _slice(dy, 2, range(begin, end)).double()
    w = _slice(_channels(operands.w, k, part.groups, range(k), dim=0), 1, part.channels).double()
    transpose = {2: F.conv_transpose2d, 3: F.conv_transpose3d}[problem.rank]
    spread = transpose(dy, w, None, problem.stride, 0, groups=len(part.groups), dilation=problem.dilation)
    # Row 0 of `spread` is the input row begin * stride - top. Rows that no output reads have gradient zero.
    wanted = [(part.rows.start + top - begin * stride, len(part.rows))]
    wanted += zip(problem.padding[2::2], problem.in_size[1:], strict=True)
    for dim, (start, length) in enumerate(wanted, start=2):
        missing = max(0, start + length - spread.shape[dim])
        spread = F.pad(spread, [0, 0] * (spread.dim() - 1 - dim) + [0, missing]).narrow(dim, start, length)
    return spread


def _weight_gradient(problem: Problem, operands: Operands, part: Part) -> Tensor:
    assert operands.dy is not None
    c, k = problem.channels_per_group
    x = _channels(operands.x, c, part.groups, part.others).double()
    dy = _channels(operands.dy, k, part.groups, part.channels).double()
    x, nothing = F.pad(x, sides_for_torch(problem)), [0] * problem.rank
    w = x.new_empty(()).expand(dy.shape[1], len(part.others), *problem.kernel)  # only its shape is read
    rest = [list(problem.stride), nothing, list(problem.dilation), False, nothing, len(part.groups)]
    gradient: Tensor = torch.ops.aten.convolution_backward(dy, x, w, None, *rest, [False, True, False])[1]
    return gradient


_REFERENCES = {Pass.FPROP: _output, Pass.DGRAD: _input_gradient, Pass.WGRAD: _weight_gradient}
