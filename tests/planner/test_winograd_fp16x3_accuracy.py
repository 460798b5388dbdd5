"""Accuracy of the fp16x3 pipeline as machine code: against float64 on data that is hard for FP16, and relative to the
FP32 kernels of the same scheme."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from emulate import error_in_scales, plan_of, run_plan
from hard_data import HARD
from polyconv.activation import Activation
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.winograd.axis import ToomAxis
from polyconv.cuda.planner.winograd.nonfused import DIRECT, F45, F45_NESTED, NonfusedCandidate
from polyconv.cuda.planner.winograd_fp16x3.nonfused import INSTRUCTIONS, Fp16x3Candidate
from polyconv.cuda.planner.winograd_fp16x3.nonfused_tiling import MatrixInstruction
from polyconv.numerics import reference
from polyconv.problem import Problem

by_both = pytest.mark.parametrize("mma", INSTRUCTIONS, ids=lambda mma: mma.name)
SIDES = (0, 0, 2, 2)
"""Padding along W, the transformed axis."""


# ---- Against FP32


MOST_OF_FP32 = {"normal": 1.5, "heavy-tailed": 1.5, "large times small": 1.5, "one-hot": 3.5}
"""Allowed ratio to the largest FP32 error of the same scheme. Sums of many products lose less on tensor cores than in
FP32, which rounds at each. A one-hot image has one product, which FP32 rounds once, to 24 bits: there the loss of split
operands, some 2^-22, shows."""


def of_w1(name: str, way: CudaCandidate) -> float:
    """The error for W1's kernel and channels on a small image of such data."""
    make, size_x, size_w = {"normal": (torch.randn, 1.0, 1.0), **HARD}[name]
    torch.manual_seed(0)
    x, w = make((1, 32, 8, 37)) * size_x, torch.randn(16, 32, 5, 9) * size_w
    return error_in_scales(way, x, w, (0, 0, 4, 4))[0]


@cache
def of_w1_in_fp32(name: str) -> float:
    return of_w1(name, NonfusedCandidate(DIRECT, F45_NESTED, 32))


@pytest.mark.parametrize("name", MOST_OF_FP32)
@by_both
def test_as_exact_as_fp32(mma: MatrixInstruction, name: str) -> None:
    assert of_w1(name, Fp16x3Candidate(F45_NESTED, mma)) <= MOST_OF_FP32[name] * of_w1_in_fp32(name)


# ---- Data that is hard for FP16


@pytest.mark.parametrize("w", [F45, DIRECT], ids=str)
@pytest.mark.parametrize("name", HARD)
@by_both
def test_hard_data(mma: MatrixInstruction, name: str, w: ToomAxis) -> None:
    make, size_x, size_w = HARD[name]
    x, weight = make((1, 8, 5, 17)) * size_x, torch.randn(9, 8, 2, 5) * size_w
    error, predicted = error_in_scales(Fp16x3Candidate(w, mma), x, weight, SIDES)
    assert error <= predicted


def test_images_and_filters_are_scaled_apart() -> None:
    """Each as exact as if alone, with 2^100 between them."""
    apart = 2.0 ** torch.tensor([50.0, 0.0, -50.0])
    x, w = torch.randn(3, 8, 4, 17) * apart[:, None, None, None], torch.randn(9, 8, 2, 5)
    w *= apart.repeat(3)[:, None, None, None]
    error, predicted = error_in_scales(Fp16x3Candidate(F45), x, w, SIDES)
    assert error <= predicted


def test_infinities_stay_in_their_tile() -> None:
    """Non-finite values do not affect the scaling of others."""
    x, w = torch.randn(1, 8, 3, 100), torch.randn(8, 8, 1, 5)
    x[0, 2, 1, 4], x[0, 3, 1, 5] = torch.inf, torch.nan
    problem = Problem.make("fprop", (1, 8, 3, 100), (8, 8, 1, 5))
    y = torch.empty(problem.y_shape)
    run_plan(plan_of(problem, Fp16x3Candidate(F45)), {"x": x, "w": w, "y": y})
    assert not torch.isfinite(y[:, :, 1, :5]).any()
    expected = reference.with_epilogue(problem, x, w, None, None, Activation.NONE)
    far = torch.isfinite(y)
    assert far[:, :, 0].all()
    assert far[:, :, 1, 16:].all()
    assert torch.allclose(y[far].double(), expected[far], rtol=1e-4, atol=1e-4)
