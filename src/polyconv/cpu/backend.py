"""The CPU backend: plans a problem and hands its tensors to the engine that was chosen."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from torch import Tensor

from .. import choices, epoch
from ..problem import Pass, Problem
from ..select import by_cost
from ..tuning import Environment
from . import aten, native
from .borders import fold
from .candidates import CpuCandidate, Engine
from .planner import CpuPlan, plan_cpu
from .weights import TransformedWeights

if TYPE_CHECKING:
    from ..backends import Run


class CpuBackend:
    """Implements :class:`polyconv.backends.Backend`."""

    name = "cpu"

    def __init__(self) -> None:
        native.why_absent()  # loads the kernels
        self.weights = TransformedWeights()
        self._planned = lru_cache(maxsize=4096)(self._plan_anew)

    def plan(self, problem: Problem, *, inference: bool = False) -> CpuPlan:
        """What would run: the model's choice, or one that was measured or agreed upon."""
        return self._planned(problem, _keeps_weights(problem, inference), epoch.now())

    def candidates(self, problem: Problem, *, inference: bool = False) -> tuple[str, ...]:
        """PyTorch's own convolution is one of them."""
        plan = plan_cpu(problem, kept_weights=_keeps_weights(problem, inference))
        return tuple(candidate.name for candidate in by_cost(plan.candidates))

    def environment(self) -> Environment:
        return Environment.of_cpu(native.instruction_set() if native.is_available() else "")

    def prepare(self, problem: Problem, *, inference: bool = False) -> Run:
        """Plan. In inference the transformed weights are kept between calls."""
        plan = self.plan(problem, inference=inference)
        run = self._engine(plan.chosen, plan.ran, keep=_keeps_weights(problem, inference))
        return run if not plan.folded else _folding(run, plan)

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

    def _engine(self, chosen: CpuCandidate, problem: Problem, *, keep: bool) -> Run:
        """The call of one engine. Everything but the tensors is settled here."""
        if chosen.engine is Engine.ATEN:
            return partial(aten.run, problem)
        geometry = native.geometry_numbers(problem)
        activation = native.activation_number(problem.activation)
        stem = {Engine.DEPTHWISE: "depthwise_", Engine.PLAIN: "plain_"}.get(chosen.engine)
        if stem is not None:
            op = native.operator(stem + problem.kind.value)
            if problem.kind is Pass.FPROP:
                return lambda t: op(t["x"], t["w"], t.get("bias"), t["y"], geometry, t.get("residual"), activation)
            if problem.kind is Pass.DGRAD:
                return lambda t: op(t["y"], t["w"], t["x"], geometry)
            return lambda t: op(t["x"], t["y"], t["dw"], t.get("db"), geometry)
        if problem.kind is Pass.WGRAD:
            algorithm, weight_gradient = [chosen.algorithm], native.operator("weight_gradient")
            return lambda t: weight_gradient(t["x"], t["y"], t["dw"], t.get("db"), geometry, algorithm)
        plan = native.plan_numbers(chosen.engine, chosen.algorithm)
        if problem.kind is Pass.DGRAD:
            input_gradient = native.operator("input_gradient")
            return lambda t: input_gradient(t["y"], t["w"], t["x"], geometry, plan)
        forward = native.operator("convolve")

        def convolve(tensors: MutableMapping[str, Tensor]) -> None:
            x, w, y = tensors["x"], tensors["w"], tensors["y"]
            transformed = self.weights.of(x, w, y, geometry, plan) if keep else None
            residual = tensors.get("residual")
            forward(x, w, tensors.get("bias"), y, geometry, plan, transformed, residual, activation)

        return convolve


def _keeps_weights(problem: Problem, inference: bool) -> bool:
    """Whether transformed weights stay from call to call."""
    return inference and problem.kind is Pass.FPROP


def _folding(run: Run, plan: CpuPlan) -> Run:
    """Runs on the padded image, then adds the gradients of the border to the pixels that it was made of."""
    problem, shape = plan.problem, plan.ran.x_shape

    def run_folded(tensors: MutableMapping[str, Tensor]) -> None:
        dx = tensors["x"]
        padded = {**tensors, "x": dx.new_empty(shape)}
        run(padded)
        dx.copy_(fold(problem, padded["x"], dx))

    return run_folded
