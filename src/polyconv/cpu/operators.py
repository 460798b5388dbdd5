"""Calls of native operators shared by several engines: all arguments but the tensors are bound in advance."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping

from torch import Tensor

from ..backend import Run
from ..problem import Pass, Problem
from . import native
from .plan import CpuCandidate
from .weight_cache import TransformedWeights

Instead = Callable[[Tensor, set[object]], Run | None]
"""Returns the replacement for a plan that misses its tolerance for a weight; None if it keeps it. The set is of the
predictions known to hold for this weight."""


class Judge:
    """Asks ``instead`` once per cached weight."""

    __slots__ = ("_instead", "_judged", "_weights")

    def __init__(self, weights: TransformedWeights | None, instead: Instead | None) -> None:
        self._weights = weights
        self._instead = instead
        self._judged: dict[int, tuple[weakref.ref[Tensor], Run | None]] = {}
        """By ``id`` of the transformed weight, which is replaced when the weight changes."""

    def __call__(self, w: Tensor, transformed: Tensor) -> Run | None:
        """The replacement for a weight, given what is cached of it."""
        if self._instead is None:
            return None
        key, judged = id(transformed), self._judged
        found = judged.get(key)
        if found is None or found[0]() is not transformed:
            holding = None if self._weights is None else self._weights.holding(transformed)
            if holding is None:
                return None
            other = self._instead(w, holding)
            found = judged[key] = weakref.ref(transformed, lambda _: judged.pop(key, None)), other
        return found[1]


def own_operators(stem: str, problem: Problem) -> Run:
    """Bind the operator of an engine that has one operator per pass."""
    geometry, op = native.geometry_numbers(problem), native.operator(f"{stem}_{problem.kind.value}")
    if problem.kind is Pass.FPROP:
        activation = native.activation_numbers(problem.activation)
        return lambda t: op(t["x"], t["w"], t.get("bias"), t["y"], geometry, t.get("residual"), *activation)
    if problem.kind is Pass.DGRAD:
        return lambda t: op(t["y"], t["w"], t["x"], geometry)
    return lambda t: op(t["x"], t["y"], t["dw"], t.get("db"), geometry)


def common_operators(
    chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None, instead: Instead | None = None
) -> Run:
    """Bind the operators that take the content of the lanes and the scheme as arguments. ``instead`` is called once per
    cached weight, to check that the plan keeps its tolerance for it."""
    geometry, plan = native.geometry_numbers(problem), native.plan_numbers(chosen.engine, chosen.algorithm)
    if problem.kind is Pass.DGRAD:
        input_gradient = native.operator("input_gradient")
        return lambda t: input_gradient(t["y"], t["w"], t["x"], geometry, plan)
    forward, activation = native.operator("convolve"), native.activation_numbers(problem.activation)

    frozen, judge = problem.frozen, Judge(weights, instead)

    def convolve(tensors: MutableMapping[str, Tensor]) -> None:
        x, w, y = tensors["x"], tensors["w"], tensors["y"]
        transformed = None
        if weights is not None:
            transformed = weights.of(x, w, y, geometry, plan, frozen, tensors.get("owner"))
            if transformed is not None and (other := judge(w, transformed)) is not None:
                tensors["w"] = w.float()  # of half precision; the run may replace the result in this mapping
                other(tensors)
                return
            if w.dtype != x.dtype:  # half precision
                w = w.float() if transformed is None else transformed.as_strided(w.shape, (0,) * w.dim())
        residual = tensors.get("residual")
        forward(x, w, tensors.get("bias"), y, geometry, plan, transformed, residual, *activation)

    return convolve
