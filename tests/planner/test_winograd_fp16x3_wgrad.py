"""The fp16x3 weight gradient as sm_70 machine code against float64 PyTorch: edges, random geometries, hard data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from emulate import NAN, V100, check, plan_of, run_plan
from hard_data import HARD
from machine_suites import Shape, explore, geometries_of, zero_bordered
from nightly import NIGHTLY
from polyconv.cuda.planner.winograd_fp16x3 import wgrad
from polyconv.cuda.planner.winograd_fp16x3.wgrad import CANDIDATE, SHARED_BYTES, H, W
from polyconv.measure import workloads
from polyconv.numerics import reference
from polyconv.numerics.scale import largest, scales
from polyconv.problem import PaddingMode, Pass, Problem

AT_NIGHT = 10, 24
RANDOM_PARTS, RANDOM_EACH = AT_NIGHT if NIGHTLY else (1, 6)
LARGE = 2**26
SMS = 2
"""Few enough that a slice has several rows."""

NAMED = {
    "nine taps, dilated": Shape((1, 9, 12, 40), 12, (5, 9), padding=(2, 2, 4, 4), dilation=(2, 3)),
    "rows longer than a chunk, five phases": Shape((1, 8, 6, 190), 8, (2, 7), padding=(1, 1, 2, 3), dilation=(1, 5)),
    "tiles of channels in both directions": Shape((1, 35, 6, 9), 67, (3, 6), padding=(1, 1, 1, 1)),
    "groups": Shape((1, 24, 7, 10), 16, (5, 5), groups=2, padding=(2, 2, 2, 2)),
    "channels last": Shape((2, 12, 6, 9), 10, (3, 3), padding=(1, 1, 1, 1), layout="channels_last"),
}


def run(shape: Shape, workspace: int = LARGE) -> bool:
    """dw and db, with dy so small that dw is of order one; False if the shape is refused."""
    x, w, bias, dy = shape.tensors()
    dy = dy * max(1, dy.shape[0] * dy.shape[2] * dy.shape[3]) ** -0.5
    problem = shape.problem(Pass.WGRAD, x, w, dy)
    if CANDIDATE.refusal(problem) is not None:
        return False
    check(problem, x, w, bias, dy, plan_of(problem, CANDIDATE, sms=SMS, workspace=workspace))
    return True


@pytest.mark.parametrize("name", NAMED)
def test_named(name: str) -> None:
    """In one slice, and in several."""
    assert run(NAMED[name], 1 if list(NAMED).index(name) % 2 else LARGE)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Shape, int]:
    """A small convolution whose taps save multiplications, and the workspace."""
    channels = st.sampled_from([8, 9, 33]), st.sampled_from([8, 17, 65])
    shape = draw(zero_bordered(*channels, taps=(H.taps, W.taps), strides=((1,), (1,))).filter(is_taken))
    return replace(shape, layout=shape.layout.replace("expanded", "sliced")), draw(st.sampled_from([1, 2**20, LARGE]))


def is_taken(shape: Shape) -> bool:
    x, w, _, dy = shape.tensors()
    return CANDIDATE.refusal(shape.problem(Pass.WGRAD, x, w, dy)) is None


@pytest.mark.parametrize("part", range(RANDOM_PARTS))
def test_random(part: int) -> None:
    def runs(drawn: tuple[Shape, int]) -> None:
        assert run(*drawn)

    explore(geometries(), runs, part=part, each=RANDOM_EACH)


def test_the_night_is_long_enough() -> None:
    """At least 200 different geometries, none of them refused."""
    parts, each = AT_NIGHT
    assert len({shape for shape, _ in geometries_of(geometries(), parts=parts, each=each)}) >= 200


# ---- Data that is hard for FP16


SMALL = Problem.make("wgrad", (1, 8, 5, 21), (9, 8, 3, 9), padding=(1, 1, 2, 2))


def gradient(x: Tensor, dy: Tensor) -> tuple[Tensor, float]:
    """dw of a small convolution, and the predicted error."""
    dw = torch.full(SMALL.w_shape, NAN)
    plan = plan_of(SMALL, CANDIDATE)
    run_plan(plan, {"x": x, "y": dy, "dw": dw})
    return dw, plan.expected_error


@pytest.mark.parametrize("name", HARD)
def test_hard_data(name: str) -> None:
    make, size_x, size_dy = HARD[name]
    x, dy = make(SMALL.x_shape) * size_x, torch.randn(SMALL.y_shape) * size_dy
    dw, predicted = gradient(x, dy)
    error = (dw.double() - reference.wgrad(SMALL, x, dy, SMALL.w_shape)[0]).abs()
    assert largest(error, scales(SMALL, {"x": x, "y": dy})["dw"]) <= predicted


def test_channels_are_scaled_apart() -> None:
    """Each as exact as if alone, with 2^100 between them."""
    x, dy = torch.randn(SMALL.x_shape), torch.randn(SMALL.y_shape)
    of_x, of_dy = 2.0 ** torch.linspace(-50, 50, 8).round(), 2.0 ** torch.linspace(50, -50, 9).round()
    apart, _ = gradient(x * of_x[:, None, None], dy * of_dy[:, None, None])
    assert torch.equal(apart, gradient(x, dy)[0] * of_dy[:, None, None, None] * of_x[:, None, None])


def test_infinities_stay_in_their_channels() -> None:
    x, dy = torch.randn(SMALL.x_shape), torch.randn(SMALL.y_shape)
    dy[0, 3, 1, 2], x[0, 2, 1, 1] = torch.inf, torch.nan
    dw, _ = gradient(x, dy)
    assert torch.isfinite(dw[[0, 1, 2, 4, 5, 6, 7, 8]][:, [0, 1, 3, 4, 5, 6, 7]]).all()
    assert not torch.isfinite(dw[3]).any()


# ---- Plans


@pytest.mark.parametrize("name", ["W1", "W3"])
def test_workloads_stay_within_tolerance_and_workspace(name: str) -> None:
    problem = workloads.find(name)[0].problem(Pass.WGRAD)
    assert CANDIDATE.refusal(problem) is None
    assert CANDIDATE.error(problem, V100.sms, LARGE) <= problem.tolerance
    assert CANDIDATE.schedule(problem, V100.sms, LARGE).workspace_bytes <= LARGE


def test_shared_memory_of_the_smallest_device() -> None:
    assert V100.shared_per_block_optin >= SHARED_BYTES


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(SMALL, padding_mode=PaddingMode.REFLECT), "border"),
        (replace(SMALL, stride=(1, 2)), "classes"),
        (replace(SMALL, kernel=(3, 10)), "more than 5 x 9 taps"),
        (Problem.make("wgrad", (1, 3, 9, 9), (8, 3, 3, 5)), "fewer than 8 channels"),
        (SMALL.for_pass(Pass.FPROP), "only for"),
    ],
)
def test_refusals(problem: Problem, reason: str) -> None:
    assert reason in str(CANDIDATE.refusal(problem))
    assert bool(list(wgrad.candidates(problem))) is (problem.kind is Pass.WGRAD)
