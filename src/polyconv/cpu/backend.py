"""The CPU backend: plans a problem and hands its tensors to the engine that was chosen."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import torch
from torch import Tensor

from ..problem import Pass, Problem
from . import aten, native
from .borders import fold
from .candidates import Candidate, Engine
from .planner import plan_cpu
from .weights import TransformedWeights


class CpuBackend:
    """Implements :class:`polyconv.backends.Backend`."""

    name = "cpu"

    def __init__(self) -> None:
        self.weights = TransformedWeights()

    def run(self, problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
        keeps = problem.kind is Pass.FPROP and self.weights.keeps(tensors["w"])
        plan = plan_cpu(problem, kept_weights=keeps)
        if not plan.folded:
            self._run(plan.chosen, problem, tensors)
            return
        dx, inner = tensors["x"], plan.ran
        padded = {**tensors, "x": dx.new_empty(inner.x_shape)}
        self._run(plan.chosen, inner, padded)
        dx.copy_(fold(problem, padded["x"], dx))

    def explain(self, problem: Problem) -> str:
        plan, inference = plan_cpu(problem), plan_cpu(problem, kept_weights=problem.kind is Pass.FPROP)
        text = plan.explain()
        if inference.chosen != plan.chosen:
            text += f"\n  without gradients, with transformed weights kept: {inference.name}, {inference.reason}"
        return text

    def _run(self, chosen: Candidate, problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
        if chosen.engine is Engine.ATEN:
            aten.run(problem, tensors)
            return
        ops, geometry, plan = torch.ops.polyconv_cpu, native.geometry_numbers(problem), native.plan_numbers(chosen)
        x, y = tensors["x"], tensors["y"]
        stem = {Engine.DEPTHWISE: "depthwise_", Engine.PLAIN: "plain_"}.get(chosen.engine)
        if stem is not None:
            op = getattr(ops, stem + problem.kind.value)
            if problem.kind is Pass.FPROP:
                op(x, tensors["w"], tensors.get("bias"), y, geometry, *_epilogue(problem, tensors))
            elif problem.kind is Pass.DGRAD:
                op(y, tensors["w"], x, geometry)
            else:
                op(x, y, tensors["dw"], tensors.get("db"), geometry)
        elif problem.kind is Pass.FPROP:
            transformed = self.weights.of(x, tensors["w"], y, geometry, plan)
            epilogue = _epilogue(problem, tensors)
            ops.convolve(x, tensors["w"], tensors.get("bias"), y, geometry, plan, transformed, *epilogue)
        elif problem.kind is Pass.DGRAD:
            ops.input_gradient(y, tensors["w"], x, geometry, plan)
        else:
            ops.weight_gradient(x, y, tensors["dw"], tensors.get("db"), geometry, [chosen.algorithm])


def _epilogue(problem: Problem, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, int]:
    """The last arguments of the forward operators."""
    return tensors.get("residual"), native.ACTIVATIONS.index(problem.activation)
