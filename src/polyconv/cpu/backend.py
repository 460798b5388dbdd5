"""The CPU backend: plans a problem and hands its tensors to the engine that was chosen."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import lru_cache

import torch
from torch import Tensor

from .. import choices
from ..problem import Pass, Problem
from ..tuning import Environment
from . import aten, native, planner
from .borders import fold
from .candidates import Candidate, Engine
from .planner import CpuPlan, plan_cpu
from .weights import TransformedWeights


class CpuBackend:
    """Implements :class:`polyconv.backends.Backend`."""

    name = "cpu"

    def __init__(self) -> None:
        self.weights = TransformedWeights()
        self._planned = lru_cache(maxsize=4096)(self._plan_anew)

    def plan(self, problem: Problem, *, inference: bool = False) -> CpuPlan:
        """What would run: the model's choice, or one that was measured or agreed upon."""
        return self._planned(problem, inference and problem.kind is Pass.FPROP, choices.version())

    def contenders(self, problem: Problem, *, inference: bool = False) -> tuple[str, ...]:
        return planner.contenders(problem, kept_weights=inference and problem.kind is Pass.FPROP)

    def environment(self) -> Environment:
        return Environment.of_cpu(native.instruction_set() if native.is_available() else "")

    def run(self, problem: Problem, tensors: MutableMapping[str, Tensor]) -> None:
        keeps = problem.kind is Pass.FPROP and self.weights.keeps(tensors["w"])
        plan = self._planned(problem, keeps, choices.version())
        if not plan.folded:
            self._run(plan.chosen, problem, tensors)
            return
        dx, inner = tensors["x"], plan.ran
        padded = {**tensors, "x": dx.new_empty(inner.x_shape)}
        self._run(plan.chosen, inner, padded)
        dx.copy_(fold(problem, padded["x"], dx))

    def explain(self, problem: Problem) -> str:
        plan, inference = self.plan(problem), self.plan(problem, inference=True)
        text = plan.explain()
        if inference.chosen != plan.chosen:
            text += f"\n  without gradients, with transformed weights kept: {inference.name}, {inference.reason}"
        return text

    def _plan_anew(self, problem: Problem, kept_weights: bool, _: int) -> CpuPlan:
        return choices.decide(
            problem,
            kept_weights,
            self.environment(),
            lambda prefer: plan_cpu(problem, kept_weights=kept_weights, prefer=prefer),
        )

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
