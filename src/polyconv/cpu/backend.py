"""CPU backend: plans a problem and calls the chosen engine on its tensors."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor

from ..autotune import preferences
from ..backend import PrepareReport, PrepareRequest, Run
from ..numerics.known_weights import in_words
from ..problem import Pass, Problem
from ..runtime import state_version
from ..selection import TRIALS, Preference, by_cost, worth_timing
from ..tuning_key import Environment, problem_key
from . import native
from .engines import aten
from .planner import CLOCK, CpuPlan, dispatch_overhead, here, plan_cpu
from .weight_cache import TransformedWeights

if TYPE_CHECKING:
    from ..util.console import Progress


LARGEST_TIMED_WEIGHT = 2**25
"""Largest weight [elements] for which candidates are timed. A larger one is a matrix product written as a convolution,
as in a VGG: there is nothing to gain, and each candidate would take hundreds of megabytes more."""


class CpuBackend:
    """Implements :class:`polyconv.backend.Backend`."""

    name = "cpu"

    def __init__(self) -> None:
        native.why_absent()  # loads the kernels
        self.weights = TransformedWeights()
        self._planned = lru_cache(maxsize=4096)(self._plan_anew)

    def plan(self, problem: Problem, *, inference: bool = False, w: Tensor | None = None) -> CpuPlan:
        """The plan in force: modelled, tuned or agreed between ranks; with ``w``, the one that suits this weight."""
        found = self._planned(problem, inference, state_version.current())
        return found if w is None or not found.keeps_weights else found.for_weights(w)

    def candidates(self, problem: Problem, *, inference: bool = False) -> tuple[str, ...]:
        """Names of the candidates by ascending cost, ATen's convolution included."""
        plan = plan_cpu(problem, inference=inference)
        return tuple(candidate.name for candidate in by_cost(plan.candidates))

    def trials(self, problem: Problem, *, inference: bool = False, most: int = TRIALS) -> tuple[str, ...]:
        plan = plan_cpu(problem, inference=inference)
        if prod(problem.w_shape) > LARGEST_TIMED_WEIGHT:
            return (plan.name,)
        return _worth_timing(plan, most)

    def trial(self, problem: Problem, name: str, *, inference: bool = False) -> Run:
        plan = plan_cpu(problem, inference=inference, prefer=Preference(name))
        return plan.prepared(TransformedWeights())

    def dispatch_overhead(self, problem: Problem, ahead: Mapping[Pass, float], *, inference: bool = False) -> float:
        device = here()
        per_second = CLOCK * device.cores
        cycles = {kind: seconds * per_second for kind, seconds in ahead.items()}
        return dispatch_overhead(problem, device, inference, cycles) / per_second

    def trim_memory(self) -> None:
        """Call glibc's ``malloc_trim``: it returns free pages in the middle of the heap only on request."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def key(self, problem: Problem, *, inference: bool = False) -> str:
        return problem_key(problem, kept_weights=_may_keep_weights(problem, inference))

    def environment(self) -> Environment:
        return Environment.of_cpu(native.instruction_set() if native.is_available() else "")

    def prepare(self, problem: Problem, *, inference: bool = False) -> Run:
        """Plan a problem. In inference the plan may use the weight cache."""
        return self.plan(problem, inference=inference).prepared(self.weights)

    def prepare_all(self, asked: Sequence[PrepareRequest], progress: Progress) -> PrepareReport:
        """Make the plans. The kernels need no compilation."""
        began = time.perf_counter()
        progress.expect(len(asked))
        for problem, inference in asked:
            self.prepare(problem, inference=inference)
            progress.step(f"planned {problem}")
        return PrepareReport(len(asked), time.perf_counter() - began)

    def is_passthrough(self, problem: Problem, *, inference: bool = False) -> bool:
        plan = self.plan(problem, inference=inference)
        return plan.engine is aten and not plan.folded and aten.takes_tensors(problem)

    def explain(self, problem: Problem, w: Tensor | None = None) -> str:
        """Explain the plan of training and, where they differ, those of inference without and with a frozen weight."""
        said = self.plan(replace(problem, frozen=False))
        text = said.explain()
        for words, frozen in _INFERENCE[problem.kind]:
            plan = self.plan(replace(problem, frozen=frozen), inference=True)
            if (plan.chosen, plan.keeps_weights, plan.preference) != (said.chosen, said.keeps_weights, said.preference):
                kept = f", {_KEPT[frozen]}" if plan.keeps_weights else ""
                text += f"\n  {words}{kept}: {plan.name}, {plan.reason}"
                said = plan
        if w is not None:
            text += in_words(problem, said, w, partial(plan_cpu, inference=True))
        return text

    def _plan_anew(self, problem: Problem, inference: bool, _: int) -> CpuPlan:
        return preferences.decide(
            problem,
            _may_keep_weights(problem, inference),
            self.environment(),
            lambda prefer: plan_cpu(problem, inference=inference, prefer=prefer),
        )


_INFERENCE = {
    Pass.FPROP: (("without gradients", False), ("frozen, without gradients", True)),
    Pass.DGRAD: (("as a transposed convolution without gradients", False),),
    Pass.WGRAD: (),
}
"""Variants of a pass without gradients: description, and whether the weight is frozen."""

_KEPT = {
    False: "with transformed weights kept and the weight read to see a change",
    True: "with transformed weights kept",
}
"""Description of the weight cache, by whether the weight is frozen."""


def _may_keep_weights(problem: Problem, inference: bool) -> bool:
    """True if the weight cache may be used."""
    return inference and problem.kind is Pass.FPROP


@lru_cache(maxsize=1024)
def _worth_timing(plan: CpuPlan, most: int) -> tuple[str, ...]:
    return tuple(worth_timing(plan.candidates, most, _engine, always=aten.NAME))


def _engine(name: str) -> str:
    return name.rpartition(", ")[2]
