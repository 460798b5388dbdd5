"""3-D problems as sums of 2-D problems: the lowering, plans of CPU engines and GPUs, and the choice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import polyconv
from any_volume import check, check_as_machine_code, volumes
from machine_suites import explore
from nightly import nightly
from polyconv.activation import Activation
from polyconv.autotune import preferences
from polyconv.cpu.backend import CpuBackend
from polyconv.cpu.engines import volumes as engine
from polyconv.cuda.planner import DEVICES
from polyconv.cuda.planner.volumes import planned
from polyconv.lowering.extreme_geometry import Axis
from polyconv.lowering.volume import scattered_bytes
from polyconv.lowering.volume_sum import NAME, volume_sum
from polyconv.problem import PaddingMode, Pass, Problem
from polyconv.selection import Preference
from virtual_gpu import run_in_virtual_gpu

SLICES = f"sum of slices, {engine.NAME}"
PASSES = tuple(Pass)


@given(volumes(), st.sampled_from(PASSES))
def test_every_tap_meets_every_output_once(problem: Problem, kind: Pass) -> None:
    """The first problem of each output place writes, the others add."""
    problem = problem.for_pass(kind)
    found = volume_sum(problem)
    along = Axis.of(problem, problem.in_size, problem.kernel, found.axis)
    pairs = [along.pixel(*pair) for pair in product(range(along.outputs), range(along.kernel))]
    slices = sum(call.problem.batch for call in found.calls)
    assert slices == problem.batch * sum(pixel is not None for pixel in pairs)
    begun: Counter[int] = Counter()
    for call in found.calls:
        begins = {Pass.FPROP: call.y, Pass.DGRAD: call.x, Pass.WGRAD: call.w}[kind]
        if not call.adds:
            begun[begins] += 1
    assert all(times == 1 for times in begun.values())


@given(volumes(), st.sampled_from(PASSES))
@settings(max_examples=120)
def test_any_volume_on_the_cpu(problem: Problem, kind: Pass) -> None:
    """By polyconv's engines, even if the planner would not choose them."""
    backend = CpuBackend()
    check(problem.for_pass(kind), lambda problem: backend.prepare(backend.plan(problem, prefer=Preference(SLICES))))


# ---- which lowering runs


def test_a_width_that_is_cut_across_is_dear() -> None:
    """In such a 2-D problem no two elements are adjacent in memory; in channels_last those of a pixel are."""
    flat = Problem.make("fprop", (1, 3, 64, 64, 10), (64, 3, 3, 3, 1))
    (part,) = {one.problem for one in volume_sum(flat).calls}
    assert scattered_bytes(part, 64) == 40 * 10 * (3 * 64 * 64 + 64 * 62 * 62)
    (part,) = {one.problem for one in volume_sum(flat.channels_last()).calls}
    assert scattered_bytes(part, 64) == 0
    assert preferences.plan(CpuBackend(), flat).chosen.name != SLICES


def test_a_kernel_of_one_tap_across_an_axis_needs_no_sums() -> None:
    for kernel, axis in (((1, 3, 3), 0), ((3, 1, 3), 1), ((3, 3, 1), 2), ((5, 1, 1), 1)):
        problem = Problem.make(Pass.FPROP, (2, 4, 6, 7, 8), (4, 4, *kernel), activation=Activation.RELU)
        found = volume_sum(problem)
        assert (found.axis, found.additions, found.activates_apart) == (axis, 0, False)
        assert len(found.calls) == problem.batch


def test_padding_costs_nothing() -> None:
    """Of three taps over a depth of four, two outputs lack one tap each."""
    problem = Problem.make(Pass.FPROP, (1, 8, 4, 9, 9), (8, 8, 3, 3, 3), padding=(1, 1, 1, 1, 1, 1))
    found = volume_sum(problem)
    assert sorted(call.problem.batch for call in found.calls) == [3, 3, 4]
    assert found.gaps == ()
    assert [call.adds for call in found.calls] == [False, True, True]


def test_images_of_channels_last_are_taken_at_once() -> None:
    problem = Problem.make(Pass.FPROP, (4, 8, 5, 9, 9), (8, 8, 1, 3, 3)).channels_last()
    assert [call.problem.batch for call in volume_sum(problem).calls] == [20]


@pytest.mark.parametrize("device", ["v100", "rtx4090"])
@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_a_plan_for_a_gpu_is_explained(kind: Pass, device: str) -> None:
    problem = Problem.make(kind, (2, 16, 8, 32, 32), (32, 16, 3, 3, 3), padding=(1, 1, 1, 1, 1, 1))
    plan = planned(problem, DEVICES[device], prefer=Preference(NAME))
    text = plan.explain()
    assert text.startswith(str(problem))
    assert "6 problems across the depth" in text
    assert 0 < plan.predicted_error <= problem.tolerance


def test_half_precision_on_a_gpu_is_summed_in_full() -> None:
    """Slices are not rounded before they are added: they are stacked, or widened where a stack has too few channels."""
    for channels, words in (
        (4, "widened to float32 (no kernel takes it in half precision) and rounded to float16 once"),
        (8, "runs stacked inputs on Tesla V100"),
    ):
        model = polyconv.Conv3d(channels, channels, 3).half()
        assert words in str(polyconv.explain(model, (1, channels, 5, 9, 9), device="v100"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_on_the_cpu_is_torchs(dtype: torch.dtype) -> None:
    x, w = torch.randn(1, 4, 5, 6, 6, dtype=dtype), torch.randn(4, 4, 3, 3, 3, dtype=dtype)
    torch.testing.assert_close(polyconv.conv3d(x, w, padding=1), F.conv3d(x, w, padding=1))


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_residual_and_activation(activation: str) -> None:
    shapes = (2, 3, 4, 6, 5), (4, 3, 3, 3, 3), (4,), (2, 4, 4, 6, 5)
    x, w, b, r = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    ours = polyconv.conv3d(x, w, b, padding=1, activation=activation, residual=r)
    theirs = getattr(F, activation)(F.conv3d(x, w, b, padding=1) + r)
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(*(torch.autograd.grad(y.sum(), (x, w, b, r)) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other)


def test_channels_last_stays() -> None:
    x = torch.randn(2, 8, 4, 6, 6).to(memory_format=torch.channels_last_3d)
    for module in (polyconv.Conv3d(8, 4, 3), polyconv.ConvTranspose3d(8, 4, 3)):
        assert module(x).is_contiguous(memory_format=torch.channels_last_3d)


def test_six_sides() -> None:
    x, w = torch.randn(1, 2, 5, 6, 7, dtype=torch.float64), torch.randn(3, 2, 2, 3, 2, dtype=torch.float64)
    sides = (1, 2, 0, 3, -1, 1)
    expected = F.conv3d(F.pad(x, (-1, 1, 0, 3, 1, 2)), w)
    torch.testing.assert_close(polyconv.conv3d(x, w, padding=sides), expected)


def test_the_optimizer_times_both() -> None:
    model, x = nn.Sequential(nn.Conv3d(16, 16, 3, padding=1), nn.ReLU()).eval(), torch.randn(1, 16, 6, 12, 12)
    expected = model(x).detach()
    model, _ = polyconv.optimize(model, x, quiet=True, seconds=2)
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)


def test_autotuning_may_choose_either() -> None:
    problem = Problem.make(Pass.FPROP, (1, 16, 6, 12, 12), (16, 16, 3, 3, 3), padding=(1,) * 6)
    trials = CpuBackend().plan(problem).trials()
    assert sorted(trials) == ["PyTorch's convolution, ATen", SLICES]


# ---- as machine code


BORDERED = Problem.make(
    Pass.FPROP, (2, 4, 3, 6, 7), (5, 4, 3, 3, 3), padding=(1, 1, 0, 2, 1, 1), padding_mode="reflect", bias=True
)
ON_A_GPU = {
    "a border": BORDERED,
    "channels_last": replace(BORDERED, padding_mode=PaddingMode.ZEROS, stride=(2, 1, 2)).channels_last(),
    "residual and activation": replace(
        BORDERED, padding_mode=PaddingMode.ZEROS, residual=True, activation=Activation.SILU
    ),
    "depthwise": Problem.make(Pass.FPROP, (1, 6, 4, 8, 9), (6, 1, 3, 3, 3), padding=(1,) * 6, groups=6),
    "a kernel along the depth": Problem.make(Pass.FPROP, (2, 8, 7, 4, 9), (9, 8, 3, 1, 1), bias=True),
}


@pytest.mark.parametrize("kind", PASSES, ids=str)
@pytest.mark.parametrize("name", ON_A_GPU)
def test_as_machine_code(name: str, kind: Pass) -> None:
    run_in_virtual_gpu(check_as_machine_code, ON_A_GPU[name].for_pass(kind), NAME)


@nightly
@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_any_volume_as_machine_code(kind: Pass) -> None:
    """At least 200 geometries per pass."""
    run_in_virtual_gpu(_any_volume_as_machine_code, kind, timeout=3600)


def _any_volume_as_machine_code(kind: Pass) -> None:
    drawn: set[Problem] = set()

    def run(problem: Problem) -> None:
        drawn.add(problem)
        check_as_machine_code(problem.for_pass(kind), NAME)

    explore(volumes(), run, each=240)
    assert len(drawn) >= 200
