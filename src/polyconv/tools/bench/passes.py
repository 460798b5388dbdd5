"""Benchmarks of single passes: one :class:`~.results.Row` per workload, pass and number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ... import settings
from ...autotune import preferences
from ...backend import backend_for
from ...lowering.reshape import as_image
from ...measure.accuracy import measure
from ...measure.batch_limits import available_memory, cut_batch, with_batch
from ...measure.operands import OURS, Operands, candidates
from ...measure.timing import interleaved, sgemm_rate, threads
from ...measure.workloads import Workload
from ...problem import Pass
from .results import Row, key
from .runner import Contest


@dataclass(frozen=True, slots=True)
class Options:
    passes: Sequence[Pass] = tuple(Pass)
    threads: Sequence[int] = (1,)
    repeats: int = 7
    batch: int | None = None
    """Upper limit of the batch. None: :func:`~polyconv.measure.batch_limits.cut_batch` decides."""
    fresh_weights: bool = False


def contests(workloads: Sequence[Workload], options: Options) -> list[Contest[Row]]:
    return [
        Contest(key(workload.name, kind, count), partial(_contest, workload, kind, count, options))
        for workload in workloads
        for kind in options.passes
        for count in options.threads
    ]


def _contest(workload: Workload, kind: Pass, count: int, options: Options) -> Row:
    batch = cut_batch(workload, options.batch, available_memory())
    problem = replace(with_batch(workload, batch.images).problem(kind), tolerance=settings.current().tolerance)
    backend = backend_for(torch.device("cpu"))
    lowered = problem.as_2d()
    plan = preferences.plan(backend, lowered, inference=True)
    operands = Operands.random(problem)
    calls = candidates(problem, operands, transposed=workload.transposed, fresh_weights=options.fresh_weights)
    # Gradients belong to training, which does not run in inference mode.
    mode = torch.inference_mode if kind is Pass.FPROP else torch.no_grad
    with threads(count), mode():
        accuracy = measure(lowered, operands.as_images(), as_image(calls[OURS]()))
        timings = interleaved(calls, options.repeats)
    return Row(
        workload=workload.name,
        shape=problem.in_brief,
        kind=kind,
        threads=count,
        batch=batch,
        timings=timings,
        max_error=accuracy.error,
        compared=accuracy.compared,
        predicted_error=plan.predicted_error,
        plan=plan.name,
        of_sgemm=problem.multiplications / timings[OURS].best / sgemm_rate(count),
    )
