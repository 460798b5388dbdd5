"""The nonfused Winograd pipeline as sm_70 machine code against float64: edges, random geometries, every instance."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from hypothesis import strategies as st

from emulate import V100, check, plan_of, run_plan
from machine_suites import EDGES, KERNELBENCH, Shape, explore, zero_bordered
from nightly import NIGHTLY
from polyconv.algebra.matrices import matrix
from polyconv.algebra.segments import AxisScheme
from polyconv.cuda.planner.plan import Launch
from polyconv.cuda.planner.winograd import nonfused
from polyconv.cuda.planner.winograd.axis import ToomAxis
from polyconv.cuda.planner.winograd.nonfused import (
    DIRECT,
    F23,
    F43,
    F45,
    F45_NESTED,
    NonfusedCandidate,
    NonfusedGemmParams,
)
from polyconv.measure import workloads
from polyconv.problem import PaddingMode, Pass, Problem

pytestmark = pytest.mark.usefixtures("every_arch")
PASSES = (Pass.FPROP, Pass.DGRAD)
RANDOM_PARTS, RANDOM_EACH = (4, 30) if NIGHTLY else (1, 10)
LARGE = 2**26
"""A workspace for a single slab; of one byte, for slabs of one row of tiles."""

NAMED = {
    **EDGES,
    **{name: shape for name, shape in KERNELBENCH.items() if shape.groups == 1},
    "nine taps in nested segments, dilated": Shape((2, 9, 14, 40), 70, (5, 9), (1, 1), (2, 2, 4, 4), (2, 3)),
    "seven taps in segments of both axes": Shape((1, 9, 19, 21), 20, (7, 7), padding=(3, 3, 3, 3)),
    "eleven taps in three segments": Shape((1, 5, 13, 17), 9, (3, 11), padding=(1, 1, 5, 5)),
    "more columns than one tile, many rows": Shape((3, 8, 25, 33), 17, (3, 3), padding=(1, 1, 1, 1)),
    "one column": Shape((2, 8, 30, 1), 8, (5, 1), padding=(2, 2, 0, 0)),
    "strided classes of different length": Shape((1, 6, 21, 22), 10, (5, 7), (2, 3), (2, 1, 3, 0)),
    "strided and dilated": Shape((1, 6, 21, 22), 10, (3, 5), (3, 2), (2, 1, 3, 0), (2, 3)),
    "a wide row": Shape((1, 2, 4, 700), 5, (3, 3), padding=(1, 1, 1, 1)),
    "rows that may not be written by four": Shape((1, 8, 9, 13), 8, (3, 3), padding=(1, 1, 1, 1)),
    "gradient of pixels that meet no tap": Shape((1, 8, 12, 11), 8, (2, 2), stride=(3, 4)),
}


def usable(problem: Problem) -> list[NonfusedCandidate]:
    """Variants that the planner could choose."""
    found = [way for way in nonfused.candidates(problem) if way.refusal(problem) is None]
    return [way for way in found if way.error(problem, V100.sms, LARGE) <= problem.tolerance]


def run(shape: Shape, kind: Pass, choice: int, *, sms: int = V100.sms, workspace: int = LARGE) -> bool:
    """One pass by one of the usable variants; False if there is none."""
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(kind, x, w, dy)
    ways = usable(problem)
    if not ways:
        return False
    way = ways[choice % len(ways)]
    check(problem, x, w, bias, dy, plan_of(problem, way, sms=sms, workspace=workspace))
    return True


@pytest.mark.parametrize(
    ("name", "kind"), product(NAMED, PASSES) if NIGHTLY else zip(NAMED, cycle(PASSES), strict=False), ids=str
)
def test_named(name: str, kind: Pass) -> None:
    """Two variants per shape, spread over all that take it, in one slab and in several. The passes of the shapes in
    turn; nightly both of each."""
    number = list(NAMED).index(name)
    for choice, (sms, workspace) in enumerate(((80, LARGE), (3, 2**20))):
        assert run(NAMED[name], kind, number + 7 * choice, sms=sms, workspace=workspace)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Shape, int, int, int]:
    """A small convolution, a variant, multiprocessors and workspace."""
    return (
        draw(zero_bordered(st.sampled_from([2, 3, 5, 8, 9]), st.integers(1, 20))),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from([1, 2, 80])),
        draw(st.sampled_from([1, 2**17, LARGE])),
    )


@pytest.mark.parametrize("part", range(RANDOM_PARTS))
@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_random(kind: Pass, part: int) -> None:
    def runs(drawn: tuple[Shape, int, int, int]) -> None:
        shape, choice, sms, workspace = drawn
        assert run(shape, kind, choice, sms=sms, workspace=workspace)

    explore(geometries(), runs, part=part, each=RANDOM_EACH)


INSTANCES = [
    NonfusedCandidate(h, w, k_tile)
    for h, w in product(nonfused.H_AXES, nonfused.W_AXES)
    for k_tile in nonfused.k_tiles(w)
]


@pytest.mark.parametrize("way", INSTANCES, ids=lambda way: way.name)
def test_every_instance(way: NonfusedCandidate) -> None:
    """More written channels than a tile, ragged tiles along both axes, two images, padded channels."""
    taps = {F23: 3, F43: 3, F45: 5, F45_NESTED: 8, DIRECT: 2}
    shape = Shape((2, 11, 11, 19), 37, (taps[way.h], taps[way.w]), padding=(1, 1, 2, 2), dilation=(2, 1))
    for kind in PASSES:
        x, w, bias, dy = shape.tensors()
        problem = shape.problem(kind, x, w, dy)
        check(problem, x, w, bias, dy, plan_of(problem, way, sms=2))


def test_every_instance_fits_the_smallest_shared_memory() -> None:
    for w in nonfused.W_AXES:
        for k_tile in nonfused.k_tiles(w):
            assert nonfused.gemm_shared(w, k_tile) * nonfused.gemm_blocks(w, k_tile) <= V100.shared_per_sm


def test_nesting_is_the_one_that_the_kernel_spells_out() -> None:
    """winograd/nonfused_gemm.cuh adds the middle product to both tiles, and transforms differences of neighbours."""
    outer = F45_NESTED.scheme().outer
    assert outer.at == matrix([[1, 1, 0], [0, 1, 1]])
    assert outer.g == matrix([[1, 0], [1, 1], [0, 1]])
    assert outer.bt == matrix([[1, -1, 0], [0, 1, 0], [0, -1, 1]])


@pytest.mark.parametrize("axis", [DIRECT, F23, F45])
@pytest.mark.parametrize("taps", range(1, 14))
def test_segments_cover_the_taps(axis: ToomAxis, taps: int) -> None:
    fitted = nonfused.fitted(axis, taps)
    assert fitted.taps >= taps
    assert isinstance(fitted.scheme(), AxisScheme)
    if nonfused.segments_of(axis, taps) > 1 and not axis.is_direct:
        assert fitted.taps == taps
        assert all(offset == number * axis.m for number, offset in enumerate(fitted.offsets))


# ---- Slabs and refusals


def w1(kind: Pass) -> Problem:
    return workloads.find("W1")[0].problem(str(kind))


def multiplied(launches: tuple[Launch, ...]) -> int:
    """Rounds of all persistent blocks, over all slabs."""
    tiles = [
        NonfusedGemmParams.from_buffer_copy(x.params).tiles
        for x in launches
        if x.kernel.stem == "winograd/nonfused_gemm"
    ]
    return sum(-(-count // V100.sms) for count in tiles)


def test_slabs_of_w1_fill_the_device() -> None:
    """64 MiB cost at most three percent more rounds than 256 MiB, which hardly exceed the multiplications."""
    way = NonfusedCandidate(F45, F45_NESTED, 64)
    small, large = (way.schedule(w1(Pass.FPROP), V100.sms, mib * 2**20) for mib in (64, 256))
    assert small.workspace_bytes <= 64 * 2**20
    ((chain, _),) = NonfusedCandidate(F45, F45_NESTED, 64).chains(w1(Pass.FPROP))
    assert multiplied(small.launches) <= 1.03 * multiplied(large.launches)
    assert multiplied(large.launches) <= 1.02 * chain.gemm_tiles(chain.rows) / V100.sms


def test_a_workspace_that_is_too_small_for_one_row_is_exceeded() -> None:
    schedule = NonfusedCandidate(F45, F45_NESTED, 64).schedule(w1(Pass.FPROP), V100.sms, 1)
    assert 0 < schedule.workspace_bytes < 8 * 2**20


@pytest.mark.parametrize("name", ["kb50", "kb55", "kb56", "kb62", "kb63", "kb80"])
@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_workloads_have_a_way(name: str, kind: Pass) -> None:
    problem = workloads.find(name)[0].problem(str(kind))
    assert any(way.h is not DIRECT for way in usable(problem))


def test_refusals() -> None:
    way = NonfusedCandidate(F43, F43, 32)
    dense = Problem.make("fprop", (1, 8, 9, 9), (8, 8, 3, 3), padding=(1, 1, 1, 1))
    assert way.refusal(dense) is None
    assert "border" in str(way.refusal(replace(dense, padding_mode=PaddingMode.REFLECT)))
    assert "depthwise" in str(way.refusal(Problem.make("fprop", (1, 8, 9, 9), (8, 1, 3, 3), groups=8)))
    assert "taps" in str(way.refusal(Problem.make("fprop", (1, 8, 9, 9), (8, 8, 5, 5))))
    assert "nests" in str(NonfusedCandidate(F43, F45_NESTED, 32).refusal(dense))
    assert "only for" in str(way.refusal(replace(dense, kind=Pass.WGRAD)))


def test_infinities_stay_in_their_image_and_channel() -> None:
    shape = Shape((2, 5, 9, 9), 7, (3, 3), padding=(1, 1, 1, 1), bias=False)
    x, w, _, dy = shape.tensors()
    x[1] = torch.inf
    problem = shape.problem(Pass.FPROP, x, w, dy)
    y = torch.empty_like(dy)
    run_plan(plan_of(problem, NonfusedCandidate(F43, F43, 64)), {"x": x, "w": w, "y": y})
    assert torch.isfinite(y[0]).all()


def test_cropped_infinities_are_not_read() -> None:
    """Rows and columns that no output needs are not read by partial tiles."""
    shape = Shape((1, 5, 11, 12), 7, (3, 3), padding=(-1, -2, -2, -1), bias=False)
    x, w, _, dy = shape.tensors()
    x[:, :, :1], x[:, :, -2:], x[..., :2], x[..., -1:] = torch.inf, torch.inf, torch.inf, torch.inf
    problem = shape.problem(Pass.FPROP, x, w, dy)
    y = torch.empty_like(dy)
    run_plan(plan_of(problem, NonfusedCandidate(F43, F45, 64)), {"x": x, "w": w, "y": y})
    assert torch.isfinite(y).all()
