"""Calls of the native operators that several engines have in common: everything but the tensors is settled before."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor

from ..problem import Pass, Problem
from ..readiness import Run
from . import native
from .candidates import CpuCandidate
from .weights import TransformedWeights


def own_operators(stem: str, problem: Problem) -> Run:
    """Of an engine that has one operator for each pass."""
    geometry, op = native.geometry_numbers(problem), native.operator(f"{stem}_{problem.kind.value}")
    if problem.kind is Pass.FPROP:
        activation = native.activation_number(problem.activation)
        return lambda t: op(t["x"], t["w"], t.get("bias"), t["y"], geometry, t.get("residual"), activation)
    if problem.kind is Pass.DGRAD:
        return lambda t: op(t["y"], t["w"], t["x"], geometry)
    return lambda t: op(t["x"], t["y"], t["dw"], t.get("db"), geometry)


def common_operators(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    """Of the engines that are told what the lanes hold, and by which scheme they compute."""
    geometry, plan = native.geometry_numbers(problem), native.plan_numbers(chosen.engine, chosen.algorithm)
    if problem.kind is Pass.DGRAD:
        input_gradient = native.operator("input_gradient")
        return lambda t: input_gradient(t["y"], t["w"], t["x"], geometry, plan)
    forward, activation = native.operator("convolve"), native.activation_number(problem.activation)

    frozen = problem.frozen

    def convolve(tensors: MutableMapping[str, Tensor]) -> None:
        x, w, y = tensors["x"], tensors["w"], tensors["y"]
        transformed = None
        if weights is not None:
            transformed = weights.of(x, w, y, geometry, plan, frozen, tensors.get("owner"))
        residual = tensors.get("residual")
        forward(x, w, tensors.get("bias"), y, geometry, plan, transformed, residual, activation)

    return convolve
