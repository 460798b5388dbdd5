"""How far results stray from the exact ones: relative to the output map's scale, and each element to its neighbourhood.

The scale is one number for a whole map, and a loud pixel makes it large: what leaks from there to quiet pixels looks
small beside it. So each element is also compared with what it sums itself: sqrt(sum (x w)^2) over its own products, its
size for signs at random, which is the convolution of the squares. Direct summation is never far off by that measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod

import torch
from torch import Tensor

from ..algebra.error import UNIT_ROUNDOFF
from ..problem import Pass, Problem
from ..scale import largest, scales
from .exact import Slab, Tensors, slabs

KEPT = 2**24
"""Elements of an output up to which the exact one is kept for further comparisons, and not computed again."""
OUTPUTS = {Pass.FPROP: ("y",), Pass.DGRAD: ("x",), Pass.WGRAD: ("dw", "db")}
"""What a pass writes; the gradient of the bias only where it is asked for."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The error of one result. An element that is not the number it should be, or none at all, makes it infinite."""

    error: float
    """The largest of any element, relative to the scale of its output map."""
    local_error: float
    """The largest of any element, relative to its neighbourhood: the terms that it sums."""

    def worst(self, other: Figures) -> Figures:
        """The larger of each."""
        return Figures(max(self.error, other.error), max(self.local_error, other.local_error))


class Yardstick:
    """Measures results of one pass on one set of operands."""

    def __init__(self, problem: Problem, tensors: Tensors) -> None:
        self._problem, self._tensors = problem, tensors
        self._scales = scales(problem, tensors)
        elements = sum(prod(tensors[name].shape) for name in OUTPUTS[problem.kind] if name in tensors)
        self._kept: tuple[Slab, ...] | None = tuple(slabs(problem, tensors)) if elements <= KEPT else None

    def measure(self, results: Mapping[str, Tensors]) -> dict[str, Figures]:
        """The figures of several results, by name: each has every output of the pass."""
        found = dict.fromkeys(results, Figures(0.0, 0.0))
        for slab in self._kept if self._kept is not None else slabs(self._problem, self._tensors):
            for name, outputs in results.items():
                result, scale = outputs[slab.output][slab.place], self._scales[slab.output][slab.place[:2]]
                found[name] = found[name].worst(_compare(slab, result, scale))
        return found


def _compare(slab: Slab, result: Tensor, scale: Tensor) -> Figures:
    deviation = (result.double() - slab.exact).abs()
    # A result beyond the largest number is infinite in any algorithm; what is not a number stays none.
    nearest = slab.exact.to(result.dtype)
    alike = (result == nearest) | (result.isnan() & nearest.isnan())
    deviation = deviation.masked_fill(alike & ~nearest.isfinite(), 0.0)
    # An element smaller than the last place of the scale is compared with that: of zeros alone nothing is a share.
    own = torch.clamp(slab.own.nan_to_num(nan=0.0, posinf=inf), min=UNIT_ROUNDOFF * scale)
    return Figures(largest(deviation, scale), largest(deviation, own))
