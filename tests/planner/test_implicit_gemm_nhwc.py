"""Half precision in channels_last as sm_80 machine code: results against float64, choice, counted share of the peak."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from hypothesis import strategies as st

import gpu_emulator
from emulate import A100, check, cubin, plan_of
from machine_suites import Shape, explore, zero_bordered
from nightly import NIGHTLY
from polyconv.activation import Activation
from polyconv.cuda.planner import DEVICES, CudaDevice, plan_cuda
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.cost import bound_us
from polyconv.cuda.planner.implicit_gemm import fprop_dgrad_nhwc, wgrad_nhwc
from polyconv.measure.workloads import find
from polyconv.problem import HALF_DTYPES, Pass, Problem
from polyconv.tools.inspect.emulated_cost import count_plan
from polyconv.util.gpu_arch import capability

LAST = "channels_last"
STEMS = ("implicit_gemm/fprop_dgrad_nhwc", "implicit_gemm/wgrad_nhwc")
GEMM = [way for dtype in HALF_DTYPES for way in fprop_dgrad_nhwc.CANDIDATES[dtype]]
WGRAD = [way for dtype in HALF_DTYPES for way in wgrad_nhwc.CANDIDATES[dtype]]
SHAPES = {
    "two steps per tap, ragged pixels": Shape((2, 64, 9, 7), 72, (3, 3), padding=(1, 1, 1, 1), layout=LAST),
    "four taps per step": Shape((1, 8, 13, 11), 8, (3, 2), (2, 1), (1, 2, 0, 1), (1, 2), layout=LAST),
    "step across taps": Shape((1, 24, 9, 10), 40, (2, 3), padding=(0, 1, 2, 0), dilation=(2, 1), layout=LAST),
    "more than one tile of channels": Shape((1, 32, 5, 6), 136, (1, 1), bias=False, layout=LAST),
    "groups": Shape((3, 32, 5, 6), 48, (3, 3), padding=(1, 1, 1, 1), groups=2, layout=LAST),
    "stride two": Shape((1, 16, 11, 9), 24, (3, 3), (2, 2), (1, 1, 1, 1), layout=LAST),
    "fewer steps than stages": Shape((1, 8, 20, 17), 16, (1, 1), layout=LAST),
    "padding only": Shape((1, 8, 4, 4), 8, (3, 3), padding=(5, 5, 0, 0), layout=LAST),
}
COUNTED = ("resnet50-2b", "resnet50-3b", "resnet50-4b")
RANDOM = 200 if NIGHTLY else 8


def ways(kind: Pass) -> list[CudaCandidate]:
    """Every tile in both formats; except nightly, in one of them."""
    every: list[CudaCandidate] = [*WGRAD] if kind is Pass.WGRAD else [*GEMM]
    half = len(every) // 2
    return every if NIGHTLY else [every[i + half * (i % 2)] for i in range(half)]


def run(shape: Shape, kind: Pass, way: CudaCandidate, sms: int = 4) -> None:
    x, w, bias, dy = shape.tensors(getattr(torch, way.kernel.dtype))  # type: ignore[attr-defined]
    problem, x = shape.lowered(kind, x, w, dy)
    check(problem, x, w, bias, dy, plan_of(problem, way, sms=sms, workspace=2**22))


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_tile(shape: Shape, kind: Pass) -> None:
    for way in ways(kind):
        run(shape, kind, way)


@pytest.mark.parametrize("kind", Pass, ids=str)
def test_random(kind: Pass) -> None:
    """Weight gradients in one slice, and in many."""
    channels = st.sampled_from([8, 8, 16, 24, 32, 40, 64])
    cases = cycle((way, sms) for way in ways(kind) for sms in (1, 4))
    explore(
        zero_bordered(channels, st.sampled_from([8, 16, 24, 40, 64, 72, 136]), taps=(5, 5)),
        lambda shape: run(replace(shape, layout=LAST), kind, *next(cases)),
        part=31,
        each=RANDOM,
    )


@pytest.mark.parametrize("activation", [Activation.NONE, Activation.SILU], ids=str)
@pytest.mark.parametrize("way", GEMM, ids=lambda way: way.name)
def test_the_epilogue_rounds_once(way: fprop_dgrad_nhwc.ImplicitGemmNhwcCandidate, activation: Activation) -> None:
    shape = Shape((1, 16, 9, 12), 24, (3, 3), padding=(1, 1, 1, 1), layout=LAST)
    x, w, bias, dy = shape.tensors(getattr(torch, way.tile.dtype))
    problem = replace(shape.problem(Pass.FPROP, x, w, dy), residual=True, activation=activation)
    check(problem, x, w, bias, dy, plan_of(problem, way), residual=torch.randn_like(dy))


def half(kind: Pass = Pass.FPROP, channels: int = 64, **more: object) -> Problem:
    shapes = (16, channels, 56, 56), (64, channels, 3, 3)
    return Problem.make(kind, *shapes, padding=(1, 1, 1, 1), dtype="bfloat16", **more).channels_last()  # type: ignore


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (half(padding_mode="reflect"), "cannot read a reflect border"),
        (half(channels=12), "channels per group are not multiples of 8"),
        (replace(half(), vector_aligned=False), "aligned to 16 bytes"),
        (replace(half(), x_strides=(64 * 56 * 56, 56 * 56, 56, 1)), "channels are not adjacent"),
    ],
)
def test_refuses(problem: Problem, reason: str) -> None:
    for way, kind in ((GEMM[0], Pass.FPROP), (GEMM[0], Pass.DGRAD), (WGRAD[0], Pass.WGRAD)):
        assert reason in (way.refusal(replace(problem, kind=kind)) or "")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_is_chosen_where_it_runs(device: CudaDevice) -> None:
    for kind in Pass:
        kernels = plan_cuda(half(kind), device).kernels
        assert any(kernel.stem in STEMS for kernel in kernels) is (capability(device.arch) >= 80)


@pytest.mark.parametrize(
    ("name", "kind"), product(COUNTED, Pass) if NIGHTLY else zip(COUNTED, Pass, strict=True), ids=str
)
def test_counted_share_of_the_tensor_peak(name: str, kind: Pass) -> None:
    """At least 60 % on an A100; the model agrees with the count within 15 %."""
    problem = replace(find(name)[0].problem(kind), dtype="bfloat16").channels_last()
    plan = plan_cuda(problem, A100)
    every = count_plan(gpu_emulator, plan, {kernel: cubin(kernel) for kernel in set(plan.kernels)}, A100)
    pairs = [pair for pair in zip(plan.launches, every, strict=True) if pair[0].kernel.stem in STEMS]
    ((launch, counted),) = pairs
    peak_ms = problem.multiplications / (A100.products_per_clock("bfloat16") * A100.sms * A100.clock_mhz) / 1e3
    assert peak_ms >= 0.6 * counted.bound_ms
    assert bound_us(launch, A100) / 1e3 == pytest.approx(counted.bound_ms, rel=0.15)
