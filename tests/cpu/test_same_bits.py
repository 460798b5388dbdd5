"""polyconv's kernels give the same bits for any number of threads: every candidate, in every pass.

ATen's bits may depend on the threads, and the planner's choice does; so each candidate is requested by name.
"""

from __future__ import annotations

import pytest
import torch

from cpu_passes import load_native, same_bits_for_any_threads
from nightly import sampled
from polyconv.cpu.engines import aten
from polyconv.cpu.planner import here, offered, plan_cpu
from polyconv.cpu.weight_cache import TransformedWeights
from polyconv.problem import Pass, Problem
from polyconv.selection import Preference

load_native()

ANY = 1e30
"""A tolerance that accepts every candidate."""

SHAPES = {
    "3x3": ((2, 20, 26, 30), (24, 20, 3, 3), 1),
    "5x9": ((1, 12, 40, 44), (10, 12, 5, 9), 1),
    "deep": ((1, 200, 12, 14), (70, 200, 3, 3), 1),
    "strided": ((2, 16, 31, 33), (12, 16, 5, 5), 2),
}

CASES = [
    (name, kind, candidate.name)
    for name, (x, w, stride) in SHAPES.items()
    for kind in Pass
    for candidate in offered(Problem.make(kind, x, w, stride=(stride, stride), tolerance=ANY), here())
    if candidate.refusal is None and candidate.engine != aten.NAME
]


@pytest.mark.parametrize(("name", "kind", "candidate"), sampled(CASES, 40, "threads"), ids=str)
def test_a_candidate_has_the_same_bits_for_any_threads(name: str, kind: Pass, candidate: str) -> None:
    x, w, stride = SHAPES[name]
    problem = Problem.make(kind, x, w, stride=(stride, stride), tolerance=ANY)
    torch.manual_seed(0)
    given = {"x": torch.randn(x), "w": torch.randn(w), "y": torch.randn(problem.y_shape)}
    written = {Pass.FPROP: "y", Pass.DGRAD: "x", Pass.WGRAD: "dw"}[kind]

    def compute() -> list[torch.Tensor]:
        plan = plan_cpu(problem, prefer=Preference(candidate))
        assert plan.choice == candidate
        outputs = {**given, written: torch.full(w if kind is Pass.WGRAD else given[written].shape, torch.nan)}
        plan.prepared(TransformedWeights())(outputs)
        return [outputs[written]]

    same_bits_for_any_threads(compute)
