"""Calls of the native operators that several engines have in common: everything but the tensors is settled before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping

from torch import Tensor

from ..problem import Pass, Problem
from ..readiness import Run
from . import native
from .candidates import CpuCandidate
from .weights import TransformedWeights

Instead = Callable[[Tensor], Run | None]
"""What runs for a weight in the place of a plan that does not keep its tolerance for it; None where the plan does."""


def own_operators(stem: str, problem: Problem) -> Run:
    """Of an engine that has one operator for each pass."""
    geometry, op = native.geometry_numbers(problem), native.operator(f"{stem}_{problem.kind.value}")
    if problem.kind is Pass.FPROP:
        activation = native.activation_number(problem.activation)
        return lambda t: op(t["x"], t["w"], t.get("bias"), t["y"], geometry, t.get("residual"), activation)
    if problem.kind is Pass.DGRAD:
        return lambda t: op(t["y"], t["w"], t["x"], geometry)
    return lambda t: op(t["x"], t["y"], t["dw"], t.get("db"), geometry)


def common_operators(
    chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None, instead: Instead | None = None
) -> Run:
    """Of the engines that are told what the lanes hold, and by which scheme they compute.

    ``instead`` is asked once for each transformed weight that is kept: whether the weight suits the plan.
    """
    geometry, plan = native.geometry_numbers(problem), native.plan_numbers(chosen.engine, chosen.algorithm)
    if problem.kind is Pass.DGRAD:
        input_gradient = native.operator("input_gradient")
        return lambda t: input_gradient(t["y"], t["w"], t["x"], geometry, plan)
    forward, activation = native.operator("convolve"), native.activation_number(problem.activation)

    frozen = problem.frozen
    judged: dict[int, tuple[weakref.ref[Tensor], Run | None]] = {}
    """By the ``id`` of a transformed weight, which lives for as long as the weight does not change."""

    def judge(w: Tensor, transformed: Tensor) -> Run | None:
        key = id(transformed)
        found = judged.get(key)
        if found is None or found[0]() is not transformed:
            if instead is None or weights is None or not weights.holds(w, transformed):
                return None
            found = judged[key] = weakref.ref(transformed, lambda _: judged.pop(key, None)), instead(w)
        return found[1]

    def convolve(tensors: MutableMapping[str, Tensor]) -> None:
        x, w, y = tensors["x"], tensors["w"], tensors["y"]
        transformed = None
        if weights is not None:
            transformed = weights.of(x, w, y, geometry, plan, frozen, tensors.get("owner"))
            if instead is not None and transformed is not None and (other := judge(w, transformed)) is not None:
                other(tensors)
                return
        residual = tensors.get("residual")
        forward(x, w, tensors.get("bias"), y, geometry, plan, transformed, residual, activation)

    return convolve
