"""Errors of results: relative to the scale of the output map, and of each element relative to its neighbourhood.

The scale is one number per map: a single large pixel raises it and hides errors that leak to small pixels. The local
error is therefore relative to sqrt(sum (x w)^2) over an element's own products, its expected size for random signs,
computed as a convolution of the squares. Direct summation always has a small local error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf, prod

import torch
from torch import Tensor

from ...numerics import reference
from ...numerics.error_model import UNIT_ROUNDOFF
from ...numerics.reference import Place, Tensors
from ...numerics.scale import largest, scales
from ...problem import RESULTS, Pass, Problem

KEPT = 2**24
"""Output elements up to which the exact result is kept for further comparisons instead of being recomputed."""
OUTPUTS = {Pass.FPROP: ("y",), Pass.DGRAD: ("x",), Pass.WGRAD: ("dw", "db")}
"""Tensors that a pass writes; ``db`` is optional."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Largest errors of one result; infinite if an element is wrongly NaN or infinite."""

    error: float
    """Relative to the scale of the output map."""
    local_error: float
    """Relative to the element's neighbourhood, the terms that it sums."""

    def worst(self, other: Figures) -> Figures:
        return Figures(max(self.error, other.error), max(self.local_error, other.local_error))


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of one output of a pass."""

    output: str
    """``y``, ``x``, ``dw`` or ``db``."""
    place: Place
    exact: Tensor
    own: Tensor
    """Per element, the root of the sum of squares of its terms: products, bias, residual."""


def slabs(problem: Problem, tensors: Tensors) -> Iterator[Slab]:
    """All outputs of a pass: images one by one, gradients of the parameters whole."""
    images = [(slice(image, image + 1),) for image in range(problem.batch)]
    for place in [(slice(None),)] if problem.kind is Pass.WGRAD else images:
        exact, own = (reference.part(problem, tensors, place, power) for power in (1, 2))
        yield Slab(RESULTS[problem.kind], place, exact, own.sqrt())
    if "db" in tensors:
        exact, own = (reference.bias_gradient(tensors["y"], power) for power in (1, 2))
        yield Slab("db", (slice(None),), exact, own.sqrt())


class Yardstick:
    """Measures results of one pass on one set of operands against float64."""

    def __init__(self, problem: Problem, tensors: Tensors) -> None:
        self._problem, self._tensors = problem, tensors
        self._scales = scales(problem, tensors)
        elements = sum(prod(tensors[name].shape) for name in OUTPUTS[problem.kind] if name in tensors)
        self._kept: tuple[Slab, ...] | None = tuple(slabs(problem, tensors)) if elements <= KEPT else None

    def measure(self, results: Mapping[str, Tensors]) -> dict[str, Figures]:
        """Figures of several results by name; each result has all outputs of the pass."""
        found = dict.fromkeys(results, Figures(0.0, 0.0))
        for slab in self._kept if self._kept is not None else slabs(self._problem, self._tensors):
            for name, outputs in results.items():
                result, scale = outputs[slab.output][slab.place], self._scales[slab.output][slab.place[:2]]
                found[name] = found[name].worst(_compare(slab, result, scale))
        return found


def _compare(slab: Slab, result: Tensor, scale: Tensor) -> Figures:
    deviation = (result.double() - slab.exact).abs()
    # Overflow and NaN that the exact result has too, once rounded to the result's type, are no deviation.
    nearest = slab.exact.to(result.dtype)
    alike = (result == nearest) | (result.isnan() & nearest.isnan())
    deviation = deviation.masked_fill(alike & ~nearest.isfinite(), 0.0)
    # The lower limit, one unit roundoff of the scale, avoids a division by 0 for elements whose terms are all zeros.
    own = torch.clamp(slab.own.nan_to_num(nan=0.0, posinf=inf), min=UNIT_ROUNDOFF * scale)
    return Figures(largest(deviation, scale), largest(deviation, own))
