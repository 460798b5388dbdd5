"""The unconditional lowerings of a problem, applied before planning until backends take the result."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace

import torch
from torch import Tensor

from ..backend import Run, backend_for
from ..problem import PaddingMode, Pass, Problem
from .base import IsAhead, Lowering, Rewrite
from .border import Cropped
from .epilogue import begun, summed_per_channel
from .extreme_geometry import Reduced, reduce_problem
from .reshape import Patches, Signal, is_patches
from .widen import Widened, has_no_half_kernel


def lower(problem: Problem, backend: str, is_ahead: IsAhead | None = None) -> Lowering | None:
    """Next lowering of a problem for a backend, by its name; None if the backend takes the problem. ``is_ahead`` (see
    :func:`ahead_on`) judges lowerings that pay on some devices only; without it they are taken."""
    if problem.batch == 0 or problem.in_channels == 0 or 0 in problem.in_size:
        return EmptySum(problem)
    if problem.padding_mode is not PaddingMode.ZEROS and min(problem.padding) < 0:
        return Cropped(problem)
    other = _necessary(problem, backend)
    if is_patches(problem, backend):
        patches = Patches(problem)
        if is_ahead is None or is_ahead(patches, other):
            return patches
    return other


def ahead_on(device: torch.device) -> IsAhead:
    """The judgement of a device's backend, which is not built before it is asked."""

    def is_ahead(lowering: Lowering, other: Lowering | None) -> bool:
        judge: IsAhead | None = getattr(backend_for(device), "is_ahead", None)
        return judge is None or judge(lowering, other)

    return is_ahead


def _necessary(problem: Problem, backend: str) -> Lowering | None:
    """A lowering without which a backend does not take the problem, if there is one."""
    reduction = reduce_problem(problem)
    if has_no_half_kernel(problem, reduction, backend):
        return Widened(problem)
    if reduction is not None:
        return EmptySum(problem) if reduction.nothing else Reduced.of(problem, reduction)
    return Signal(problem) if problem.rank == 1 else None


def lowered(problem: Problem, backend: str, is_ahead: IsAhead | None = None) -> tuple[Problem, ...]:
    """Distinct problems that a backend runs for ``problem``: none if it is an empty sum."""
    if problem.torch_format and backend != "cuda":
        problem = replace(problem, torch_format="")
    lowering = lower(problem, backend, is_ahead)
    if lowering is None:
        return (problem,)
    return tuple(dict.fromkeys(each for part in lowering.problems for each in lowered(part, backend, is_ahead)))


class EmptySum(Rewrite):
    """A pass without any product: outputs are bias and epilogue, gradients of input and weight are zero."""

    __slots__ = ()
    problems = ()

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        return self._run

    def in_words(self) -> str:
        return "nothing runs: no output sees a pixel of the image"

    def _run(self, tensors: MutableMapping[str, Tensor]) -> None:
        if self.problem.kind is Pass.FPROP:
            begun(tensors["y"], tensors.get("bias"), tensors.get("residual"), self.problem.activation)
        elif self.problem.kind is Pass.DGRAD:
            tensors["x"].zero_()
        else:
            tensors["dw"].zero_()
            if "db" in tensors:
                tensors["db"].copy_(summed_per_channel(tensors["y"]))
