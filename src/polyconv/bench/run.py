"""Run the contests: every workload, pass and number of threads makes a :class:`~polyconv.bench.rows.Row`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .. import settings
from ..backends import backend_for
from ..cpu.backend import CpuBackend
from ..problem import Pass, Problem
from .accuracy import measure
from .contestants import OURS, Operands, contestants
from .limits import Batch, available_memory, cut_batch, with_batch
from .rows import Row
from .timing import interleaved, sgemm_rate, threads
from .workloads import Workload


@dataclass(frozen=True, slots=True)
class Options:
    """How to run."""

    passes: Sequence[Pass] = tuple(Pass)
    threads: Sequence[int] = (1,)
    repeats: int = 7
    batch: int | None = None
    """Images, at most. None: as many as :func:`~polyconv.bench.limits.cut_batch` allows."""
    fresh_weights: bool = False


def run(workloads: Sequence[Workload], options: Options) -> Iterator[Row]:
    """The rows, as they are measured."""
    for workload in workloads:
        batch = cut_batch(workload, options.batch, available_memory())
        for kind in options.passes:
            yield from _contests(workload, kind, batch, options)


def _contests(workload: Workload, kind: Pass, batch: Batch, options: Options) -> Iterator[Row]:
    problem = replace(with_batch(workload, batch.images).problem(kind), tolerance=settings.current().tolerance)
    backend = backend_for(torch.device("cpu"))
    assert isinstance(backend, CpuBackend)  # the only device that is timed here
    plan = backend.plan(problem, inference=True)
    operands = Operands.random(problem)
    calls = contestants(problem, operands, fresh_weights=options.fresh_weights)
    # Gradients are computed in training, where inference mode is off; autograd is not part of what is timed.
    mode = torch.inference_mode if kind is Pass.FPROP else torch.no_grad
    for count in options.threads:
        with threads(count), mode():
            accuracy = measure(problem, operands, calls[OURS]())
            timings = interleaved(calls, options.repeats)
        yield Row(
            workload=workload.name,
            shape=shape_of(problem),
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


def shape_of(problem: Problem) -> str:
    """A convolution in a few words, without what is usual: ``32→64 5×9, dilation 2×3``."""
    parts = [f"{problem.in_channels}→{problem.out_channels} {problem.kernel[0]}×{problem.kernel[1]}"]
    if problem.stride != (1, 1):
        parts.append(f"stride {_pair(problem.stride)}")
    if problem.dilation != (1, 1):
        parts.append(f"dilation {_pair(problem.dilation)}")
    if problem.groups != 1:
        parts.append("depthwise" if problem.depthwise else f"{problem.groups} groups")
    return ", ".join(parts)


def _pair(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]}×{pair[1]}"
