"""PyTorch's convolution as a candidate on a GPU: published times, the choice, preferences, trials."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polyconv.cuda.planner import DEVICES
from polyconv.cuda.planner.aten import AtenPlan, chosen, class_of, expected_us, margin, own_us
from polyconv.cuda.planner.plan import ATEN
from polyconv.cuda.planner.volumes import CudaVolumePlan, planned
from polyconv.measure.workloads import catalogue
from polyconv.problem import TF32, Pass, Problem
from polyconv.selection import Preference

PUBLISHED = {
    "kb50": 2.2, "kb54": 1.87, "kb55": 4.12, "kb56": 2.93, "kb57": 6.56, "kb58": 7.66, "kb59": 2.84, "kb60": 7.64,
    "kb61": 9.15, "kb62": 2.43, "kb63": 7.11, "kb64": 5.48, "kb65": 2.62, "kb66": 3.78, "kb67": 2.63, "kb68": 36.8,
    "kb69": 2.84, "kb70": 29.3, "kb71": 1.58, "kb72": 2.82, "kb73": 2.09, "kb74": 2.1, "kb75": 6.66, "kb76": 12.2,
    "kb77": 1.96, "kb78": 2.4, "kb79": 1.94, "kb80": 2.41, "kb81": 1.84, "kb82": 2.55, "kb83": 1.53, "kb84": 10.1,
    "kb85": 2.27, "kb87": 4.66,
}  # fmt: skip
"""Milliseconds of PyTorch on an H100, by KernelBench (423217d, results/timing/H100_Modal, eager, TF32). kb86 is left
out: its time is that of two layers."""
SLOWER = {"grouped": 20.0, "3-D": 4.5}
"""Classes in which some published times are far longer than expected: how many times."""
ENOUGH = Preference("implicit_gemm_taps_128x64")


def problem_of(name: str, kind: Pass = Pass.FPROP, torch_format: str = TF32, dtype: str = "float32") -> Problem:
    return replace(catalogue()[name].problem(kind).as_2d(), torch_format=torch_format, dtype=dtype)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_times_are_expected(name: str) -> None:
    """Never much shorter: a pass that PyTorch computes faster than expected would run the slower kernel."""
    problem = problem_of(name)
    ratio = 1e3 * PUBLISHED[name] / expected_us(problem, DEVICES["h100"])
    assert 0.75 <= ratio <= SLOWER.get(class_of(problem), 1.7)


def test_what_is_left_to_pytorch_is_not_far_behind_the_published_times() -> None:
    """Over all of them the choice is modelled to gain, and no kernel runs that is slower than the published time."""
    before = after = 0.0
    for name, ms in PUBLISHED.items():
        problem = problem_of(name)
        plan = chosen(problem, DEVICES["h100"])
        mine = plan.cost_us / 1e3 if not isinstance(plan, AtenPlan) else ms
        assert mine <= ms
        before, after = before + ms, after + mine
    assert before > 1.4 * after


@pytest.mark.parametrize(
    ("name", "gpu", "kind", "ours"),
    [
        ("resnet50-2b", "a100", Pass.FPROP, False),
        ("resnet50-2b", "h100", Pass.WGRAD, False),
        ("resnet50-1x1", "a100", Pass.DGRAD, False),
        ("kb80", "a100", Pass.FPROP, True),
        ("kb80", "a100", Pass.WGRAD, False),
        ("kb80", "v100", Pass.WGRAD, True),
        ("mobilenet-dw3", "a100", Pass.WGRAD, True),
        ("convnext-dw7", "h100", Pass.FPROP, True),
        ("kb61", "h100", Pass.FPROP, True),
        ("kb81", "h100", Pass.FPROP, True),
    ],
)
def test_layers_and_passes_are_decided_one_by_one(name: str, gpu: str, kind: Pass, ours: bool) -> None:
    problem, device = problem_of(name, kind), DEVICES[gpu]
    plan = chosen(problem, device)
    assert isinstance(plan, AtenPlan) is not ours
    assert plan.passthrough is not ours
    own = planned(replace(problem, torch_format=""), device)
    assert ours == (own_us(own, problem, device) * margin(problem, device) <= expected_us(problem, device))
    assert (
        f"modelled {own.cost_us:.0f} us, and {expected_us(problem, device):.0f} expected of PyTorch" in plan.explain()
    )


def test_the_format_is_that_of_the_flags_and_of_the_gpu() -> None:
    """Without TF32 PyTorch needs longer; a V100 has none."""
    for name, form in (("a100", TF32), ("v100", "float32")):
        plan = chosen(problem_of("resnet50-3down"), DEVICES[name])
        assert isinstance(plan, AtenPlan)
        assert plan.problem.torch_format == form
        assert f"in {form}" in plan.explain()
    tf32, float32 = (expected_us(problem_of("kb80", torch_format=form), DEVICES["a100"]) for form in (TF32, "float32"))
    assert float32 > 3 * tf32


def test_without_a_format_it_is_no_candidate() -> None:
    problem = problem_of("resnet50-2b", torch_format="")
    plan = chosen(problem, DEVICES["h100"])
    assert plan == planned(problem, DEVICES["h100"])
    assert ATEN not in {one.name for one in plan.candidates}
    assert chosen(problem, DEVICES["h100"], prefer=Preference(ATEN)).choice == plan.choice


def test_a_preference_of_either_decides() -> None:
    problem, device = problem_of("resnet50-2b"), DEVICES["a100"]
    measured = Preference(ATEN, "measured in this process")
    assert chosen(problem, device, prefer=ENOUGH).choice == ENOUGH.name
    depthwise = problem_of("mobilenet-dw3")
    assert chosen(depthwise, device).choice != ATEN
    plan = chosen(depthwise, device, prefer=measured)
    assert plan.choice == ATEN
    assert plan.preference == "measured in this process"


@pytest.mark.parametrize(("name", "first"), [("resnet50-2b", True), ("mobilenet-dw3", False)])
def test_autotuning_times_it_too(name: str, first: bool) -> None:
    names = chosen(problem_of(name), DEVICES["a100"]).trials()
    assert ATEN in names
    assert len(names) > 1
    assert (names[0] == ATEN) is first


def test_copies_in_float32_are_charged_and_not_timed() -> None:
    """A half-precision depthwise layer runs in float32: compared with PyTorch in half precision."""
    problem, device = problem_of("mobilenet-dw3", torch_format="bfloat16"), DEVICES["a100"]
    own = planned(replace(problem, torch_format=""), device)
    assert own_us(own, problem, device) > 1.5 * own.cost_us
    plan = chosen(problem, device)
    assert plan.choice == ATEN
    assert plan.trials() == (ATEN,)
    uneven = replace(problem, padding=(0, 1, 0, 1))
    assert chosen(uneven, device).choice != ATEN  # a padded copy would be one of the copy


def test_where_pytorch_may_fail_it_is_no_candidate() -> None:
    large = replace(Problem.make("fprop", (1, 16, 12000, 12000), (16, 16, 3, 3)), torch_format=TF32)
    plan = chosen(large, DEVICES["h100"], prefer=Preference(ATEN))
    assert plan.choice != ATEN
    assert "PyTorch's kernels may count elements in 32 bits" in plan.explain()
    half = problem_of("resnet50-2b", torch_format="bfloat16", dtype="bfloat16")
    assert chosen(half, DEVICES["v100"]).choice != ATEN
    assert chosen(half, DEVICES["a100"]).choice == ATEN


def test_channels_last_runs_in_half_precision() -> None:
    problem = problem_of("edsr-64", torch_format="bfloat16", dtype="bfloat16")
    assert chosen(problem, DEVICES["rtx4090"]).choice != ATEN
    assert chosen(problem.channels_last(), DEVICES["rtx4090"]).choice.startswith("implicit_gemm_nhwc")


def test_a_volume_runs_as_a_whole() -> None:
    plan = chosen(problem_of("kb61"), DEVICES["h100"])
    assert isinstance(plan, CudaVolumePlan)
    assert all(not part.torch_format for part in plan.plans)
    assert any(one.name == ATEN and one.rejected for one in plan.candidates)


def test_a_border_costs_pytorch_a_copy() -> None:
    problem = problem_of("resnet50-2b")
    bordered = replace(problem, padding_mode=type(problem.padding_mode)("reflect"))
    assert expected_us(bordered, DEVICES["a100"]) > expected_us(problem, DEVICES["a100"])
    plan = chosen(bordered, DEVICES["h100"])
    assert plan.choice == ATEN
    assert not plan.passthrough
