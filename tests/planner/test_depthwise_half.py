"""Depthwise convolutions in half precision as machine code: results against float64, choice, counted memory time."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import emulate
from emulate import V100, check, plan_of
from machine_suites import DEPTHWISE, Shape, explore
from nightly import NIGHTLY
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.depthwise import band, halo, line, strip
from polyconv.problem import HALF_DTYPES, Pass, Problem

FAMILIES = halo, strip, line, band
RANDOM = 200 if NIGHTLY else 12
ARCHS = ("sm_70", "sm_80")
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


BANDS = [pytest.param(way, id=way.name) for dtype in HALF_DTYPES for way in band.CANDIDATES[dtype]]


@pytest.mark.parametrize("kind", [Pass.FPROP, Pass.DGRAD], ids=str)
@pytest.mark.parametrize("way", BANDS)
def test_every_band(way: band.BandCandidate, kind: Pass) -> None:
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
