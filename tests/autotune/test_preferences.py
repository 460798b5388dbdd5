"""Preferences given to the planners: followed if possible, else explained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyconv.cpu import native
from polyconv.cpu.device import CpuDevice
from polyconv.cpu.planner import plan_cpu
from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.lowering.lower import lowered
from polyconv.measure.workloads import find
from polyconv.problem import PaddingMode, Pass, Problem
from polyconv.selection import Preference, by_cost

SERVER, V100 = CpuDevice("avx512", cores=2), DEVICES["v100"]
LAYERS = find("W1,resnet50-2b,kb80")
TUNED = "chosen by the tuning file"

needs_native = pytest.mark.skipif(not native.is_available(), reason=str(native.why_absent()))


@needs_native
@pytest.mark.parametrize("kind", list(Pass))
def test_every_candidate_that_can_runs_if_it_is_preferred_cpu(kind: Pass) -> None:
    for layer in LAYERS:
        problem = layer.problem(kind)
        names = [candidate.name for candidate in by_cost(plan_cpu(problem, SERVER).candidates)]
        assert plan_cpu(problem, SERVER).choice == names[0]
        for name in names:
            plan = plan_cpu(problem, SERVER, prefer=Preference(name, TUNED))
            assert plan.choice == name
            assert plan.reason.startswith(TUNED)
            assert f"runs {plan.name}" in plan.explain()
            assert [candidate.name for candidate in plan.candidates if candidate.rejected is None] == [name]
            assert plan.chosen.direct or plan.predicted_error <= problem.tolerance


@pytest.mark.parametrize("kind", list(Pass))
def test_candidates_run_if_they_are_preferred_cuda(kind: Pass) -> None:
    for layer in LAYERS:
        problem = layer.problem(kind)
        names = [candidate.name for candidate in by_cost(plan_cuda(problem, V100).candidates)]
        assert plan_cuda(problem, V100).choice == names[0]
        assert plan_cuda(problem, V100).preference == ""
        for name in {*names[:3], names[-1]}:
            plan = plan_cuda(problem, V100, prefer=Preference(name, TUNED))
            assert plan.choice == name
            assert TUNED in plan.explain()
            assert plan.launches


@needs_native
def test_pytorch_is_a_candidate_on_the_cpu() -> None:
    problem = LAYERS[0].problem("fprop")
    (name,) = (c.name for c in plan_cpu(problem, SERVER).candidates if c.name.endswith("ATen"))
    assert plan_cpu(problem, SERVER, prefer=Preference(name)).choice == name


@needs_native
def test_the_tolerance_comes_before_the_preference() -> None:
    problem = LAYERS[0].problem("fprop")
    for strict, plans in (
        (replace(problem, tolerance=0.0), lambda p, prefer=None: plan_cpu(p, SERVER, prefer=prefer)),
        (replace(problem, tolerance=0.0), lambda p, prefer=None: plan_cuda(p, V100, prefer=prefer)),
    ):
        fast = plans(problem).choice
        plan = plans(strict, Preference(fast, TUNED))
        assert plan.choice == plans(strict).choice != fast
        assert f"not {fast}, although {TUNED}: its predicted error" in plan.explain()
        assert "exceeds the tolerance 0.0e+00" in plan.explain()


@needs_native
def test_an_unknown_name_changes_nothing_and_is_named() -> None:
    problem = LAYERS[0].problem("dgrad")
    for plain, plan in (
        (
            plan_cpu(problem, SERVER),
            plan_cpu(problem, SERVER, prefer=Preference("magic", "agreed with the other ranks")),
        ),
        (plan_cuda(problem, V100), plan_cuda(problem, V100, prefer=Preference("magic", "agreed with the other ranks"))),
    ):
        assert plan.choice == plain.choice
        assert "not magic, although agreed with the other ranks: no candidate of that name" in plan.explain()


def test_what_cannot_run_says_why() -> None:
    strided = Problem.make("fprop", (1, 8, 32, 32), (8, 8, 3, 3), stride=(3, 3))
    refused = next(c for c in plan_cuda(strided, V100).candidates if c.cost is None)
    plan = plan_cuda(strided, V100, prefer=Preference(refused.name, TUNED))
    assert plan.choice == plan_cuda(strided, V100).choice
    assert plan.preference == f"not {refused.name}, although {TUNED}: {refused.rejected}"


def test_a_border_of_a_cropped_image_has_preferences() -> None:
    problem = Problem.make(
        "fprop", (1, 8, 32, 32), (8, 8, 3, 3), padding=(-1, 2, 1, 1), padding_mode=PaddingMode.REFLECT
    )
    (problem,) = lowered(problem, "cuda")
    name = [c.name for c in plan_cuda(problem, V100).candidates if c.cost is not None][-1]
    assert plan_cuda(problem, V100, prefer=Preference(name)).choice == name
