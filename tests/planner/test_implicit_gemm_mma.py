"""Half-precision kernels as sm_70 machine code against float64 products of the same tensors, rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from emulate import V100, check, plan_of, run_plan
from machine_suites import EDGES, Shape, explore, shapes
from nightly import NIGHTLY, nightly
from polyconv.activation import Activation
from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.implicit_gemm import fprop_dgrad, fprop_dgrad_mma, wgrad_mma
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad_mma import ImplicitGemmMmaCandidate
from polyconv.cuda.planner.implicit_gemm.wgrad_mma import WgradMmaCandidate
from polyconv.numerics import reference
from polyconv.problem import HALF_DTYPES, Pass, Problem

GATHERED = {
    fprop_dgrad.TAPS: Shape((1, 32, 13, 11), 48, (3, 2), padding=(1, 2, 0, 1), dilation=(2, 1)),
    fprop_dgrad.TAPS_VECTOR: Shape((1, 32, 13, 11), 48, (3, 2), padding=(1, 2, 0, 1), layout="channels_last"),
    fprop_dgrad.POINTWISE: Shape((2, 20, 10, 14), 36, (1, 1)),
    fprop_dgrad.ROWS: Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1)),
    fprop_dgrad.ROWS_BORDERED: Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1), mode="reflect"),
    fprop_dgrad.FOLDED: Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1), mode="circular"),
}
RANDOM = 200 if NIGHTLY else 8


def run(shape: Shape, kind: Pass, dtype: str, way: CudaCandidate | None = None) -> bool:
    """Whether the variant takes the problem; without one the planner chooses."""
    x, w, bias, dy = shape.tensors(getattr(torch, dtype))
    problem, x = (shape.problem(kind, x, w, dy), x) if way else shape.lowered(kind, x, w, dy)
    if way is not None and way.refusal(problem) is not None:
        return False
    check(problem, x, w, bias, dy, None if way is None else plan_of(problem, way, workspace=2**20))
    return True


def variants() -> Iterator[Any]:
    """A sample for bfloat16, which a V100 multiplies as float32; nightly all."""
    for dtype in HALF_DTYPES:
        for place, way in enumerate((*fprop_dgrad_mma.CANDIDATES[dtype], *wgrad_mma.CANDIDATES[dtype])):
            marks = [nightly] if dtype == "bfloat16" and place % 6 != 2 else []
            yield pytest.param(dtype, way, id=way.name, marks=marks)


@pytest.mark.parametrize(("dtype", "way"), list(variants()))
def test_every_variant(dtype: str, way: ImplicitGemmMmaCandidate | WgradMmaCandidate) -> None:
    if isinstance(way, WgradMmaCandidate):
        mode = "replicate" if way.bordered else "zeros"
        assert run(Shape((3, 9, 12, 11), 70, (3, 4), padding=(1, 1, 2, 2), mode=mode), Pass.WGRAD, dtype, way)
    else:
        taken = [run(GATHERED[way.loader], kind, dtype, way) for kind in (Pass.FPROP, Pass.DGRAD)]
        assert any(taken), "no problem reached this variant"


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=nightly)])
def test_random(dtype: str, kind: Pass) -> None:
    explore(shapes(), lambda shape: run(shape, kind, dtype), part=17, each=RANDOM)


@nightly
@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("shape", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_edges(dtype: str, shape: Shape, kind: Pass) -> None:
    run(shape, kind, dtype)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_epilogue_rounds_once(layout: str) -> None:
    """Bias, residual and activation are applied to the sums, before they are rounded."""
    shape = Shape((1, 16, 9, 12), 24, (3, 3), padding=(1, 1, 1, 1), layout=layout)
    x, w, bias, dy = shape.tensors(torch.float16)
    problem = replace(shape.problem(Pass.FPROP, x, w, dy), residual=True, activation=Activation.SILU)
    check(problem, x, w, bias, dy, residual=torch.randn_like(dy))


def test_an_error_is_that_of_one_rounding() -> None:
    """Within 1.5 times the error of the exact result rounded once; for a long sum, which tensor cores cut 576 times."""
    shape = Shape((1, 256, 7, 7), 16, (3, 3), padding=(1, 1, 1, 1), bias=False)
    x, w, _, dy = shape.tensors(torch.float16)
    problem, y = shape.problem(Pass.FPROP, x, w, dy), torch.full_like(dy, torch.nan)
    run_plan(plan_cuda(problem, V100), {"x": x, "w": w, "y": y})
    exact = reference.fprop(problem, x.double(), w.double())
    rounded = exact.half().double() - exact
    assert (y.double() - exact).square().mean() <= 1.5**2 * rounded.square().mean()


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_is_planned_for_every_device(device: Any) -> None:
    """Its modelled cost is below that of float32 if there are tensor cores for it."""
    for dtype in HALF_DTYPES:
        problem = Problem.make(Pass.FPROP, (16, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1, 1, 1), dtype=dtype)
        wide = Problem.make(Pass.FPROP, (16, 64, 56, 56), (64, 64, 3, 3), padding=(1, 1, 1, 1), tolerance=0.0)
        half, single = plan_cuda(problem, device), plan_cuda(wide, device)
        if device.products_per_clock(dtype) > 2 * device.fp32_per_clock:
            assert half.cost_us < single.cost_us
