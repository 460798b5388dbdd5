"""Measures a profile of this processor on layers of real networks: kernels of every engine, interleaved with ATen's.

Each layer is chosen far from all before it, so that any time budget covers all kinds. It is measured in both layouts
and all passes before the next. A signal is measured as the 2-D problem of height 1 that the kernels see, in one layout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import dist, prod, sqrt

import torch
from torch import Tensor

from ..cpu.costs import UNPROFILED, Costs
from ..cpu.device import CpuDevice
from ..cpu.engines import aten, reference
from ..cpu.plan import CpuCandidate
from ..cpu.planner import engine_of, here, offered
from ..cpu.profiles import Kernel, Record, Spent
from ..cpu.profiles.profile import Place, place_of
from ..cpu.weight_cache import TransformedWeights
from ..problem import IMAGE_CHANNELS, Pass, Problem
from . import layers, workloads
from .batch_limits import with_batch
from .operands import Operands
from .timing import interleaved
from .workloads import Workload

BATCHES = (1, 8)
"""Batch sizes, alternating from layer to layer."""
REPEATS = 4
PATIENCE = 0.1
"""Time [s] after which a problem gets no more than the minimum of rounds."""
PER_ENGINE = 2
"""Timed kernels per engine: those with the least estimated cost."""
WORTH_A_TRIAL = 5.0
"""Kernels estimated at more than this multiple of the least cost are not timed."""
MOST_MULTIPLICATIONS = 2e8
"""Most multiply-adds of one call: some milliseconds of one core."""
MOST_WEIGHTS = 2**23
"""Largest weight [elements]: larger ones are few and slow."""


def cases(most: float = MOST_MULTIPLICATIONS, only: Sequence[str] = ()) -> Iterator[list[Problem]]:
    """The problems of each layer in turn: both layouts, all passes. ``only``: words in the layer's description."""
    for number, layer in enumerate(_far_apart(_candidates(most, only))):
        yield list(_passes(layer, BATCHES[number % len(BATCHES)], most))


def _candidates(most: float, only: Sequence[str]) -> list[Workload]:
    """Layers that are small enough; those without neighbours in the networks first."""
    named = [with_batch(layer, 1) for layer in workloads.find("all")]
    every = [*named, *layers.extra(), *layers.sample(layers.every(), None)]
    problems = [(layer, layer.problem(Pass.FPROP)) for layer in every if layers.has_any(layers.described(layer), only)]
    return [layer for layer, one in problems if one.multiplications <= most and prod(one.w_shape) <= MOST_WEIGHTS]


def _far_apart(every: Sequence[Workload]) -> Iterator[Workload]:
    """Farthest-point order: each layer is the farthest from all before it; of equals, the most used one."""
    places = [place_of(layer.problem(Pass.FPROP).as_2d()) for layer in every]
    distances = [float(layer.uses) * 1e6 for layer in every]
    for _ in every:
        chosen = max(range(len(every)), key=distances.__getitem__)
        yield every[chosen]
        there = places[chosen]
        distances = [
            min(old, _weighed(place, there, layer.uses))
            for old, place, layer in zip(distances, places, every, strict=True)
        ]


def _weighed(place: Place, other: Place, uses: int) -> float:
    """Squared distance, weighted by use: a frequently used layer may be closer to another one."""
    return dist(place, other) ** 2 * sqrt(uses)


def _passes(layer: Workload, batch: int, most: float) -> Iterator[Problem]:
    one = layer.problem(Pass.FPROP)
    images = batch if batch * one.multiplications <= most else 1
    for kind in Pass:
        if kind is Pass.DGRAD and layer.input[1] <= IMAGE_CHANNELS:
            continue
        problem = with_batch(layer, images).problem(kind)
        yield problem.as_2d()
        if problem.rank == 2:
            yield problem.channels_last()


def measure(problem: Problem) -> Record:
    tensors = _tensors(problem)
    trials = list(_trials(problem, replace(here(), profile=None)))
    calls = {str(trial): _call(problem, trial, tensors) for trial in trials}
    timings = interleaved(calls, REPEATS, patience=PATIENCE)
    alone = torch.get_num_threads() == 1
    spent = {
        trial: Spent(timings[str(trial)].cpu if alone else timings[str(trial)].best, trial.cycles) for trial in trials
    }
    return _record(problem, spent)


def remodelled(record: Record, instruction_set: str, threads: int) -> Record:
    """A record with the current cost model's estimates for the measured processor."""
    device = CpuDevice(instruction_set, cores=threads)
    known = dict(record.kernels)
    spent = {
        trial: Spent((record.torch if trial.theirs else known[trial.kernel]).seconds, trial.cycles)
        for trial in _estimated(record.problem, device)
        if trial.theirs or trial.kernel in known
    }
    return _record(record.problem, spent)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A candidate, with or without a cached weight."""

    candidate: CpuCandidate
    kept: bool
    cycles: float

    @property
    def kernel(self) -> Kernel:
        return Kernel(self.candidate.name, self.kept)

    @property
    def theirs(self) -> bool:
        return self.candidate.engine == aten.NAME

    def __str__(self) -> str:
        return f"{self.candidate.name}{', kept' if self.kept else ''}"


def _record(problem: Problem, spent: Mapping[_Trial, Spent]) -> Record:
    (theirs,) = (trial for trial in spent if trial.theirs)
    kernels = tuple((trial.kernel, spent[trial]) for trial in spent if not trial.theirs)
    return Record(problem, spent[theirs], kernels)


def _estimated(problem: Problem, device: CpuDevice) -> Iterator[_Trial]:
    """All candidates that can run; in a forward pass again with a cached weight, where that is possible."""
    for kept in (False, True) if problem.kind is Pass.FPROP else (False,):
        costs = Costs(replace(problem, frozen=kept), device, kept)
        for candidate in offered(problem, device):
            able = candidate.refusal is None and candidate.engine not in (reference.NAME, *UNPROFILED)
            exact = candidate.direct or candidate.error <= problem.tolerance
            if able and exact and kept == costs.keeps(candidate):
                yield _Trial(candidate, kept, costs.counted(candidate))


def _trials(problem: Problem, device: CpuDevice) -> Iterator[_Trial]:
    """The candidates worth timing, and ATen's."""
    every = sorted(_estimated(problem, device), key=lambda trial: trial.cycles)
    taken: dict[tuple[str, bool], int] = {}
    for trial in every:
        group = trial.candidate.engine, trial.kept
        taken[group] = taken.get(group, 0) + 1
        near = trial.cycles <= WORTH_A_TRIAL * every[0].cycles
        if trial.theirs or (near and taken[group] <= PER_ENGINE):
            yield trial


def _tensors(problem: Problem) -> dict[str, Tensor]:
    """Random tensors with the problem's strides."""
    found = {"y": torch.empty(problem.y_shape), **Operands.random(problem).named()}
    for name, strides in (("x", problem.x_strides), ("w", problem.w_strides), ("y", problem.y_strides)):
        found[name] = torch.empty_strided(found[name].shape, strides).copy_(found[name])
    return found


def _call(problem: Problem, trial: _Trial, tensors: Mapping[str, Tensor]) -> Callable[[], object]:
    """A call of one pass as a backend makes it: into a new tensor."""
    asked = replace(problem, frozen=trial.kept)
    weights = TransformedWeights() if trial.kept else None
    run = engine_of(trial.candidate).prepare(trial.candidate, asked, weights)
    written, like = {Pass.FPROP: ("y", "y"), Pass.DGRAD: ("x", "x"), Pass.WGRAD: ("dw", "w")}[problem.kind]
    bias = problem.kind is Pass.WGRAD and problem.bias

    def call() -> None:
        given = dict(tensors)
        given[written] = torch.empty_like(tensors[like])
        if bias:
            given["db"] = given["dw"].new_empty(problem.out_channels)
        run(given)

    return call


def measured(seconds: float, every: Iterable[list[Problem]]) -> Iterator[tuple[float, list[Record]]]:
    """Measure layers until the time is up, one at least; yields the elapsed seconds with the records of each."""
    began = time.monotonic()
    for number, problems in enumerate(every):
        if number and time.monotonic() - began >= seconds:
            return
        records = [measure(problem) for problem in problems]
        yield time.monotonic() - began, records
