"""CPU backend: plans a problem and calls the chosen engine on its tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backend import PrepareReport, Run
from ..problem import Problem, Shape, Strides
from ..selection import Preference
from ..tuning_key import Environment
from . import native
from .planner import CpuPlan, plan_cpu
from .weight_cache import TransformedWeights

if TYPE_CHECKING:
    from ..util.console import Progress

SMALLEST_POOLED = 16 * 2**20
"""Output size [bytes] from which new pages cost more than a search in the output pool (``cpu/native.py``)."""

POOLED = (torch.float32, torch.bfloat16, torch.float16)


class CpuBackend:
    """Implements :class:`polyconv.backend.Backend`."""

    name = "cpu"
    caches_weights = True

    def __init__(self) -> None:
        native.why_absent()  # loads the kernels
        self.weights = TransformedWeights()

    def plan(
        self,
        problem: Problem,
        *,
        inference: bool = False,
        prefer: Preference | None = None,
        w: Tensor | None = None,
    ) -> CpuPlan:
        found = plan_cpu(problem, inference=inference, prefer=prefer)
        return found if w is None or not found.keeps_weights else found.for_weights(w)

    def prepare(self, plan: CpuPlan, *, trial: bool = False) -> Run:
        return plan.prepared(TransformedWeights() if trial else self.weights)

    def prepare_all(self, plans: Sequence[CpuPlan], progress: Progress) -> PrepareReport:
        """Bind the plans to their kernels, which need no compilation."""
        began = time.perf_counter()
        progress.expect(len(plans))
        for plan in plans:
            self.prepare(plan)
            progress.step(f"planned {plan.problem}")
        return PrepareReport(len(plans), time.perf_counter() - began)

    def environment(self) -> Environment:
        return Environment.of_cpu(native.instruction_set() if native.is_available() else "")

    def new_output(self, like: Tensor, shape: Shape, strides: Strides) -> Tensor:
        """Allocate from the output pool if that pays."""
        pooled = like.dtype in POOLED and prod(shape) * like.element_size() >= SMALLEST_POOLED and native.is_available()
        return native.empty_output(like, shape, strides) if pooled else like.new_empty_strided(shape, strides)
