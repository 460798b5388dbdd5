"""Predicted error for known weights, from the second moments of each filter's taps.

A plan is made before its weights are seen and assumes even weights: the energy of a filter spread evenly over its taps.
The roundings of a fast algorithm grow differently from tap to tap (:mod:`polyconv.numerics.tap_forms`): a filter with
its energy in its outermost tap (a shift, a causal filter) has several times the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, nextafter, prod
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..algebra.polyphase import DenseAxis, dense_axis, forward_phases, gradient_phases
from ..algebra.segments import Scheme2d
from ..problem import Pass, Problem
from .error_model import growth
from .prediction import Way
from .tap_forms import Form, tap_forms

EVEN = 1.25
"""Concentration up to which weights count as even: that of the worst among many randomly initialised filters, for which
the prediction for even weights is made."""
ALIKE = 0.8
"""Fraction of the largest mean square error above which a filter is counted as having it, too."""
AT_ONCE = 2**22
"""Elements of the moments computed at a time."""
DIGITS = 1e4
"""Errors are rounded up to a multiple of the unit roundoff divided by DIGITS, so that the order of summation does not
change a decision."""


class Planned(Protocol):
    """Properties of a plan that this module reads."""

    @property
    def predicted_error(self) -> float: ...
    @property
    def ways(self) -> tuple[Way, ...]:
        """Fast algorithms of its output maps; empty for direct summation."""


class NamedPlan(Planned, Protocol):
    """A plan that :func:`in_words` can name."""

    @property
    def name(self) -> str: ...


P = TypeVar("P", bound=Planned)


def keeping_tolerance(problem: Problem, plan: P, w: Tensor, plan_again: Callable[[Problem], P]) -> P:
    """``plan`` if it keeps the problem's tolerance for these weights, else the plan of the largest smaller tolerance
    that does. Direct summation is always allowed."""
    asked = problem
    while plan.ways and error_for(problem, plan.ways, w) > max(problem.tolerance, EVEN * plan.predicted_error):
        asked = replace(asked, tolerance=nextafter(min(asked.tolerance, plan.predicted_error), 0.0))
        plan = plan_again(asked)
    return plan


def concentration(problem: Problem, plan: Planned, w: Tensor) -> float:
    """Predicted error of a plan for these weights over that for even ones; 1 for direct summation."""
    return error_for(problem, plan.ways, w) / plan.predicted_error if plan.ways and plan.predicted_error else 1.0


def in_words(problem: Problem, plan: NamedPlan, w: Tensor, plan_again: Callable[[Problem], NamedPlan]) -> str:
    """Line for ``explain`` on these weights and the plan that runs if they are known; empty for direct summation."""
    if not plan.ways:
        return ""
    known, other = error_for(problem, plan.ways, w), keeping_tolerance(problem, plan, w, plan_again)
    said = f"predicted error {known:.1e}, {known / plan.predicted_error:.1f} times that of even weights"
    instead = "" if other is plan else f"; where they are kept, {other.name} runs instead"
    return f"\n  for its weights as they are: {said}{instead}"


@torch.no_grad()
def error_for(problem: Problem, ways: Iterable[Way], w: Tensor) -> float:
    """Largest predicted error of an output map for these weights, each relative to its scale."""
    maps = _maps(problem, w.detach())
    largest = max((_error(problem, way, maps) for way in ways), default=0.0)
    return ceil(largest / (unit := 2.0**-24 / DIGITS)) * unit


def _maps(problem: Problem, w: Tensor) -> Tensor:
    """Weights of each output map: maps x channels x taps, on the CPU and in float64, which holds every square."""
    taps = w.to("cpu", torch.float64).flatten(2)
    if problem.kind is Pass.FPROP:
        return taps
    return taps.reshape(problem.groups, -1, *taps.shape[1:]).transpose(1, 2).flatten(0, 1)


def _error(problem: Problem, way: Way, maps: Tensor) -> float:
    worst = 0.0
    for index in _places(problem.as_2d(), way):
        step = max(1, AT_ONCE // max(index.shape[1] ** 2, maps.shape[1] * index.numel()))
        worst = max(worst, *(_error_of_part(problem, way, part, index) for part in maps.split(step)))
    return worst


def _error_of_part(problem: Problem, way: Way, maps: Tensor, index: Tensor) -> float:
    """Largest predicted error of some maps; ``index`` is the kernel tap at each position of the scheme, by piece."""
    energy = maps.square().sum((1, 2))
    maps, energy = maps[energy > 0], energy[energy > 0]
    if not len(maps):
        return 0.0
    pieces = torch.nn.functional.pad(maps, (0, 1))[:, :, index].flatten(1, 2)
    moments = (pieces.transpose(1, 2) @ pieces) / energy[:, None, None]
    forms = _forms(way.scheme)
    one, two, three, four, products = (moments.flatten(1) @ forms.roundings).unflatten(1, (5, -1)).unbind(1)
    transforms = torch.maximum(one, two) + torch.maximum(three, four) + products
    spread = maps.abs().amax((1, 2)) * (maps[0].numel() / energy).sqrt()
    grown = growth(way.scheme)
    # The length of the sums decides which of the two dominates, so the worst filter of each is evaluated.
    sizes = torch.stack([transforms, products])
    by_map, outputs = sizes.amax(2), sizes.argmax(2)
    worst = 0.0
    for end in range(2):
        m = int(by_map[end].argmax())
        at = int(outputs[end, m])
        known = replace(
            grown,
            transforms=float(transforms[m, at]),
            product=float(products[m, at]),
            sums=forms.sums(moments[m], at),
        )
        # The largest error occurs in one of the filters that have about the largest mean square.
        share = float((by_map[end] >= ALIKE * by_map[end, m]).double().mean())
        worst = max(worst, way.known_error(problem, known, float(spread[m]), share))
    return worst


# ---- positions of kernel taps in a scheme


def _places(problem: Problem, way: Way) -> Iterator[Tensor]:
    """Kernel tap by piece and tap of the scheme, for each phase with ``way.taps``. Positions without a tap hold the
    number of kernel taps."""
    none, (h, w) = prod(problem.kernel), (way.scheme.h.r, way.scheme.w.r)
    for rows, columns in product(_phases(problem, 0), _phases(problem, 1)):
        if (rows.taps, columns.taps) != way.taps:
            continue
        yield torch.tensor(
            [
                [none if y is None or x is None else y * problem.kernel[1] + x for y in down for x in across]
                for down in _pieces(rows, h)
                for across in _pieces(columns, w)
            ]
        )


def _phases(problem: Problem, axis: int) -> tuple[DenseAxis, ...]:
    """Phases of one axis, without those that differ only in their origin."""
    numbers = problem.kernel[axis], problem.stride[axis], problem.dilation[axis], problem.padding[2 * axis]
    if problem.kind is Pass.FPROP:
        phases = forward_phases(problem.out_size[axis], *numbers)
    else:
        phases = gradient_phases(problem.in_size[axis], *numbers)
    alike = {tuple((c.taps, c.tap_first, c.tap_stride) for c in one.classes): one for one in map(dense_axis, phases)}
    return tuple(alike.values())


def _pieces(axis: DenseAxis, taps: int) -> list[list[int | None]]:
    """Kernel taps in pieces of ``taps``, as a scheme takes them, padded with None."""
    found: list[list[int | None]] = []
    for one in axis.classes:
        for first in range(0, one.taps, taps):
            piece = [one.tap_first + t * one.tap_stride for t in range(first, min(first + taps, one.taps))]
            found.append([*piece, *[None] * (taps - len(piece))])
    return found


# ---- quadratic forms of both axes


@dataclass(frozen=True, slots=True)
class _Forms:
    """Quadratic forms of a 2-D scheme, over pairs of taps."""

    roundings: Tensor
    """[pair of taps][(input in both orders, output in both orders, product) x outputs of a tile]."""
    pairs_h: Tensor
    pairs_w: Tensor
    """[group of nested passes][pair of accumulators][pair of taps]: covariance of two accumulators."""
    back_h: Tensor
    back_w: Tensor
    """[output][group][pair of accumulators]: product of their factors in the output."""

    def sums(self, moments: Tensor, output: int) -> float:
        """:attr:`~polyconv.numerics.error_model.Growth.sums` for a filter with these moments."""
        i, j = divmod(output, len(self.back_w))
        h, w = (round(pairs.shape[2] ** 0.5) for pairs in (self.pairs_h, self.pairs_w))
        pairs = moments.reshape(h, w, h, w).transpose(1, 2).reshape(h * h, w * w)
        down, across = self.pairs_h * self.back_h[i][:, :, None], self.pairs_w * self.back_w[j][:, :, None]
        both = ((down @ pairs).flatten(0, 1) @ across.flatten(0, 1).T).reshape(*down.shape[:2], *across.shape[:2])
        both = both.abs().sum((0, 2))
        product, fourth = both[_diagonal(len(both))][:, _diagonal(len(both[0]))].sum(), both.square().sum()
        return max(1.0, float(product**2 / fourth)) if fourth > 0 else 1.0


def _diagonal(pairs: int) -> slice:
    return slice(None, None, round(pairs**0.5) + 1)


@lru_cache(maxsize=32)
def _forms(scheme: Scheme2d) -> _Forms:
    h, w = tap_forms(scheme.h), tap_forms(scheme.w)
    (h_product, h_input, h_output), (w_product, w_input, w_output) = (
        tuple(map(_stacked, (one.product, one.input, one.output))) for one in (h, w)
    )
    h_exact = torch.eye(h.taps, dtype=torch.float64).expand_as(h_product)
    w_exact = torch.eye(w.taps, dtype=torch.float64).expand_as(w_product)
    # The first axis to be transformed sees the other one as exact, the second sees transformed values.
    every = (
        _both(h_input, w_exact) + _both(h_product, w_input),
        _both(h_exact, w_input) + _both(h_input, w_product),
        _both(h_output, w_product) + _both(h_exact, w_output),
        _both(h_product, w_output) + _both(h_output, w_exact),
        _both(h_product, w_product),
    )
    pairs = []
    for one in (h, w):
        sums = torch.tensor(one.accumulators, dtype=torch.float64).unflatten(0, (-1, one.points))
        pairs.append(torch.einsum("gpbk,gqbl->gpqkl", sums, sums).flatten(3).flatten(1, 2))
    backs = []
    for one in (h, w):
        back = torch.tensor(one.back, dtype=torch.float64).unflatten(1, (-1, one.points))
        backs.append(torch.einsum("igp,igq->igpq", back, back).flatten(2))
    return _Forms(torch.cat(every, 1), *pairs, *backs)


def _stacked(forms: tuple[Form, ...]) -> Tensor:
    return torch.tensor(forms, dtype=torch.float64)


def _both(h: Tensor, w: Tensor) -> Tensor:
    """Kronecker product of forms for each pair of outputs: pairs of taps x pairs of outputs."""
    return torch.einsum("iac,jbd->abcdij", h, w).flatten(4).flatten(0, 3)
