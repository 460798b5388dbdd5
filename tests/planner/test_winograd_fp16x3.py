"""The fp16x3 pipeline as machine code against float64 PyTorch: edges and random geometries.

With both matrix instructions: sm_70's and sm_80's, each as its own machine code.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from emulate import A100, NAN, V100, check, plan_of, run_plan
from machine_suites import Shape, explore, geometries_of, zero_bordered
from nightly import NIGHTLY
from polyconv.cuda.planner import CudaDevice
from polyconv.cuda.planner.implicit_gemm import fprop_dgrad
from polyconv.cuda.planner.winograd.axis import ToomAxis
from polyconv.cuda.planner.winograd.nonfused import DIRECT, F23, F45, F45_NESTED
from polyconv.cuda.planner.winograd_fp16x3 import nonfused, nonfused_tiling
from polyconv.cuda.planner.winograd_fp16x3.nonfused import INSTRUCTIONS, M8N8K4, M16N8K16, Fp16x3Candidate
from polyconv.cuda.planner.winograd_fp16x3.nonfused_tiling import PARTS, Chain, MatrixInstruction, tiling
from polyconv.measure import workloads
from polyconv.problem import PaddingMode, Pass, Problem

PASSES = (Pass.FPROP, Pass.DGRAD)
AT_NIGHT = 10, 24
RANDOM_PARTS, RANDOM_EACH = AT_NIGHT if NIGHTLY else (1, 6)
LARGE = 2**26

NAMED = {
    "pointwise": Shape((2, 8, 5, 20), 33, (1, 1)),
    "nested segments, dilated": Shape((1, 9, 11, 30), 40, (3, 9), padding=(1, 1, 4, 4), dilation=(2, 3)),
    "strided": Shape((1, 9, 13, 14), 20, (3, 5), (2, 2), (1, 2, 0, 1)),
    "groups": Shape((1, 24, 7, 10), 16, (3, 3), groups=2, padding=(1, 1, 1, 1)),
    "a dilation that is wider than a tile": Shape((1, 8, 3, 80), 8, (1, 3), dilation=(1, 40), padding=(0, 0, 30, 30)),
    "eleven taps in segments": Shape((1, 8, 5, 14), 9, (1, 11), padding=(0, 0, 5, 5)),
    "gradient of pixels that meet no tap": Shape((1, 8, 7, 6), 8, (2, 2), stride=(3, 4)),
    "channels last": Shape((1, 12, 6, 9), 10, (3, 3), padding=(1, 1, 1, 1), layout="channels_last"),
}


by_both = pytest.mark.parametrize("mma", INSTRUCTIONS, ids=lambda mma: mma.name)


def usable(problem: Problem, mma: MatrixInstruction) -> list[Fp16x3Candidate]:
    ways = (Fp16x3Candidate(w, mma) for w in nonfused.W_AXES)
    return [way for way in ways if way.refusal(problem) is None]


def run(shape: Shape, kind: Pass, mma: MatrixInstruction, choice: int, *, workspace: int = LARGE) -> bool:
    """One pass by one of the variants that take it; False if there is none."""
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(kind, x, w, dy)
    ways = usable(problem, mma)
    if ways:
        way = ways[choice % len(ways)]
        check(problem, x, w, bias, dy, plan_of(problem, way, workspace=workspace))
    return bool(ways)


@pytest.mark.parametrize("kind", PASSES, ids=str)
@pytest.mark.parametrize("name", NAMED)
@by_both
def test_named(mma: MatrixInstruction, name: str, kind: Pass) -> None:
    """In slabs of one row group, and in a single slab."""
    number = list(NAMED).index(name)
    assert run(NAMED[name], kind, mma, number, workspace=1 if number % 2 else LARGE)


@st.composite
def geometries(draw: st.DrawFn) -> tuple[Shape, int, int]:
    """A small convolution, a variant, and the workspace."""
    shape = draw(zero_bordered(st.sampled_from([8, 9, 14]), st.sampled_from([8, 17, 33])))
    return shape, draw(st.integers(0, 1000)), draw(st.sampled_from([1, 2**17, LARGE]))


@pytest.mark.parametrize("part", range(RANDOM_PARTS))
@pytest.mark.parametrize("kind", PASSES, ids=str)
@by_both
def test_random(mma: MatrixInstruction, kind: Pass, part: int) -> None:
    def runs(drawn: tuple[Shape, int, int]) -> None:
        shape, choice, workspace = drawn
        assert run(shape, kind, mma, choice, workspace=workspace)

    explore(geometries(), runs, part=part, each=RANDOM_EACH)


def test_the_night_is_long_enough() -> None:
    """At least 200 different geometries for each pass and instruction, none of them refused."""
    parts, each = AT_NIGHT
    assert len({shape for shape, _, _ in geometries_of(geometries(), parts=parts, each=each)}) >= 200


@pytest.mark.parametrize("w", nonfused.W_AXES, ids=str)
@by_both
def test_every_instance(mma: MatrixInstruction, w: ToomAxis) -> None:
    """More written channels than a tile, ragged tiles along both axes, two images, padded channels."""
    taps = {DIRECT: 2, F23: 3, F45: 5, F45_NESTED: 8}
    shape = Shape((2, 11, 11, 19), 37, (2, taps[w]), padding=(1, 1, 2, 2), dilation=(2, 1))
    x, weight, bias, dy = shape.tensors()
    problem = shape.problem(Pass.FPROP, x, weight, dy)
    check(problem, x, weight, bias, dy, plan_of(problem, Fp16x3Candidate(w, mma)))


# ---- Slabs and refusals


@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_slabs_of_w1_fit_the_workspace(kind: Pass) -> None:
    problem = workloads.find("W1")[0].problem(kind)
    for workspace in (LARGE, 2**28):
        assert Fp16x3Candidate(F45_NESTED).schedule(problem, V100.sms, workspace).workspace_bytes <= workspace


# ---- Magnitudes for blocks after a GEMM


def cut_problem(kind: Pass, shape: Shape, way: Fp16x3Candidate, planes: int) -> tuple[Problem, int]:
    """A problem, and a workspace for slabs of this many planes; for 0, one row group of a plane."""
    x, w, _, dy = shape.tensors()
    problem = shape.problem(kind, x, w, dy)
    chain = first_chain(problem, way)
    return problem, nonfused.places(problem, way.w, way.mma).source + chain.source_bytes(planes, chain.tiled.row_groups)


def first_chain(problem: Problem, way: Fp16x3Candidate) -> Chain:
    h, w = next(iter(fprop_dgrad.roles(problem).pairs))
    return Chain(problem, h, w, way.w, way.mma)


SEVERAL_IMAGES = {
    "row groups of a plane": (Shape((3, 8, 20, 9), 9, (3, 3), padding=(1, 1, 1, 1), dilation=(2, 1)), 0),
    "planes of two images": (Shape((3, 16, 7, 9), 16, (2, 3), dilation=(3, 2), groups=2), 2),
    "several phases, channels last": (Shape((2, 8, 9, 8), 8, (3, 3), (2, 2), layout="channels_last"), 1),
    "windows of larger tensors": (Shape((3, 8, 6, 7), 8, (3, 3), layout="sliced"), 1),
}


@pytest.mark.parametrize("kind", PASSES, ids=str)
@pytest.mark.parametrize("name", SEVERAL_IMAGES)
@by_both
def test_images_of_later_slabs_are_scaled_as_those_of_the_first(mma: MatrixInstruction, name: str, kind: Pass) -> None:
    """Images of very different magnitudes, on a NaN workspace: bit by bit the results of one slab, repeatably."""
    (shape, planes), way = SEVERAL_IMAGES[name], Fp16x3Candidate(F23, mma)
    x, w, bias, dy = shape.tensors()
    for image in range(shape.x[0]):
        x[image] *= 2.0 ** (9 * image)
        dy[image] *= 2.0 ** (-7 * image)
    problem, workspace = cut_problem(kind, shape, way, planes)
    buffers = {"x": x, "w": w, "bias": bias, "y": dy}
    written, strides, size = (
        ("y", problem.y_strides, problem.y_shape) if kind is Pass.FPROP else ("x", problem.x_strides, problem.x_shape)
    )
    results = []
    for room in (LARGE, workspace, workspace):
        plan = plan_of(problem, way, workspace=room)
        behind = sum(launch.work.behind for launch in plan.launches)
        assert (behind > 0) == (room == workspace)
        result = torch.empty_strided(size, strides).fill_(NAN)
        run_plan(plan, {**buffers, written: result})
        results.append(result)
    assert not results[0].isnan().any()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("dilation", [1, 2, 5])
@pytest.mark.parametrize("planes", [0, 1, 2, 3, 4, 11])
def test_magnitudes_are_known_before_they_are_needed(planes: int, dilation: int, batch: int) -> None:
    """Each part is computed once; only images of the first slab in advance."""
    way = Fp16x3Candidate(F23)
    shape = Shape((batch, 8, 50, 40), 8, (3, 3), padding=(2, 2, 2, 2), dilation=(dilation, 1))
    problem, workspace = cut_problem(Pass.FPROP, shape, way, planes)
    chain, left = first_chain(problem, way), workspace - nonfused.places(problem, way.w, way.mma).source
    known = chain.parts_beforehand(left)
    assert known == PARTS * -(-chain.slab(left)[0] // dilation)
    found = []
    for slab in chain.slabs(left, known):
        assert slab.known == known
        assert known >= chain.parts_until(slab.plane + slab.planes)
        known += slab.found
        found.append(slab.found)
    assert known == PARTS * batch
    assert max(found) - min(found[: len(found) // 2], default=0) <= PARTS * max(1, planes)
    if planes == 0 and batch > 1:
        assert min(found[: len(found) // 2]) > 0, "every slab has its share, until all are known"


def test_what_fits_one_slab_has_its_magnitudes_found_at_once() -> None:
    problem = Problem.make("fprop", (4, 8, 30, 30), (8, 8, 3, 3))
    launches = Fp16x3Candidate(F23).schedule(problem, V100.sms, LARGE).launches
    assert [launch.grid for launch in launches if launch.kernel is nonfused.MAGNITUDE] == [(1, 8, 1), (128, 4, 1)]
    assert all(launch.work.behind == 0 for launch in launches)


@pytest.mark.parametrize("dilation", [1, 2, 3, 7, 33, 65, 200])
@pytest.mark.parametrize("taps", [1, 3, 5, 9])
def test_tiles_cover_every_position_once(taps: int, dilation: int) -> None:
    cut = tiling(50, 40, 4, dilation, taps, 1)
    assert cut is not None
    assert cut.rows * cut.columns <= nonfused_tiling.UNITS
    assert cut.stage <= nonfused_tiling.MOST_STAGE
    assert cut.rows * cut.row_groups >= 50 > cut.rows * (cut.row_groups - 1)
    assert cut.units * cut.unit_groups >= 40 > cut.units * (cut.unit_groups - 1)
    assert cut.phases * cut.phase_groups >= dilation > cut.phases * (cut.phase_groups - 1)


@pytest.mark.parametrize(("mma", "device"), [(M8N8K4, V100), (M16N8K16, A100)], ids=["884", "16816"])
def test_shared_memory_of_the_smallest_device(mma: MatrixInstruction, device: CudaDevice) -> None:
    """Of the tiles that the instruction was made for."""
    for w in nonfused.W_AXES:
        problem = Problem.make("fprop", (1, 8, 64, 64), (8, 8, 9, {DIRECT: 1, F23: 3, F45: 5}.get(w, 9)))
        for launch in Fp16x3Candidate(w, mma).schedule(problem, device.sms, LARGE).launches:
            assert launch.dynamic_shared <= device.shared_per_block_optin


def test_refusals() -> None:
    way = Fp16x3Candidate(F45)
    dense = Problem.make("fprop", (1, 8, 9, 9), (8, 8, 3, 3), padding=(1, 1, 1, 1))
    assert way.refusal(dense) is None
    assert "border" in str(way.refusal(replace(dense, padding_mode=PaddingMode.REFLECT)))
    assert "fewer than 8 channels" in str(way.refusal(Problem.make("fprop", (1, 3, 9, 9), (8, 3, 3, 3))))
    assert "nests" in str(Fp16x3Candidate(F45_NESTED).refusal(dense))
    assert "too many for a tile" in str(
        Fp16x3Candidate(DIRECT).refusal(replace(dense, in_size=(40, 40), kernel=(9, 9)))
    )
    assert "only for" in str(way.refusal(replace(dense, kind=Pass.WGRAD)))


@pytest.mark.parametrize("workspace", [64 * 2**20, 8 * 2**30])
@by_both
def test_grids_are_no_larger_than_a_device_takes(mma: MatrixInstruction, workspace: int) -> None:
    """Many small images in a large workspace: all planes of a slab are blocks along one grid axis."""
    problem = Problem.make("fprop", (30000, 8, 6, 6), (8, 8, 3, 3), padding=(2, 2, 2, 2), dilation=(3, 3))
    launches = Fp16x3Candidate(F23, mma).schedule(problem, V100.sms, workspace).launches
    assert max(max(launch.grid[1:]) for launch in launches) <= 65535
