"""Measured error of a result: its largest deviation from float64, in units of the output map's scale.

Predictions use the same unit (:mod:`polyconv.numerics.scale`), so figures of different layers are comparable. A float64
convolution of a large layer takes minutes; there only a sample is compared: some channels of the last image, in bands
of rows at the top, in the middle and at the bottom, or the weights between some channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from ..lowering.border import has_border
from ..numerics import reference
from ..numerics.reference import Place
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


def scale(problem: Problem, operands: Operands) -> Tensor:
    """The scale of every map of the result, for broadcasting."""
    return scales(problem, operands.named())[RESULTS[problem.kind]]


def rounding(problem: Problem, operands: Operands) -> Tensor:
    """The unit roundoff of the problem's dtype at the scale of every map, and at least half of the least denormal: a
    unit in which results of every dtype compare, those of denormal operands included."""
    numbers = torch.finfo(getattr(torch, problem.dtype))
    return torch.clamp(scale(problem, operands) * (numbers.eps / 2), min=numbers.smallest_normal * numbers.eps / 2)


def measure(
    problem: Problem, operands: Operands, result: Tensor, *, whole: float = WHOLE, sample: float = SAMPLE
) -> Accuracy:
    """Error of ``result``: output, input gradient or weight gradient, by the pass. A NaN makes it infinite."""
    return measure_all(problem, operands, [result], whole=whole, sample=sample)[0]


def measure_all(
    problem: Problem,
    operands: Operands,
    results: Sequence[Tensor],
    *,
    whole: float = WHOLE,
    sample: float = SAMPLE,
    unit: Tensor | None = None,
) -> list[Accuracy]:
    """:func:`measure` for several results; ``unit`` replaces the scale."""
    errors, compared, unit = [0.0] * len(results), 0, scale(problem, operands) if unit is None else unit
    for place in places(problem, whole, sample):
        expected = reference.part(problem, operands.named(), place)
        for i, result in enumerate(results):
            deviation = (result[place].double() - expected).abs()
            errors[i] = max(errors[i], largest(deviation, unit.expand(result.shape)[place]))
        compared += expected.numel()
    return [Accuracy(error, compared / result.numel()) for error, result in zip(errors, results, strict=True)]


def places(problem: Problem, whole: float, sample: float) -> Iterator[Place]:
    """Where to compare: the whole result, or a few cheap samples."""
    if problem.multiplications <= whole:
        yield ()
        return
    c, k = problem.channels_per_group
    own, other = (c, k) if problem.kind is Pass.DGRAD else (k, c)
    groups = min(problem.groups, ceil(CHANNELS / own))  # several groups only if each is taken whole
    channels = slice(groups * min(own, CHANNELS))
    products = problem.multiplications * channels.stop / (own * problem.groups)
    if problem.kind is Pass.WGRAD:
        yield channels, slice(other if groups > 1 else max(1, min(other, int(sample / products * other))))
        return
    rows = problem.in_size[0] if problem.kind is Pass.DGRAD else problem.out_size[0]
    band = max(1, int(rows * sample / BANDS / (products / problem.batch)))
    if problem.kind is Pass.DGRAD and has_border(problem):
        band = rows  # every row of the gradient needs all outputs
    for start in [0] if band >= rows else sorted({0, (rows - band) // 2, rows - band}):
        yield slice(problem.batch - 1, problem.batch), channels, slice(start, min(start + band, rows))
