"""The pointwise kernels against float64: forward passes with their epilogue, and input gradients."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import cpu_passes
from cpu_passes import Layer, close
from nightly import NIGHTLY
from polyconv.activation import Activation
from polyconv.cpu import native
from polyconv.cpu.device import CpuDevice
from polyconv.cpu.engines import pointwise
from polyconv.cpu.planner import plan_cpu
from polyconv.numerics import reference
from polyconv.problem import Problem

cpu_passes.load_native()

PLAN = native.plan_numbers(pointwise.NAME, 0)
APPLIED = {"none": lambda y: y, "relu": F.relu, "silu": F.silu}
CASES = {
    "one pixel": Layer((1, 1, 1, 1), 1, (1, 1)),
    "every height of a tile": Layer((1, 7, 5, 23), 40, (1, 1)),
    "sums in several blocks": Layer((2, 1100, 3, 7), 90, (1, 1)),
    "many pixels of few channels": Layer((2, 3, 40, 41), 5, (1, 1)),
    "panels of every width": Layer((1, 64, 9, 9), 16 * 11 + 3, (1, 1)),
    "groups and a stride": Layer((3, 57, 15, 14), 3 * 21, (1, 1), stride=(2, 3), groups=3),
    "groups of two that leave lanes": Layer((2, 10, 9, 3), 10, (3, 3), (1, 1, 1, 1), groups=5),
    "groups of four": Layer((1, 32, 11, 15), 32, (3, 3), (1, 1, 1, 1), groups=8),
    "groups of four, one row": Layer((2, 20, 1, 30), 20, (1, 5), (0, 0, 2, 2), groups=5),
    "groups of four, reflected": Layer((1, 12, 9, 8), 12, (5, 3), (2, 2, 1, 1), groups=3, border="reflect"),
    "groups of eight and a stride": Layer((3, 40, 14, 13), 40, (3, 3), (1, 0, 2, 1), stride=(2, 3), groups=5),
    "groups of eight and a dilation": Layer((1, 48, 9, 12), 48, (3, 2), (2, 2, 3, 0), dilation=(2, 3), groups=6),
    "groups of eight in a large image": Layer((1, 16, 70, 300), 16, (3, 3), (1, 1, 1, 1), groups=2),
    "groups of four of many taps": Layer((1, 16, 20, 20), 16, (12, 11), groups=4),
    "groups of other numbers of outputs": Layer((1, 16, 7, 7), 32, (3, 3), (1, 1, 1, 1), groups=4),
    "runs cut by blocks of terms": Layer((1, 130, 9, 8), 70, (3, 3), (1, 1, 1, 1), stride=(2, 2)),
    **cpu_passes.EDGES,
    **cpu_passes.BORDERED,
    **cpu_passes.STRIDED,
}


def placed(shape: tuple[int, ...], sliced: bool) -> Tensor:
    """NaN with contiguous channels; sliced: with gaps between channels, columns and rows."""
    n, c, h, w = shape
    if not sliced:
        return torch.full((n, h, w, c), torch.nan).permute(0, 3, 1, 2)
    return torch.full((n + 1, h + 2, 2 * w + 3, c + 5), torch.nan)[1:, 1:-1, 1:-2:2, 2:-3].permute(0, 3, 1, 2)


def check(
    case: Layer, sliced: bool = False, bias: bool = True, residual: bool = False, activation: str = "none"
) -> None:
    x, w, b, dy = case.tensors()
    x, dy = placed(case.x, sliced).copy_(x), placed(case.y, sliced).copy_(dy)
    added = placed(case.y, sliced).copy_(torch.randn(case.y)) if residual else None
    inputs = [t for t in (x, w, b, dy, added) if t is not None]
    before = [t.clone() for t in inputs]
    around = placed(case.y, sliced)
    y, dx = around, placed(case.x, sliced)
    number, *_ = native.activation_numbers(Activation(activation))
    torch.ops.polyconv_cpu.convolve(x, w, b if bias else None, y, case.geometry, PLAN, None, added, number)
    expected = reference.fprop(case.moves, x, w, b if bias else None)
    close(y, APPLIED[activation](expected if added is None else expected + added.double()))
    if case.border == "zeros":
        torch.ops.polyconv_cpu.input_gradient(dy, w, dx, case.geometry, PLAN)
        close(dx, reference.dgrad(case.moves, dy, w, case.x))
    if sliced:
        for written in (y, dx) if case.border == "zeros" else (y,):
            assert written._base is not None
            assert torch.isfinite(written._base).sum() == written.numel()
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_edges(case: Layer, instruction_set: str) -> None:
    assert native.instruction_set() == instruction_set
    check(case)
    check(case, sliced=True, residual=True, activation="relu")


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    groups = draw(st.integers(1, 3))
    channels, outputs = groups * draw(st.integers(1, 70)), groups * draw(st.integers(1, 90))
    x = draw(st.integers(1, 3)), channels, draw(st.integers(1, 16)), draw(st.integers(1, 16))
    stride = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Layer(x, outputs, (1, 1), stride=stride, groups=groups)


@settings(max_examples=300 if NIGHTLY else 60, deadline=None)
@given(
    st.one_of(layers(), cpu_passes.layers(), cpu_passes.wide_layers()),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(sorted(APPLIED)),
)
def test_any_geometry(case: Layer, sliced: bool, bias: bool, residual: bool, activation: str) -> None:
    check(case, sliced, bias, residual, activation)


@pytest.mark.parametrize("case", [*CASES.values(), Layer((1, 70, 7, 7), 400, (1, 1))], ids=str)
def test_same_bits_whatever_the_number_of_threads_and_with_kept_weights(case: Layer) -> None:
    x, w, bias, _ = case.tensors()
    x = placed(case.x, False).copy_(x)
    kept = torch.ops.polyconv_cpu.transform_weights(x, w, placed(case.y, False), case.geometry, PLAN)

    def compute(weights: Tensor | None = None) -> list[Tensor]:
        y = placed(case.y, False)
        torch.ops.polyconv_cpu.convolve(x, w, bias, y, case.geometry, PLAN, weights)
        return [y]

    cpu_passes.same_bits_for_any_threads(compute)
    assert torch.equal(*compute(), *compute(kept))


def test_infinities_stay_in_their_pixels_and_channels() -> None:
    x = torch.ones(1, 5, 6, 7).to(memory_format=torch.channels_last)
    w = torch.ones(21, 5, 1, 1)
    x[0, 2, 3, 4], w[7, 1] = torch.inf, torch.nan
    y = placed((1, 21, 6, 7), False)
    torch.ops.polyconv_cpu.convolve(x, w, None, y, [1, 1, 0, 0, 1, 1, 1, 0], PLAN, None)
    assert y[:, 7].isnan().all()
    others = y[:, torch.arange(21) != 7]
    assert others[:, :, 3, 4].isposinf().all()
    assert (others.isfinite().sum() == 20 * (42 - 1)).item()


@pytest.mark.parametrize("channels", [3, 64, 512, 1100, 4096])
def test_predicted_errors(channels: int, instruction_set: str) -> None:
    for kind in ("fprop", "dgrad"):
        shape = (40, channels) if kind == "fprop" else (channels, 40)
        problem = Problem.make(kind, (1, shape[1], 20, 20), (*shape, 1, 1)).channels_last()
        (candidate,) = pointwise.candidates(problem, CpuDevice(instruction_set))
        torch.manual_seed(channels)
        case = Layer((1, shape[1], 20, 20), shape[0], (1, 1))
        x, w, _, dy = case.tensors()
        x, dy, y, dx = x.to(memory_format=torch.channels_last), dy.to(memory_format=torch.channels_last), None, None
        if kind == "fprop":
            y = placed(case.y, False)
            torch.ops.polyconv_cpu.convolve(x, w, None, y, case.geometry, PLAN, None)
            wrong = y - reference.fprop(case.moves, x, w, None)
        else:
            dx = placed(case.x, False)
            torch.ops.polyconv_cpu.input_gradient(dy, w, dx, case.geometry, PLAN)
            wrong = dx - reference.dgrad(case.moves, dy, w, case.x)
        assert wrong.abs().max() <= candidate.error * sqrt(channels)


def test_refusals() -> None:
    taken = Problem.make("fprop", (1, 8, 9, 9), (16, 8, 1, 1)).channels_last()

    def why_not(problem: Problem) -> str:
        (candidate,) = pointwise.candidates(problem, CpuDevice())
        return candidate.refusal or ""

    assert why_not(taken) == why_not(taken.another_pass("dgrad")) == ""
    assert "channels_last" in why_not(Problem.make("fprop", (1, 8, 9, 9), (16, 8, 1, 1)))
    assert why_not(Problem.make("fprop", (1, 8, 9, 9), (16, 8, 3, 3), padding=(1, 1, 1, 1)).channels_last()) == ""
    assert "33x32" in why_not(Problem.make("fprop", (1, 8, 40, 40), (16, 8, 33, 32)).channels_last())
    assert "float64" in why_not(replace(taken, dtype="float64"))
    assert why_not(replace(taken, dtype="float16")) == ""
    wide = Problem.make("fprop", (1, 8, 9, 9), (16, 8, 3, 3)).channels_last()
    assert "1x1 convolutions" in why_not(replace(wide, dtype="float16"))
    x, w, y = torch.zeros(1, 8, 9, 9), torch.zeros(16, 8, 1, 1), placed((1, 16, 9, 9), False)
    with pytest.raises(RuntimeError, match="channels_last"):
        torch.ops.polyconv_cpu.convolve(x, w, None, y, [1, 1, 0, 0, 1, 1, 1, 0], PLAN, None)


def test_an_unmeasured_engine_must_be_far_ahead() -> None:
    """Until a profile has measured the engine, PyTorch's convolution runs unless the estimates are far apart."""
    plan = plan_cpu(Problem.make("fprop", (1, 256, 28, 28), (256, 256, 1, 1)).channels_last(), inference=True)
    if plan.device.profile is not None:
        assert plan.chosen.engine != pointwise.NAME


def test_a_single_vector_of_outputs_costs_more_than_a_part_of_a_panel() -> None:
    """Measured on 512 to 8 channels, 3x3, 15x15, which PyTorch's convolution computes faster."""

    def cycles(outputs: int) -> float:
        problem = Problem.make("fprop", (1, 512, 15, 15), (outputs, 512, 3, 3), padding=(1, 1, 1, 1)).channels_last()
        (one,) = pointwise.candidates(problem, CpuDevice())
        return one.cycles

    assert cycles(8) == cycles(16) > 1.2 * cycles(32) / 2
