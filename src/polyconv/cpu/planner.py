"""The CPU planner: lists every candidate with its predicted error and cost, and chooses one.

Deterministic: the choice depends on the problem, its tolerance, the device description and the preference, if any.
Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import exp, prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..backend import Run
from ..lowering.border import Folded, has_border, padded
from ..lowering.widen import Widened, widened
from ..numerics.known_weights import keeping_tolerance
from ..numerics.prediction import Way, rounding_error, with_numeric_tolerance
from ..problem import HALF_DTYPES, IMAGE_CHANNELS, Pass, Problem, planned_length
from ..selection import TRIALS, Candidate, PlanError, Preference, Selection, by_cost, select, why_not, worth_timing
from . import native
from .costs import OWN_CALL_CYCLES, RECORDED_CYCLES, UNPROFILED, Costs
from .device import CpuDevice, this_machine
from .engines import aten, channel_lanes, depthwise, depthwise_volumes, pointwise, reference, signals, tile_lanes
from .engines import volumes as engines_volumes
from .engines.in_torch import fourier, frames, patches
from .plan import CpuCandidate
from .profiles import Profile, in_force, in_words
from .weight_cache import TransformedWeights

TRIAL_CALL_CYCLES = 200e3
""":data:`OWN_CALL_CYCLES` for trials, whose clock covers only the kernels. With cold caches the overhead was two to
four times as large; estimates have a safety margin, measured times have none."""

MIXED_CYCLES = 900e3
"""Additional overhead, once per training layer, if any pass runs a native kernel: then all three passes go through
Python instead of C++, and must together gain as much. Measured in the same way."""

CLOCK = 2.5e9
"""Clock [Hz] of the cores on which these constants were measured."""

CONVERTED_CYCLES = 1.0
"""Cycles per element that is widened to float32 or rounded to half precision: bound by memory."""

CONVERTED_CALL_CYCLES = 100e3
"""Cost per core of the calls that convert whole tensors, where ATen takes them as they are: 38 to 50 us were measured
for forward passes of 1 to 64 channels and up to 8 x 8 pixels."""

CONVERTED_IN_CACHE = 0.3
"""Share of the cost per element where kernels convert small blocks."""

WIDENED_AT_A_TIME = 2**20
"""Elements of input and output that are widened together, at most or for one image, so that they stay in a cache."""

WEIGHT_SHARE = 8
"""Least ratio of these elements to those of the weight, which may be transformed for each block."""

MOST_HOLDING = 64
"""Most predictions that are remembered for a weight."""

LARGEST_TIMED_WEIGHT = 2**25
"""Largest weight [elements] for which candidates are timed. A larger one is a matrix product written as a convolution,
as in a VGG: there is nothing to gain, and each candidate would take hundreds of megabytes more."""

ENGINES: tuple[ModuleType, ...] = (
    *(tile_lanes, channel_lanes, pointwise, depthwise, signals, patches, fourier, frames, reference, aten),
)
"""Modules with a ``NAME``, ``candidates(problem, device)`` for 2-D problems and ``prepare(chosen, problem, weights)``,
where ``weights`` is the weight cache or None."""

HALF_ENGINES = (pointwise, signals, patches)
"""Engines that take half precision, too."""

VOLUME_ENGINES = (engines_volumes, depthwise_volumes)
"""Engines of 3-D problems alone."""

BATCHED: tuple[ModuleType, ...] = (tile_lanes, channel_lanes, pointwise, aten)
"""Engines whose prepared forward pass and input gradient take any number of images."""


def engine_of(candidate: CpuCandidate) -> ModuleType:
    """The engine that offers and runs a candidate."""
    return next(engine for engine in (*ENGINES, *VOLUME_ENGINES) if candidate.engine == engine.NAME)


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """The chosen candidate, with what is needed to explain the others' rejection."""

    problem: Problem
    costs: Costs
    chosen: CpuCandidate
    prefer: Preference | None = None
    own_kernels: bool = False
    """Only native kernels are candidates: the problem is a slice of a volume."""

    @property
    def ran(self) -> Problem:
        """The problem passed to kernels: the padded one, if a border's input gradient is folded; in float32, if half
        precision is widened."""
        return self.costs.problem if self.chosen.widened or not self._is_half else ran_for(self.problem)

    @property
    def device(self) -> CpuDevice:
        return self.costs.device

    @property
    def keeps_weights(self) -> bool:
        """True if the chosen candidate uses the weight cache."""
        return self.costs.keeps(self.chosen)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All candidates, evaluated again. Costs in cycles of one core."""
        found = _selection(self).candidates
        rounding = rounding_error(self.problem)
        if not rounding:
            return found
        wide = {one.name for one in _every(self.problem, self.device, self.own_kernels) if one.widened}
        return tuple(replace(c, error=c.error + rounding) if c.error and c.name in wide else c for c in found)

    @property
    def preference(self) -> str:
        """Outcome of the preference; empty if there was none."""
        return "" if self.prefer is None else _selection(self).preference

    @property
    def reason(self) -> str:
        found = _selection(self)
        if self.prefer is not None and found.chosen.name == self.prefer.name:
            return found.preference
        return _reason(self.problem, found, self.costs) + (f" ({found.preference})" if found.preference else "")

    @property
    def uncovered(self) -> str:
        """Message for a problem without measurements nearby: its class and the required speed-up over ATen. Else
        empty."""
        return _uncovered(_selection(self), self.costs)

    @property
    def folded(self) -> bool:
        """True if the gradient of the padded input is computed first, and its border then added to the pixels."""
        return _is_folded(self.problem)

    @property
    def _is_half(self) -> bool:
        return self.problem.dtype in HALF_DTYPES

    @property
    def choice(self) -> str:
        """The chosen candidate's name, as used in a :class:`~polyconv.selection.Preference`."""
        return self.chosen.name

    @property
    def engine(self) -> ModuleType:
        return engine_of(self.chosen)

    @property
    def name(self) -> str:
        return f"{self.choice}, border folded" if self.folded else self.choice

    @property
    def predicted_error(self) -> float:
        """Largest expected error of any output element, relative to the output's scale."""
        return self.chosen.error + (rounding_error(self.problem) if self.chosen.widened else 0.0)

    @property
    def cost(self) -> float:
        """The compared cost [cycles of one core]."""
        return self.costs.cautious(self.chosen)

    @property
    def ways(self) -> tuple[Way, ...]:
        """How fast algorithms sum the output maps; input of the error prediction for known weights. In half precision
        the float32 plan has them: here the rounding of the result covers what they tell."""
        engine: Any = self.engine
        return tuple(engine.ways(self.chosen, self.ran)) if hasattr(engine, "ways") and not self._is_half else ()

    @property
    def passthrough(self) -> bool:
        """True if it is ATen's convolution on unchanged tensors."""
        unchanged = not self.folded and not self.chosen.widened and aten.takes_tensors(self.problem)
        return self.engine is aten and unchanged

    def trials(self, most: int = TRIALS) -> tuple[str, ...]:
        """Names of candidates worth timing, in the cost model's order."""
        return (self.name,) if prod(self.problem.w_shape) > LARGEST_TIMED_WEIGHT else _worth_timing(self, most)

    def dispatch_overhead(self, ahead: Mapping[Pass, float]) -> float:
        """Dispatch overhead over a direct call of ATen [s], given the gains of other passes [s]."""
        per_second = CLOCK * self.device.cores
        cycles = {kind: seconds * per_second for kind, seconds in ahead.items()}
        return dispatch_overhead(self.problem, self.device, self.costs.inference, cycles) / per_second

    def with_parts(self, plan: Callable[[Problem], Any]) -> CpuPlan:
        """This plan: slices of a volume are planned by native kernels, whatever is preferred for such a problem."""
        return self

    def prepared(self, weights: TransformedWeights | None) -> Run:
        """Bind the plan to its kernel and, if the plan uses it, the weight cache. A cached weight is known, so a plan
        that misses its tolerance for it is replaced by another one."""
        if self._is_half and self.chosen.widened:
            if self._takes_half:
                prepared: Run = engine_of(self.chosen).prepare(self.chosen, self.problem, None)
                return prepared
            wide = CpuPlan(widened(self.problem), self.costs, self.chosen, None, own_kernels=True)
            keeps = self.keeps_weights and weights is not None  # the cache widens a weight itself, once
            untouched = ("w", "owner") if keeps else ("owner",)
            runs = {wide.problem: wide.prepared(weights)}
            return Widened(self.problem).adapt(runs, self._images, untouched, native.scratch)
        engine: Any = self.engine
        if self.keeps_weights and weights is not None and self.ways:
            run: Run = engine.prepare(self.chosen, self.ran, weights, self.instead)
        else:
            run = engine.prepare(self.chosen, self.ran, weights if self.keeps_weights else None)
        return Folded(self.problem).adapt({self.ran: run}) if self.folded else run

    @property
    def _takes_half(self) -> bool:
        """True if the kernels widen the tensors themselves."""
        return not self.folded and _converts(self.chosen, self.problem)

    @property
    def _images(self) -> int | None:
        """Images of a block that is widened at a time; None: all, if the weight would be transformed too often."""
        problem = self.problem
        if self.engine not in BATCHED or problem.kind is Pass.WGRAD or self.folded:
            return None
        image = (prod(problem.x_shape) + prod(problem.y_shape)) // problem.batch
        images = max(1, WIDENED_AT_A_TIME // image)
        return images if prod(problem.w_shape) * WEIGHT_SHARE <= images * image else None

    def for_weights(self, w: Tensor) -> CpuPlan:
        """The plan that keeps the tolerance for this weight: this one, or one with smaller rounding errors."""
        return keeping_tolerance(
            self.problem, self, w, lambda asked: plan_cpu(asked, self.device, inference=self.keeps_weights)
        )

    def instead(self, w: Tensor, holding: set[object]) -> Run | None:
        """The replacement for a weight for which this plan misses its tolerance; None if it keeps it. ``holding``
        belongs to the weight's transform, which fixes stride and dilation; the error is that of all image sizes."""
        prediction = self.ways, self.problem.tolerance, self.predicted_error
        if prediction in holding:
            return None
        found = self.for_weights(w)
        if found is self:
            if len(holding) >= MOST_HOLDING:
                holding.clear()
            holding.add(prediction)
            return None
        return found.prepared(TransformedWeights())

    def explain(self, *, verbose: bool = False) -> str:
        """Describe what runs, and why the next best candidates (``verbose``: all others) do not."""
        runs = f"  runs {self.name} on {self.device.instruction_set}: {self.reason}"
        error = f"predicted error {self.predicted_error:.1e}"
        said = [str(self.problem), f"{runs}; {error}", *why_not(self.candidates, verbose=verbose)]
        if self.device.profile is not None:
            said.append(f"  estimates are corrected by the profile of {self.device.profile}")
            said += [f"  {self.uncovered}"] if self.uncovered else []
        if isinstance(self.chosen, engines_volumes.VolumeCandidate):
            said += self.chosen.plan.in_words(verbose=verbose)
        return "\n".join(said)


def plan_cpu(
    problem: Problem,
    device: CpuDevice | None = None,
    *,
    inference: bool = False,
    prefer: Preference | None = None,
) -> CpuPlan:
    """Plan a problem for this processor, or for a described one.

    In inference a forward pass may use the weight cache, which favours transforms that would not pay off in a single
    call. It does so if the weight is frozen or the check for changes is cheap. Without ``inference`` gradients are
    recorded, and each pass is chosen in view of the other two. ``prefer`` is followed if that candidate can run and
    keeps the tolerance.
    """
    return _plan(with_numeric_tolerance(problem, has_tf32=False), device or here(), inference, prefer)


@lru_cache(maxsize=4096)
def _plan(problem: Problem, device: CpuDevice, inference: bool, prefer: Preference | None) -> CpuPlan:
    if problem.rank != 3 and (other_axes := problem.why_not_2d()):
        raise PlanError(other_axes)
    if prefer is None and (similar := _of_round_length(problem)) is not None:
        found = _planned_like(problem, _plan(similar, device, inference, None))
        if found is not None:
            return found
    return _plan_of(problem, _costs(problem, device, inference), prefer)


def _of_round_length(problem: Problem) -> Problem | None:
    """The problem of a signal (a 2-D problem of height 1) from which the choice is taken
    (:func:`~polyconv.problem.planned_length`). None for other problems, and where it is this one."""
    if problem.rank != 2 or problem.in_size[0] != 1 or problem.kernel[0] != 1 or problem.dtype != "float32":
        return None
    length, padding = problem.in_size[1], problem.padding
    rounded = planned_length(length, padding[2] + padding[3], (problem.kernel[1] - 1) * problem.dilation[1] + 1)
    if rounded == length or not problem.is_contiguous:
        return None
    return replace(problem, in_size=(1, rounded)).contiguous()


def _planned_like(problem: Problem, plan: CpuPlan) -> CpuPlan | None:
    """The plan with another one's choice, if that candidate can run the problem and keeps the tolerance. A new length
    costs the estimate of one engine instead of all."""
    every = plan.engine.candidates(ran_for(problem), plan.device)
    chosen = next((one for one in every if one.name == plan.choice and _may_run(one, problem)), None)
    if chosen is None:
        return None
    source = f"chosen for signals of {plan.problem.in_size[1]} samples"
    costs = replace(plan.costs, problem=_computed(problem))
    return CpuPlan(problem, costs, chosen, Preference(plan.choice, source))


@lru_cache(maxsize=4096)
def _plan_2d(problem: Problem, device: CpuDevice) -> CpuPlan:
    """Plan a slice of a volume by native kernels."""
    return _plan_of(problem, Costs(ran_for(problem), device, False), None, own_kernels=True)


def _plan_of(problem: Problem, costs: Costs, prefer: Preference | None, *, own_kernels: bool = False) -> CpuPlan:
    if prefer is None and not own_kernels and (theirs := _below_a_call(problem, costs)) is not None:
        return CpuPlan(problem, costs, theirs)
    every = _every(problem, costs.device, own_kernels)
    chosen = None
    if prefer is not None:
        chosen = next((one for one in every if one.name == prefer.name and _may_run(one, problem)), None)
    if chosen is None:
        chosen = _cheapest(every, problem, costs)
    if chosen is None:
        chosen = _select(problem, costs, every, prefer).chosen  # raises with the reasons
    return CpuPlan(problem, costs, chosen, prefer, own_kernels)


def _below_a_call(problem: Problem, costs: Costs) -> CpuCandidate | None:
    """ATen's candidate if it costs less than the call of any other does, so that these need not be estimated."""
    if costs.device.profile is None or problem.dtype != "float32":
        return None
    (theirs,) = aten.candidates(ran_for(problem), costs.device)
    return theirs if costs.cautious(theirs) <= costs.call else None


def _cheapest(every: Iterable[CpuCandidate], problem: Problem, costs: Costs) -> CpuCandidate | None:
    """The choice of :func:`~polyconv.selection.select`: least cost among those that may run, the first of equals.
    Errors are evaluated by ascending cost until one keeps the tolerance, so most never are."""
    able = [(costs.cautious(one), place, one) for place, one in enumerate(every) if one.refusal is None]
    able.sort()
    return next((one for _, _, one in able if _may_run(one, problem)), None)


def _may_run(candidate: CpuCandidate, problem: Problem) -> bool:
    return candidate.refusal is None and (candidate.direct or candidate.error <= problem.tolerance)


def _every(problem: Problem, device: CpuDevice, own_kernels: bool) -> tuple[CpuCandidate, ...]:
    if own_kernels:
        return tuple(offered(ran_for(problem), device, own_kernels=True))
    if problem.rank == 2 and (problem.bias or problem.frozen):  # no candidate depends on them
        problem = replace(problem, bias=False, frozen=False)
    return _offered_here(problem, device)


@lru_cache(maxsize=16)
def _selection(plan: CpuPlan) -> Selection[CpuCandidate]:
    """All candidates of a plan with the reasons of their rejection, for explanations and autotuning."""
    every = _every(plan.problem, plan.device, plan.own_kernels)
    return _select(plan.problem, plan.costs, every, plan.prefer)


@lru_cache(maxsize=1024)
def _worth_timing(plan: CpuPlan, most: int) -> tuple[str, ...]:
    return tuple(worth_timing(plan.candidates, most, lambda name: name.rpartition(", ")[2], always=aten.NAME))


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
    """The problem passed to kernels: for the input gradient with a border, that of the padded input."""
    return padded(problem) if _is_folded(problem) else problem


def _is_folded(problem: Problem) -> bool:
    return problem.rank == 2 and problem.kind is Pass.DGRAD and has_border(problem)


def _computed(problem: Problem) -> Problem:
    """The problem that native kernels compute: half precision is widened."""
    return ran_for(widened(problem) if problem.dtype in HALF_DTYPES else problem)


@lru_cache(maxsize=64)
def _offered_here(problem: Problem, device: CpuDevice) -> tuple[CpuCandidate, ...]:
    volumes = problem.rank == 3
    return tuple(offered_for_volumes(problem, device) if volumes else offered(ran_for(problem), device))


def _costs(problem: Problem, device: CpuDevice, inference: bool) -> Costs:
    costs = Costs(_computed(problem), device, inference)
    return costs if device.profile is None else replace(costs, call=dispatch_overhead(problem, device, inference))


def dispatch_overhead(
    problem: Problem, device: CpuDevice, inference: bool, ahead: Mapping[Pass, float] | None = None
) -> float:
    """Overhead [cycles, summed over all cores] of a native kernel compared to ATen's, before either computes.

    Dispatch occupies one core while the others wait, so it counts once per core. With gradients, a pass pays the part
    of :data:`MIXED_CYCLES` that the other passes of its layer do not gain. ``ahead``: measured gains of other passes
    [cycles], in autotuning.
    """
    if inference:
        return device.cores * (OWN_CALL_CYCLES if ahead is None else TRIAL_CALL_CYCLES)
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
    """Conservative gain [cycles] of the best native kernel over ATen for a pass; 0 if there is none."""
    costs = Costs(_computed(problem), device, False, device.cores * RECORDED_CYCLES)
    every = _every(problem, device, False)
    theirs, ours = (
        _cheapest((one for one in every if (one.engine == aten.NAME) is is_theirs), problem, costs)
        for is_theirs in (True, False)
    )
    return max(0.0, costs.cautious(theirs) - costs.cautious(ours)) if theirs and ours else 0.0


def here() -> CpuDevice:
    """The current processor with as many cores as PyTorch's pool has threads."""
    instruction_set = native.instruction_set() if native.is_available() else aten.instruction_set()
    threads = torch.get_num_threads()
    return _described(instruction_set, threads, in_force(instruction_set, threads))


@lru_cache(maxsize=16)
def _described(instruction_set: str, threads: int, profile: Profile | None) -> CpuDevice:
    return replace(this_machine(instruction_set), cores=threads, profile=profile)


def offered(problem: Problem, device: CpuDevice, *, own_kernels: bool = False) -> Iterator[CpuCandidate]:
    """All candidates with kernels for the problem's dtype; ``own_kernels`` excludes ATen."""
    if problem.dtype in HALF_DTYPES:
        yield from _offered_in_half(problem, device, offered)
    elif not native.takes(problem):
        yield from aten.candidates(problem, device)
    elif problem.dtype == "float64":
        yield from reference.candidates(problem, device)
    else:
        for engine in ENGINES:
            if engine is not aten or not own_kernels:
                yield from engine.candidates(problem, device)


def offered_for_volumes(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """All candidates of a 3-D problem: sums of slices by native kernels, a matrix product of patches, FFTs, or ATen on
    the whole volume. ATen is no candidate for the slices: it would have to copy these views."""
    if problem.dtype in HALF_DTYPES:
        yield from _offered_in_half(problem, device, offered_for_volumes)
        return
    own = native.takes(problem)
    if patches.refusal(problem) is None:
        yield from patches.candidates(problem, device)
    if own:
        yield from engines_volumes.candidates(problem, device, lambda part: _plan_2d(part, device))
        if depthwise_volumes.refusal(problem) is None:
            yield from depthwise_volumes.candidates(problem, device)
        yield from fourier.candidates(problem, device)
    if not own or problem.dtype == "float32":
        yield from aten.candidates(problem, device)


def _offered_in_half(
    problem: Problem, device: CpuDevice, offer: Callable[[Problem, CpuDevice], Iterator[CpuCandidate]]
) -> Iterator[CpuCandidate]:
    """All candidates of a half-precision problem: kernels that take it, native kernels on float32 copies, and ATen."""
    if native.takes(problem):
        for engine in HALF_ENGINES if problem.rank == 2 else (patches,):
            if engine.refusal(problem) is None:
                yield from engine.candidates(problem, device)
    converted = CONVERTED_CYCLES * sum(map(prod, (problem.x_shape, problem.w_shape, problem.y_shape)))
    calls = device.cores * CONVERTED_CALL_CYCLES if aten.takes_tensors(problem) else 0.0
    for candidate in offer(widened(problem), device):
        # Copies in the cache are those of an image, whose weights are transformed anew.
        again = CONVERTED_IN_CACHE * converted + problem.batch * candidate.weight_cycles
        yield candidate.on_copies(again if _converts(candidate, problem) else calls + converted)
    yield from aten.candidates(problem, device)


def _converts(candidate: CpuCandidate, problem: Problem) -> bool:
    """True if the kernels of a candidate widen half-precision tensors themselves."""
    engine = engine_of(candidate)
    return engine in (depthwise, channel_lanes) and bool(engine.takes_half(problem))


def _reason(problem: Problem, found: Selection[CpuCandidate], costs: Costs) -> str:
    chosen = found.chosen
    if problem.dtype == "float64" and chosen.engine == reference.NAME:
        return "float64 is for checking, not for speed"
    if len(found.able) == 1:
        return aten.why_alone(problem) if chosen.engine == aten.NAME else "no other candidate can run it"
    if costs.device.profile is not None and any(candidate.engine == aten.NAME for candidate in found.able):
        return _advantage(found, costs)
    direct = [c for c in found.able if c.direct and c is not chosen and c.engine != reference.NAME]
    if not direct:
        return "the least estimated time"
    ratio = min(map(costs.counted, direct)) / costs.counted(chosen)
    what = "the next direct one" if chosen.direct else "direct summation"
    return f"estimated {ratio:.1f} times as fast as {what}"


def _uncovered(found: Selection[CpuCandidate], costs: Costs) -> str:
    """See :attr:`CpuPlan.uncovered`. It is judged by the estimate of the best native kernel that profiles know."""
    others = {aten.NAME, *UNPROFILED} - {engines_volumes.NAME}
    ours = {one.name: one for one in found.able if one.engine not in others}
    if costs.device.profile is None or not ours or all(one.engine != aten.NAME for one in found.able):
        return ""
    if costs.problem.rank == 3:
        return "not covered by it: convolutions over three axes, of which no profile has any"
    correction = costs.correction(ours[next(one.name for one in by_cost(found.candidates) if one.name in ours)])
    if correction is None or correction.covered:
        return ""
    ahead = f"a kernel of polyconv's runs if it is estimated to be ahead by {correction.factor:.0f} times"
    ahead += ", or measured to be ahead (polyconv.benchmark, polyconv.optimize)"
    return f"not covered by it: {in_words(costs.problem)}; {ahead}"


def _advantage(found: Selection[CpuCandidate], costs: Costs) -> str:
    """Reason text where measurements correct the estimates. For an uncovered class, only the lower bound."""
    theirs = min((one for one in found.able if one.engine == aten.NAME), key=costs.cautious)
    rival = "PyTorch's convolution" + (" in float32" if theirs.widened else "")
    correction, least = costs.correction(found.chosen), costs.cautious(theirs) / costs.cautious(found.chosen)
    if found.chosen.engine == aten.NAME:
        return "no kernel of polyconv's is ahead of it by as much as the estimate may be wrong"
    if correction is None or not correction.covered:
        return f"probably at least {least:.1f} times as fast as {rival}"
    ratio = costs.cautious(theirs) / (costs.call + costs.counted(found.chosen) * exp(correction.shift))
    return f"estimated {ratio:.1f} times as fast as {rival}, probably at least {least:.1f} times"
