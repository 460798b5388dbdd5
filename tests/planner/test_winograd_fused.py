"""The fused Winograd kernels as sm_70 machine code against float64: named edges, random geometries, resources."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

import emulate
from emulate import check, plan_of
from machine_suites import Shape, explore
from nightly import NIGHTLY
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad import roles
from polyconv.cuda.planner.winograd import fused as winograd_fused
from polyconv.cuda.planner.winograd.fused import FusedCandidate, ResidentCandidate
from polyconv.cuda.planner.winograd_fp16x3 import fused as winograd_fp16x3_fused
from polyconv.problem import Pass

pytestmark = pytest.mark.usefixtures("every_arch")
KINDS = (Pass.FPROP, Pass.DGRAD)
WAYS = *winograd_fused.CANDIDATES, winograd_fp16x3_fused.CANDIDATE
RANDOM_EACH = 50 if NIGHTLY else 8
RANDOM_PARTS = 4 if NIGHTLY else 1

by_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)

EDGES = {
    "one output": Shape((1, 1, 3, 3), 1, (3, 3)),
    "one pixel, padded": Shape((1, 1, 1, 1), 1, (3, 3), padding=(1, 1, 1, 1)),
    "one tile and one column": Shape((1, 4, 10, 35), 8, (3, 3)),
    "one row too many": Shape((1, 4, 19, 34), 8, (3, 3)),
    "several images": Shape((3, 2, 6, 9), 5, (3, 3), padding=(1, 1, 1, 1)),
    "channels not a multiple of a chunk": Shape((1, 5, 8, 9), 7, (3, 3), padding=(1, 1, 1, 1)),
    "more than one chunk of channels": Shape((1, 16, 9, 66), 14, (3, 3), padding=(1, 1, 1, 1)),
    "more than one tile of channels": Shape((1, 3, 7, 8), 70, (3, 3), padding=(1, 1, 1, 1)),
    "two taps": Shape((1, 4, 9, 12), 8, (2, 2), padding=(1, 0, 0, 1)),
    "one row of taps": Shape((1, 4, 6, 20), 8, (1, 3), padding=(0, 0, 1, 1)),
    "one column of taps": Shape((1, 4, 20, 6), 8, (3, 1), padding=(1, 1, 0, 0)),
    "pointwise": Shape((1, 6, 5, 7), 9, (1, 1)),
    "dilated": Shape((1, 4, 23, 31), 8, (3, 3), padding=(2, 2, 3, 3), dilation=(2, 3)),
    "dilation wider than the image": Shape((1, 4, 7, 7), 8, (3, 3), padding=(9, 9, 9, 9), dilation=(9, 9)),
    "cropped": Shape((2, 4, 12, 11), 8, (3, 3), padding=(-2, 1, 1, -3)),
    "wide padding": Shape((1, 4, 4, 4), 8, (3, 3), padding=(5, 4, 6, 3)),
    "groups": Shape((1, 12, 8, 8), 18, (3, 3), padding=(1, 1, 1, 1), groups=6),
    "no bias": Shape((1, 4, 9, 9), 8, (3, 3), bias=False),
    "channels_last": Shape((2, 6, 9, 9), 10, (3, 3), padding=(1, 1, 1, 1), layout="channels_last"),
    "windows of larger tensors": Shape((2, 4, 9, 9), 8, (3, 3), padding=(1, 1, 1, 1), layout="sliced"),
    "gradient of a sum": Shape((2, 4, 9, 9), 8, (3, 3), padding=(1, 1, 1, 1), layout="expanded"),
    "strided": Shape((1, 4, 17, 19), 6, (3, 3), (2, 2), (1, 1, 1, 1)),
    "strided, long kernel": Shape((1, 3, 17, 19), 6, (5, 6), (2, 3), (1, 2, 2, 1)),
}
"""The last two as gradients only: a strided forward convolution reads with stride."""


def skip_elsewhere(way: FusedCandidate) -> None:
    """Tests for tensor cores of a generation other than the executed one."""
    if not way.kernel.runs_on(emulate.arch):
        pytest.skip(f"not for {emulate.arch}")


def taken(way: FusedCandidate, shape: Shape, kind: Pass) -> bool:
    """True if the variant takes the problem, whose result must be within the prediction and the tolerance.

    Problems with more channels than fit shared memory must be refused, and count as taken.
    """
    skip_elsewhere(way)
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(kind, x, w, dy)
    refused = way.refusal(problem)
    if isinstance(way, ResidentCandidate) and roles(problem).channels > way.channels:
        assert refused
        return True
    if refused:
        return False
    check(problem, x, w, bias, dy, plan_of(problem, way))
    return True


@by_way
@pytest.mark.parametrize("name", EDGES)
def test_named(name: str, way: FusedCandidate) -> None:
    torch.manual_seed(0)
    assert [taken(way, EDGES[name], kind) for kind in KINDS] == [not name.startswith("strided"), True]


@by_way
def test_several_tiles_of_channels_per_block(way: FusedCandidate) -> None:
    """On one multiprocessor a block processes all written channels; the resident one starts anywhere."""
    skip_elsewhere(way)
    torch.manual_seed(0)
    shape = Shape((1, 3, 42, 130), 70, (3, 3))
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(Pass.FPROP, x, w, dy)
    check(problem, x, w, bias, dy, plan_of(problem, way, sms=1))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any problem of these kernels, small enough for the emulator."""
    kernel = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    dilation = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    size, sides = [], []
    for axis, most in ((0, 10), (1, 36)):
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        before, after = draw(st.integers(-2, 4)), draw(st.integers(-2, 4))
        crop = max(-before, 0) + max(-after, 0)
        size.append(max(1, reach - before - after, crop + 1) + draw(st.integers(0, most)))
        sides += [before, after]
    return Shape(
        (draw(st.integers(1, 2)), groups * draw(st.integers(1, 9)), size[0], size[1]),
        groups * draw(st.sampled_from([1, 2, 5, 8, 9, 17, 33])),
        kernel,
        (1, 1),
        (sides[0], sides[1], sides[2], sides[3]),
        dilation,
        groups,
        draw(st.booleans()),
        "zeros",
        draw(st.sampled_from(["contiguous", "contiguous", "channels_last", "sliced", "expanded"])),
    )


@pytest.mark.parametrize("part", range(RANDOM_PARTS))
@pytest.mark.parametrize("kind", KINDS, ids=str)
@by_way
def test_random(way: FusedCandidate, kind: Pass, part: int) -> None:
    def runs(shape: Shape) -> None:
        assert taken(way, shape, kind)

    explore(shapes(), runs, part=KINDS.index(kind) + len(KINDS) * part, each=RANDOM_EACH)


REFUSED = {
    "more than 3 taps": (Shape((1, 4, 9, 9), 4, (5, 3)), Pass.FPROP),
    "the source is read with a stride": (Shape((1, 4, 9, 9), 4, (3, 3), (2, 2)), Pass.FPROP),
    "a stride that leaves positions without taps": (Shape((1, 4, 9, 9), 4, (2, 3), (3, 2)), Pass.DGRAD),
    "cannot read a reflect border": (Shape((1, 4, 9, 9), 4, (3, 3), padding=(1, 1, 1, 1), mode="reflect"), Pass.FPROP),
    "only for fprop and dgrad": (Shape((1, 4, 9, 9), 4, (3, 3)), Pass.WGRAD),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    shape, kind = REFUSED[reason]
    x, w, _, dy = shape.tensors()
    assert {way.refusal(shape.problem(kind, x, w, dy)) for way in WAYS} == {reason}
