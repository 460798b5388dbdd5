"""The CPU planner: every candidate for a problem with its predicted error and cost, and the choice with its reasons.

Deterministic: the choice follows from the problem, its tolerance, the processor's description and, where there is one,
the preference. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..accuracy import Way
from ..known_weights import keeping_tolerance
from ..preference import Preference
from ..problem import IMAGE_CHANNELS, Pass, Problem
from ..readiness import Run
from ..select import Candidate, PlanError, Selection, by_cost, select, why_not
from . import aten, channel_lanes, depthwise, native, plain, sheets, tile_lanes
from .borders import fold, has_border, padded
from .candidates import CpuCandidate
from .device import CpuDevice, this_machine
from .processors import Correction, Formula, Profile, in_force, in_words
from .weights import TransformedWeights

CALL_CYCLES = 2000.0
"""What any call costs, so that no work at all is not free."""

OWN_CALL_CYCLES, RECORDED_CYCLES = 100e3, 250e3
"""What it costs to get to a kernel of polyconv's, where PyTorch's would have been called as a program calls it; and
where gradients are recorded: PyTorch computes both in one call, which spares it less than a whole one of them.
Measured not in a loop, where it is a quarter of that, but as in a network, whose other layers push Python's objects
out of the caches."""

RACED_CALL_CYCLES = 200e3
"""The first of these for a race, whose clock runs only inside of kernels: where other layers have used all caches, it
was two to four times as much. Estimates are cautious anyhow, times are not."""

MIXED_CYCLES = 900e3
"""What it costs beside that, once, if any pass of a layer whose gradients are recorded is polyconv's: then all three go
through Python instead of C++. All passes together have to be worth it. Measured alike."""

CLOCK = 2.5e9
"""Cycles per second of the cores on which all this was measured."""

CHECK_CYCLES, CHECK_BYTES = 8e3, 8.0
"""What it costs to find out whether a weight is still the one whose transform was kept: a call, bytes per cycle."""

MOST_FOR_THE_CHECK = 0.02
"""Share of a call that may go into that. A weight that would take more is transformed anew at each call."""

ENGINES: tuple[ModuleType, ...] = (tile_lanes, channel_lanes, depthwise, plain, aten)
"""Modules with a ``NAME``, ``candidates(problem, device)`` for problems of pictures and ``prepare(chosen, problem,
weights)``, where ``weights`` keeps transformed ones from call to call, or is None."""


def engine_of(candidate: CpuCandidate) -> ModuleType:
    """Who offers it, and runs it."""
    return next(engine for engine in (*ENGINES, sheets) if candidate.engine == engine.NAME)


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """What runs, and what does not and why."""

    problem: Problem
    costs: Costs
    chosen: CpuCandidate
    prefer: Preference | None = None
    own_kernels: bool = False
    """Whether only polyconv's own kernels were weighed: for a part of a volume."""

    @property
    def ran(self) -> Problem:
        """The problem as kernels are asked for it: the input gradient of a border is that of the padded image."""
        return self.costs.problem

    @property
    def device(self) -> CpuDevice:
        return self.costs.device

    @property
    def keeps_weights(self) -> bool:
        """Whether transformed weights stay from call to call."""
        return self.costs.keeps(self.chosen)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All of them, weighed anew; their costs are cycles of one core."""
        return _selection(self).candidates

    @property
    def preference(self) -> str:
        """What became of a choice from outside; empty where there was none."""
        return "" if self.prefer is None else _selection(self).preference

    @property
    def reason(self) -> str:
        """Why the chosen one, in a few words."""
        found = _selection(self)
        if self.prefer is not None and found.chosen.name == self.prefer.name:
            return found.preference
        return _reason(self.problem, found, self.costs) + (f" ({found.preference})" if found.preference else "")

    @property
    def uncovered(self) -> str:
        """Where too little was measured near the problem to go by an estimate: its class, and how far ahead of
        PyTorch's convolution a kernel has to be."""
        return _uncovered(_selection(self), self.costs)

    @property
    def folded(self) -> bool:
        """Whether the gradient of the padded image is computed first, and its border then added to the pixels."""
        return self.ran is not self.problem

    @property
    def choice(self) -> str:
        """The chosen candidate's name, by which it can be preferred."""
        return self.chosen.name

    @property
    def engine(self) -> ModuleType:
        """Who computes."""
        return engine_of(self.chosen)

    @property
    def name(self) -> str:
        return f"{self.choice}, border folded" if self.folded else self.choice

    @property
    def predicted_error(self) -> float:
        """The largest error of any output element to be expected, relative to the output's scale."""
        return self.chosen.error

    @property
    def cost(self) -> float:
        """What was compared with the other candidates', in cycles of one core."""
        return self.costs.cautious(self.chosen)

    @property
    def ways(self) -> tuple[Way, ...]:
        """How output maps are summed by fast algorithms: what the error for known weights follows from."""
        engine: Any = self.engine
        return tuple(engine.ways(self.chosen, self.ran)) if hasattr(engine, "ways") else ()

    def prepared(self, weights: TransformedWeights | None) -> Run:
        """What runs it; transformed weights, where they may be kept, stay in ``weights``.

        A weight that is kept is known: where the plan does not keep its tolerance for it, another one runs.
        """
        engine: Any = self.engine
        if self.keeps_weights and weights is not None and self.ways:
            run: Run = engine.prepare(self.chosen, self.ran, weights, self.instead)
        else:
            run = engine.prepare(self.chosen, self.ran, weights if self.keeps_weights else None)
        return _folding(run, self) if self.folded else run

    def for_weights(self, w: Tensor) -> CpuPlan:
        """The plan that keeps the tolerance for these weights: this one, or one that rounds less."""
        return keeping_tolerance(
            self.problem, self, w, lambda asked: plan_cpu(asked, self.device, inference=self.keeps_weights)
        )

    def instead(self, w: Tensor) -> Run | None:
        """What runs in its place for weights for which it does not keep its tolerance."""
        found = self.for_weights(w)
        return None if found is self else found.prepared(TransformedWeights())

    def explain(self, *, verbose: bool = False) -> str:
        """The plan in words: what runs, and why others do not: the next best, or all (verbose)."""
        runs = f"  runs {self.name} on {self.device.instruction_set}: {self.reason}"
        error = f"predicted error {self.predicted_error:.1e}"
        said = [str(self.problem), f"{runs}; {error}", *why_not(self.candidates, verbose=verbose)]
        if self.device.profile is not None:
            said.append(f"  estimates are corrected by the profile of {self.device.profile}")
            said += [f"  {self.uncovered}"] if self.uncovered else []
        if isinstance(self.chosen, sheets.SheetCandidate):
            said += self.chosen.plan.in_words(verbose=verbose)
        return "\n".join(said)


def plan_cpu(
    problem: Problem,
    device: CpuDevice | None = None,
    *,
    inference: bool = False,
    prefer: Preference | None = None,
) -> CpuPlan:
    """The plan for a problem on this processor, or on one that is described.

    In inference the weight of a forward pass is likely to stay what it is, and transformed weights of earlier calls may
    be used: then a transform that would not pay for one call may be the better choice. They are used where finding out
    whether they are still right costs little beside the call, or nothing, because the weight is frozen. Otherwise
    gradients are recorded, and a pass is chosen in view of the two others. What is preferred runs if it can and keeps
    the tolerance.
    """
    return _plan(problem, device or here(), inference, prefer)


@lru_cache(maxsize=4096)
def _plan(problem: Problem, device: CpuDevice, inference: bool, prefer: Preference | None) -> CpuPlan:
    if problem.rank != 3 and (other_axes := problem.why_not_pictures()):
        raise PlanError(other_axes)
    return _plan_of(problem, _costs(problem, device, inference), prefer)


@lru_cache(maxsize=4096)
def _plan_of_picture(problem: Problem, device: CpuDevice) -> CpuPlan:
    """Of a part of a volume, by polyconv's own kernels."""
    return _plan_of(problem, Costs(ran_for(problem), device, False), None, own_kernels=True)


def _plan_of(problem: Problem, costs: Costs, prefer: Preference | None, *, own_kernels: bool = False) -> CpuPlan:
    every = _every(problem, costs.device, own_kernels)
    chosen = None
    if prefer is not None:
        chosen = next((one for one in every if one.name == prefer.name and _may_run(one, problem)), None)
    if chosen is None:
        chosen = _cheapest(every, problem, costs)
    if chosen is None:
        chosen = _select(problem, costs, every, prefer).chosen  # raises: it says why there is none
    return CpuPlan(problem, costs, chosen, prefer, own_kernels)


def _cheapest(every: Iterable[CpuCandidate], problem: Problem, costs: Costs) -> CpuCandidate | None:
    """The candidate that :func:`~polyconv.select.select` finds: the least cost of those that may run, first of equals.

    Errors are asked for from the least cost on, until one keeps the tolerance: most are never asked for.
    """
    able = [(costs.cautious(one), place, one) for place, one in enumerate(every) if one.refusal is None]
    able.sort()
    return next((one for _, _, one in able if _may_run(one, problem)), None)


def _may_run(candidate: CpuCandidate, problem: Problem) -> bool:
    return candidate.refusal is None and (candidate.direct or candidate.error <= problem.tolerance)


def _every(problem: Problem, device: CpuDevice, own_kernels: bool) -> tuple[CpuCandidate, ...]:
    if own_kernels:
        return tuple(offered(ran_for(problem), device, own_kernels=True))
    if problem.rank == 2 and (problem.bias or problem.frozen):  # nothing of a candidate depends on them
        problem = replace(problem, bias=False, frozen=False)
    return _offered_here(problem, device)


@lru_cache(maxsize=16)
def _selection(plan: CpuPlan) -> Selection[CpuCandidate]:
    """All candidates of a plan with the reasons why they do not run: for those who ask why, and for races."""
    every = _every(plan.problem, plan.device, plan.own_kernels)
    return _select(plan.problem, plan.costs, every, plan.prefer)


def _select(
    problem: Problem, costs: Costs, every: Sequence[CpuCandidate], prefer: Preference | None
) -> Selection[CpuCandidate]:
    return select(
        every,
        problem,
        refusal=lambda candidate: candidate.refusal,
        error=lambda candidate: candidate.error,
        cost=costs.cautious,
        prefer=prefer,
    )


def ran_for(problem: Problem) -> Problem:
    """What the kernels are asked for: the input gradient of a border is that of the padded image."""
    folded = problem.rank == 2 and problem.kind is Pass.DGRAD and has_border(problem)
    return padded(problem) if folded else problem


@lru_cache(maxsize=64)
def _offered_here(problem: Problem, device: CpuDevice) -> tuple[CpuCandidate, ...]:
    volumes = problem.rank == 3
    return tuple(offered_for_volumes(problem, device) if volumes else offered(ran_for(problem), device))


def _costs(problem: Problem, device: CpuDevice, inference: bool) -> Costs:
    costs = Costs(ran_for(problem), device, inference)
    return costs if device.profile is None else replace(costs, call=head_start(problem, device, inference))


def head_start(
    problem: Problem, device: CpuDevice, inference: bool, ahead: Mapping[Pass, float] | None = None
) -> float:
    """Cycles that it costs to get to a kernel of polyconv's: by so many PyTorch's is ahead before it computes anything.

    One core goes there while all others wait: what is compared is the work of all of them. Where gradients are
    recorded, a pass pays what the others of its layer do not gain of :data:`MIXED_CYCLES`. ``ahead``: in a race, cycles
    by which a kernel of polyconv's is ahead of PyTorch's in other passes.
    """
    if inference:
        return device.cores * (OWN_CALL_CYCLES if ahead is None else RACED_CALL_CYCLES)
    recorded = device.cores * RECORDED_CYCLES
    image = problem.in_channels <= IMAGE_CHANNELS
    others = [kind for kind in Pass if kind is not problem.kind and not (kind is Pass.DGRAD and image)]
    paid = sum(
        max(0.0, ahead[kind] - recorded) if ahead and kind in ahead else _gain(problem.another_pass(kind), device)
        for kind in others
    )
    return recorded + max(0.0, device.cores * MIXED_CYCLES - paid)


@lru_cache(maxsize=4096)
def _gain(problem: Problem, device: CpuDevice) -> float:
    """Cycles by which polyconv's best kernel for a pass is ahead of PyTorch's, probably; 0 where it is not."""
    costs = Costs(ran_for(problem), device, False, device.cores * RECORDED_CYCLES)
    every = _every(problem, device, False)
    theirs, ours = (
        _cheapest((one for one in every if (one.engine == aten.NAME) is is_theirs), problem, costs)
        for is_theirs in (True, False)
    )
    return max(0.0, costs.cautious(theirs) - costs.cautious(ours)) if theirs and ours else 0.0


def here() -> CpuDevice:
    """The processor that runs this, as it is set up now: as many cores as PyTorch's pool has threads."""
    instruction_set = native.instruction_set() if native.is_available() else aten.instruction_set()
    threads = torch.get_num_threads()
    return _described(instruction_set, threads, in_force(instruction_set, threads))


@lru_cache(maxsize=16)
def _described(instruction_set: str, threads: int, profile: Profile | None) -> CpuDevice:
    return replace(this_machine(instruction_set), cores=threads, profile=profile)


@dataclass(frozen=True, slots=True)
class Costs:
    """What candidates cost, in cycles of one core."""

    problem: Problem
    device: CpuDevice
    inference: bool
    call: float = OWN_CALL_CYCLES
    """What a kernel of polyconv's costs beside what it computes."""
    _check: float = field(init=False, compare=False, repr=False)
    """To find out whether a weight is still the one that was transformed."""
    _corrections: dict[Formula, Correction] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Of the kernels that were asked about: few formulas, many candidates."""

    def __post_init__(self) -> None:
        problem = self.problem
        check = 0.0 if problem.frozen else CHECK_CYCLES + 4.0 * prod(problem.w_shape) / CHECK_BYTES
        object.__setattr__(self, "_check", check)

    def keeps(self, candidate: CpuCandidate) -> bool:
        """Whether it uses weights that were transformed before."""
        if not self.inference or self.problem.kind is not Pass.FPROP or candidate.weight_cycles <= 0.0:
            return False
        return self._check <= MOST_FOR_THE_CHECK * (candidate.cycles - candidate.weight_cycles)

    def counted(self, candidate: CpuCandidate) -> float:
        """By the cost model."""
        saved = candidate.weight_cycles - self._check if self.keeps(candidate) else 0.0
        return CALL_CYCLES + candidate.cycles - saved

    def correction(self, candidate: CpuCandidate) -> Correction | None:
        """By what was measured; None for PyTorch's convolution, which all others are compared with, and for sums of
        pictures, whose parts are corrected."""
        if self.device.profile is None or candidate.engine in (aten.NAME, sheets.NAME):
            return None
        formula = candidate.engine, candidate.form == "direct", self.keeps(candidate)
        found = self._corrections.get(formula)
        if found is None:
            found = self._corrections[formula] = self.device.profile.corrected(self.problem, formula)
        return found

    def cautious(self, candidate: CpuCandidate) -> float:
        """What is compared: a kernel of polyconv's has to be ahead by as much as its estimate may well be wrong."""
        counted = self.counted(candidate)
        if self.device.profile is None or candidate.engine == aten.NAME:
            return counted
        correction = self.correction(candidate)
        return self.call + (counted if correction is None else counted * correction.factor)


def offered(problem: Problem, device: CpuDevice, *, own_kernels: bool = False) -> Iterator[CpuCandidate]:
    """Every candidate of every engine that has kernels for the problem's dtype; ``own_kernels``: but PyTorch's."""
    if not native.takes(problem):
        yield from aten.candidates(problem, device)
    elif problem.dtype == "float64":
        yield from plain.candidates(problem, device)
    else:
        for engine in ENGINES:
            if engine is not aten or not own_kernels:
                yield from engine.candidates(problem, device)


def offered_for_volumes(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The same for three axes: what polyconv's engines make of the pictures, or PyTorch's convolution of the whole.

    Of pictures that lie in a volume PyTorch's would have to make copies.
    """
    own = native.takes(problem)
    if own:
        yield from sheets.candidates(problem, device, lambda picture: _plan_of_picture(picture, device))
    if not own or problem.dtype == "float32":
        yield from aten.candidates(problem, device)


def _folding(run: Run, plan: CpuPlan) -> Run:
    """Runs on the padded image, then adds the gradients of the border to the pixels that it was made of."""
    problem, shape = plan.problem, plan.ran.x_shape

    def run_folded(tensors: MutableMapping[str, Tensor]) -> None:
        dx = tensors["x"]
        padded = {**tensors, "x": dx.new_empty(shape)}
        run(padded)
        dx.copy_(fold(problem, padded["x"], dx))

    return run_folded


def _reason(problem: Problem, found: Selection[CpuCandidate], costs: Costs) -> str:
    """Why the chosen one, in a few words."""
    chosen = found.chosen
    if len(found.able) == 1:
        alone = chosen.engine == aten.NAME
        return aten.why_alone(problem) if alone else f"{problem.dtype} is for checking, not for speed"
    if costs.device.profile is not None and any(candidate.engine == aten.NAME for candidate in found.able):
        return _advantage(found, costs)
    direct = [c for c in found.able if c.direct and c is not chosen and c.engine != plain.NAME]
    if not direct:
        return "the least estimated time"
    ratio = min(map(costs.counted, direct)) / costs.counted(chosen)
    what = "the next direct one" if chosen.direct else "direct summation"
    return f"estimated {ratio:.1f} times as fast as {what}"


def _uncovered(found: Selection[CpuCandidate], costs: Costs) -> str:
    """What a plan says where the estimate that decides, of polyconv's best kernel, is in no measured neighbourhood."""
    ours = {candidate.name: candidate for candidate in found.able if candidate.engine != aten.NAME}
    if costs.device.profile is None or not 0 < len(ours) < len(found.able):
        return ""
    if costs.problem.rank == 3:
        return "not covered by it: convolutions over three axes, of which no profile has any"
    correction = costs.correction(ours[next(one.name for one in by_cost(found.candidates) if one.name in ours)])
    if correction is None or correction.covered:
        return ""
    ahead = f"a kernel of polyconv's runs if it is estimated to be ahead by {correction.factor:.0f} times"
    return f"not covered by it: {in_words(costs.problem)}; {ahead}"


def _advantage(found: Selection[CpuCandidate], costs: Costs) -> str:
    """The same where estimates are corrected by measurements. Of a class that is not covered, only what is certain."""
    theirs = next(candidate for candidate in found.able if candidate.engine == aten.NAME)
    correction, least = costs.correction(found.chosen), costs.counted(theirs) / costs.cautious(found.chosen)
    if found.chosen is theirs:
        return "no kernel of polyconv's is ahead of it by as much as the estimate may be wrong"
    if correction is None or not correction.covered:
        return f"probably at least {least:.1f} times as fast as PyTorch's convolution"
    ratio = costs.counted(theirs) / (costs.call + costs.counted(found.chosen) * exp(correction.shift))
    return f"estimated {ratio:.1f} times as fast as PyTorch's convolution, probably at least {least:.1f} times"
