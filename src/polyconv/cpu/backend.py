"""The CPU backend: plans a problem and hands its tensors to the engine that was chosen."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import TYPE_CHECKING

from torch import Tensor

from .. import choices, epoch
from ..known_weights import in_words
from ..preference import Preference
from ..problem import Pass, Problem
from ..readiness import Asked, Ready, Run
from ..select import by_cost, worth_timing
from ..standings import CONTENDERS
from ..tuning import Environment, problem_key
from . import aten, native
from .planner import CLOCK, CpuPlan, head_start, here, plan_cpu
from .weights import TransformedWeights

if TYPE_CHECKING:
    from ..console import Progress


LARGEST_TIMED_WEIGHT = 2**25
"""Elements of a weight up to which candidates are timed. A larger one is a matrix that is written as a convolution, as
in a VGG: there is nothing to gain, and each candidate would take as many hundreds of megabytes once more."""


class CpuBackend:
    """Implements :class:`polyconv.backends.Backend`."""

    name = "cpu"

    def __init__(self) -> None:
        native.why_absent()  # loads the kernels
        self.weights = TransformedWeights()
        self._planned = lru_cache(maxsize=4096)(self._plan_anew)

    def plan(self, problem: Problem, *, inference: bool = False, w: Tensor | None = None) -> CpuPlan:
        """What would run: the model's choice, or one that was measured or agreed upon; or what suits the weight."""
        found = self._planned(problem, inference, epoch.now())
        return found if w is None or not found.keeps_weights else found.for_weights(w)

    def candidates(self, problem: Problem, *, inference: bool = False) -> tuple[str, ...]:
        """PyTorch's own convolution is one of them."""
        plan = plan_cpu(problem, inference=inference)
        return tuple(candidate.name for candidate in by_cost(plan.candidates))

    def contenders(self, problem: Problem, *, inference: bool = False, most: int = CONTENDERS) -> tuple[str, ...]:
        plan = plan_cpu(problem, inference=inference)
        if prod(problem.w_shape) > LARGEST_TIMED_WEIGHT:
            return (plan.name,)
        return _worth_timing(plan, most)

    def contender(self, problem: Problem, name: str, *, inference: bool = False) -> Run:
        plan = plan_cpu(problem, inference=inference, prefer=Preference(name))
        return plan.prepared(TransformedWeights())

    def head_start(self, problem: Problem, ahead: Mapping[Pass, float], *, inference: bool = False) -> float:
        device = here()
        per_second = CLOCK * device.cores
        cycles = {kind: seconds * per_second for kind, seconds in ahead.items()}
        return head_start(problem, device, inference, cycles) / per_second

    def give_back(self) -> None:
        """What torch freed lies between what it did not: glibc returns such pages only when it is asked to."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def key(self, problem: Problem, *, inference: bool = False) -> str:
        return problem_key(problem, kept_weights=_may_keep_weights(problem, inference))

    def environment(self) -> Environment:
        return Environment.of_cpu(native.instruction_set() if native.is_available() else "")

    def prepare(self, problem: Problem, *, inference: bool = False) -> Run:
        """Plan. In inference transformed weights may be kept between calls."""
        return self.plan(problem, inference=inference).prepared(self.weights)

    def prepare_all(self, asked: Sequence[Asked], progress: Progress) -> Ready:
        """The kernels are compiled already: what there is to make are the plans."""
        began = time.perf_counter()
        progress.expect(len(asked))
        for problem, inference in asked:
            self.prepare(problem, inference=inference)
            progress.step(f"planned {problem}")
        return Ready(len(asked), time.perf_counter() - began)

    def leaves_to_torch(self, problem: Problem, *, inference: bool = False) -> bool:
        plan = self.plan(problem, inference=inference)
        return plan.engine is aten and not plan.folded and aten.takes_tensors(problem)

    def explain(self, problem: Problem, w: Tensor | None = None) -> str:
        """That of training, and where they differ those of inference, without and with a frozen weight."""
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
        return choices.decide(
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
"""What a pass may be asked for without gradients: words, and whether the weight is frozen."""

_KEPT = {
    False: "with transformed weights kept and the weight read to see a change",
    True: "with transformed weights kept",
}
"""By whether the weight is frozen."""


def _may_keep_weights(problem: Problem, inference: bool) -> bool:
    """Whether transformed weights may stay from call to call."""
    return inference and problem.kind is Pass.FPROP


@lru_cache(maxsize=1024)
def _worth_timing(plan: CpuPlan, most: int) -> tuple[str, ...]:
    return tuple(worth_timing(plan.candidates, most, _engine, always=aten.NAME))


def _engine(name: str) -> str:
    """Whose candidate it is."""
    return name.rpartition(", ")[2]
