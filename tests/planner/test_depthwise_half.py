"""Depthwise convolutions in half precision as machine code: results against float64, choice, counted memory time."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import emulate
import gpu_emulator
from emulate import A100, V100, check, cubin, plan_of
from machine_suites import DEPTHWISE, Shape, explore
from nightly import NIGHTLY
from polyconv.activation import Activation
from polyconv.cuda.planner import DEVICES, CudaDevice, plan_cuda
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.cost import bound_us
from polyconv.cuda.planner.depthwise import band, halo, line, strip
from polyconv.lowering.lower import lower
from polyconv.measure.workloads import find
from polyconv.problem import HALF_DTYPES, Pass, Problem
from polyconv.tools.inspect.emulated_cost import count_plan

FAMILIES = halo, strip, line, band
RANDOM = 200 if NIGHTLY else 12
ARCHS = ("sm_70", "sm_80")
LAYOUTS = ("contiguous", "channels_last")
CAUSAL = Problem.make(Pass.FPROP, (1, 12288, 1, 16384), (12288, 1, 1, 4), padding=(0, 0, 3, 0), groups=12288)


def ways(problem: Problem) -> list[CudaCandidate]:
    """Depthwise candidates that take the problem."""
    every = (way for family in FAMILIES if problem.dtype in family.DTYPES for way in family.candidates(problem))
    return [way for way in every if way.refusal(problem) is None]


def run(shape: Shape, kind: Pass, dtype: str, pick: int | None = None, sms: int = 4) -> None:
    """All depthwise candidates, or one of them."""
    x, w, bias, dy = shape.tensors(getattr(torch, dtype))
    problem, x = shape.lowered(kind, x, w, dy)
    every = ways(problem)
    for way in every if pick is None else every[pick % len(every) :][:1] if every else ():
        check(problem, x, w, bias, dy, plan_of(problem, way, sms=sms, workspace=2**22))


@pytest.fixture(params=ARCHS)
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(emulate, "arch", request.param)
    return str(request.param)


KERNELS = [
    pytest.param(kind, way, id=f"{kind} {way.name}")
    for dtype in HALF_DTYPES
    for kind in Pass
    for way in (*strip.CANDIDATES[kind, dtype], *(line.GRADIENTS if kind is Pass.WGRAD else line.FORWARD)[dtype])
]


@pytest.mark.parametrize(("kind", "way"), KERNELS)
def test_every_variant(kind: Pass, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tall and short strips, long and short pieces of rows; bfloat16 as code of a GPU that rounds to it."""
    monkeypatch.setattr(emulate, "arch", ARCHS[way.dtype == "bfloat16"])
    if isinstance(way, line.LineCandidate | line.LineWgradCandidate):
        shape = Shape((2, 3, 2, 300), 3, (1, way.taps), padding=(0, 0, way.taps - 1, 1), groups=3)
    else:
        layout, channels = ("channels_last", 34) if way.lanes == strip.CHANNELS else ("contiguous", 3)
        stride = (way.stride, way.stride)
        shape = Shape((2, channels, 21, 13), channels, way.taps, stride, (2, 1, 3, 0), groups=channels, layout=layout)
    x, w, bias, dy = shape.tensors(getattr(torch, way.dtype))
    problem = shape.problem(kind, x, w, dy)
    for sms in (1, V100.sms):
        check(problem, x, w, bias, dy, plan_of(problem, way, sms=sms, workspace=2**20))


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("name", DEPTHWISE)
def test_named(name: str, kind: Pass) -> None:
    run(DEPTHWISE[name], kind, HALF_DTYPES[len(name) % 2], pick=None if NIGHTLY else len(name))


BANDS = [
    pytest.param(way, kind, id=f"{kind} {way.name}")
    for dtype in HALF_DTYPES
    for kind in Pass
    for way in (band.GRADIENTS if kind is Pass.WGRAD else band.CANDIDATES)[dtype]
]


@pytest.mark.parametrize(("way", "kind"), BANDS)
def test_every_band(way: Any, kind: Pass) -> None:
    """Several tiles, ragged ones, several images per block, channels that do not fill a block."""
    last = way.channels > 1
    channels, layout = (24, "channels_last") if last else (3, "contiguous")
    shape = Shape((3, channels, 39, 61 if last else 75), channels, way.taps, (1, 1), (3, 2, 4, 1), (1, 1), channels)
    shape = replace(shape, layout=layout)
    x, w, bias, dy = shape.tensors(getattr(torch, way.dtype))
    problem = shape.problem(kind, x, w, dy)
    for sms in (1, V100.sms) if NIGHTLY else (1,):
        check(problem, x, w, bias, dy, plan_of(problem, way, sms=sms))


@st.composite
def depthwise(draw: st.DrawFn) -> Shape:
    """Compiled and other kernel sizes, multipliers, borders and layouts."""
    (_, each), kernels = draw(st.sampled_from(list(strip.HALF_KERNELS.items())))
    kernel, stride, dilation = draw(st.sampled_from(kernels)), (each, each), (1, 1)
    size, top = (draw(st.integers(7, 20)), draw(st.integers(7, 30))), draw(st.integers(0, 4))
    kind = draw(st.sampled_from(["compiled", "compiled", "row", "row", "any"]))
    if kind == "row":
        kernel, stride, top = (1, draw(st.sampled_from(line.TAPS))), (1, 1), 0
        size = (draw(st.integers(1, 3)), draw(st.integers(7, 400)))
    elif kind == "any":
        kernel = (draw(st.integers(1, 6)), draw(st.integers(1, 6)))
        stride, dilation = (draw(st.integers(1, 3)), draw(st.integers(1, 3))), (draw(st.integers(1, 2)), 1)
        size = (size[0] + 4, size[1])
    sides = (top, top, draw(st.integers(0, 4)), draw(st.integers(0, 4)))
    channels = draw(st.integers(1, 40) if sum(size) < 30 else st.integers(1, 3))
    multiplier = draw(st.sampled_from([1, 1, 1, 2]))
    return Shape(
        (draw(st.integers(1, 2)), channels, *size),
        channels * multiplier,
        kernel,
        stride,
        sides,
        dilation,
        channels,
        draw(st.booleans()),
        "zeros",
        draw(st.sampled_from(["contiguous", "channels_last", "sliced", "expanded"])),
    )


@pytest.mark.parametrize("kind", Pass, ids=str)
def test_random(kind: Pass, arch: str) -> None:
    turn = cycle(
        (HALF_DTYPES[0] if arch == "sm_70" else dtype, n, sms)
        for n in range(7)
        for dtype in HALF_DTYPES
        for sms in (1, 80)
    )
    explore(depthwise(), lambda shape: run(shape, kind, *next(turn)), part=41, each=RANDOM)


@st.composite
def in_chunks(draw: st.DrawFn) -> Shape:
    """Kernels with bands in channels_last: small maps, several tiles of rows and columns, borders without elements."""
    taps, channels = draw(st.sampled_from([5, 7, 7])), 8 * draw(st.integers(1, 5))
    size = draw(st.integers(taps, 40)), draw(st.integers(taps, 70) if channels < 24 else st.integers(taps, 30))
    padding = tuple(draw(st.integers(0, 8)) for _ in range(4))
    batch, bias = draw(st.integers(1, 3)), draw(st.booleans())
    shape = Shape((batch, channels, *size), channels, (taps, taps), (1, 1), padding, (1, 1), channels, bias)
    return replace(shape, layout="channels_last")


@pytest.mark.parametrize("kind", Pass, ids=str)
def test_random_bands_in_channels_last(kind: Pass) -> None:
    turn = cycle(product((0, 1), HALF_DTYPES, (1, 80)))
    every = {dtype: (band.GRADIENTS if kind is Pass.WGRAD else band.CANDIDATES)[dtype] for dtype in HALF_DTYPES}

    def run_one(shape: Shape) -> None:
        pick, dtype, sms = next(turn)
        x, w, bias, dy = shape.tensors(getattr(torch, dtype))
        problem = shape.problem(kind, x, w, dy)
        ways = [way for way in every[dtype] if way.refusal(problem) is None]
        check(problem, x, w, bias, dy, plan_of(problem, ways[pick], sms=sms, workspace=2**22))

    explore(in_chunks(), run_one, part=43, each=RANDOM)


# ---- properties


EPILOGUES = [
    (band.CANDIDATES["float16"][2], (1, 1), (3, 3, 3, 3)),
    (band.CANDIDATES["bfloat16"][3], (1, 1), (2, 2, 2, 2)),
    (strip.CANDIDATES[Pass.FPROP, "float16"][0], (1, 1), (1, 1, 1, 1)),
    (line.FORWARD["bfloat16"][2], (1, 1), (0, 0, 3, 0)),
    (halo.FORWARD["float16"][2], (2, 1), (1, 1, 0, 1)),
]


@pytest.mark.parametrize(("way", "stride", "padding"), EPILOGUES, ids=lambda one: getattr(one, "name", None))
def test_the_epilogue_rounds_once(way: Any, stride: tuple[int, int], padding: tuple[int, int, int, int]) -> None:
    kernel = (1, way.taps) if isinstance(way, line.LineCandidate) else getattr(way, "taps", (4, 3))
    layout = "channels_last" if getattr(way, "channels", 1) > 1 else "contiguous"
    shape = Shape((2, 16, 13, 17), 16, kernel, stride, padding, groups=16, layout=layout)
    x, w, bias, dy = shape.tensors(getattr(torch, way.dtype))
    for activation in (Activation.NONE, Activation.SILU):
        problem = replace(shape.problem(Pass.FPROP, x, w, dy), residual=True, activation=activation)
        check(problem, x, w, bias, dy, plan_of(problem, way), residual=torch.randn_like(dy))


def half(name: str, kind: Pass, layout: str, dtype: str = "float16") -> Problem:
    problem = replace(CAUSAL if name == "causal" else find(name)[0].problem(Pass.FPROP), kind=kind, dtype=dtype)
    return problem.channels_last() if layout == "channels_last" else problem


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_depthwise_kernels_are_chosen(device: CudaDevice) -> None:
    for name, layout, kind in product(("mobilenet-dw3", "mobilenet-dw5s2", "convnext-dw7"), LAYOUTS, Pass):
        problem = half(name, kind, layout)
        assert plan_cuda(problem, device).algorithm.startswith("direct (depthwise_"), problem
        assert lower(problem, "cuda") is None


def test_bands_are_not_exact_beside_infinities() -> None:
    problem = half("convnext-dw7", Pass.FPROP, "contiguous")
    assert "band" in plan_cuda(problem, A100).algorithm
    strict = plan_cuda(replace(problem, tolerance=0.0), A100)
    assert "strip" in strict.algorithm
    assert "tolerance=0 rules out" in strict.explain(verbose=True)


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize(
    ("name", "layout"), [*product(("mobilenet-dw3", "convnext-dw7"), LAYOUTS), ("causal", "contiguous")]
)
def test_counted_near_the_memory_time(name: str, layout: str, kind: Pass) -> None:
    """At most 1.3 times it on an A100, and the model agrees with the count."""
    plan = plan_cuda(half(name, kind, layout), A100)
    counted = count_plan(gpu_emulator, plan, {kernel: cubin(kernel) for kernel in plan.kernels}, A100)
    assert sum(one.bound_ms for one in counted) <= 1.3 * counted[0].ms("DRAM")
    modelled = sum(bound_us(launch, A100) for launch in plan.launches) / 1e3
    assert modelled == pytest.approx(sum(one.bound_ms for one in counted), rel=0.25)
