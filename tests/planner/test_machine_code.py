"""Every kernel as machine code against float64 PyTorch: named suites, random geometries, every variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gpu_emulator
from emulate import V100, check, cubin, plan_of, run_plan
from machine_suites import EDGES, SUITES, Shape, explore, geometries_of, shapes
from nightly import NIGHTLY
from polyconv.cuda.planner import plan_cuda
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.depthwise import strip
from polyconv.cuda.planner.depthwise.halo import PLANE_TILES, WGRAD_TAPS, HaloCandidate, HaloWgradCandidate, PlaneTile
from polyconv.cuda.planner.implicit_gemm import fprop_dgrad, wgrad_1x1
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad import FPROP_DGRAD_TILES, ImplicitGemmCandidate
from polyconv.cuda.planner.implicit_gemm.wgrad import WGRAD_TILES, WgradCandidate
from polyconv.measure import workloads
from polyconv.problem import Pass
from polyconv.tools.inspect.emulated_cost import count_plan

pytestmark = pytest.mark.usefixtures("every_arch")
PASSES = tuple(Pass)
AT_NIGHT = 4, 60
RANDOM_PARTS, RANDOM_EACH = AT_NIGHT if NIGHTLY else (1, 20)
NAMED = [pytest.param(shape, id=f"{suite}: {name}") for suite, cases in SUITES.items() for name, shape in cases.items()]


def run(shape: Shape, kind: Pass) -> None:
    x, w, bias, dy = shape.tensors()
    problem, x = shape.lowered(kind, x, w, dy)
    check(problem, x, w, bias, dy)


@pytest.mark.parametrize("kind", PASSES, ids=str)
@pytest.mark.parametrize("shape", NAMED)
def test_named(shape: Shape, kind: Pass) -> None:
    run(shape, kind)


@pytest.mark.parametrize("part", range(RANDOM_PARTS))
@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_random(kind: Pass, part: int) -> None:
    explore(shapes(), lambda shape: run(shape, kind), part=part, each=RANDOM_EACH)


def test_the_night_is_long_enough() -> None:
    """At least 300 different geometries per pass."""
    parts, each = AT_NIGHT
    drawn: set[Shape] = {param.values[0] for param in NAMED}  # type: ignore[misc]
    drawn |= geometries_of(shapes(), parts=parts, each=each)
    assert len(drawn) >= 300


# ---- Every variant, regardless of cost


GATHER_EXAMPLES = {
    fprop_dgrad.TAPS: (Shape((1, 16, 13, 11), 40, (3, 2), padding=(1, 2, 0, 1), dilation=(2, 1)), PASSES[:2]),
    fprop_dgrad.TAPS_VECTOR: (
        Shape((1, 16, 13, 11), 40, (3, 2), padding=(1, 2, 0, 1), layout="channels_last"),
        PASSES[:2],
    ),
    fprop_dgrad.POINTWISE: (Shape((2, 20, 10, 14), 36, (1, 1)), PASSES[:2]),
    fprop_dgrad.ROWS: (Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1)), PASSES[:2]),
    fprop_dgrad.ROWS_BORDERED: (Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1), mode="reflect"), PASSES[:1]),
    fprop_dgrad.FOLDED: (Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1), mode="circular"), PASSES[1:2]),
}


@pytest.mark.parametrize("tile", FPROP_DGRAD_TILES, ids=lambda t: t.name)
@pytest.mark.parametrize("loader", fprop_dgrad.LOADERS, ids=lambda kind: kind.name)
def test_every_gather_variant(loader: fprop_dgrad.LoaderKind, tile: fprop_dgrad.GemmTile) -> None:
    shape, kinds = GATHER_EXAMPLES[loader]
    ran = 0
    for kind in kinds:
        x, w, bias, dy = shape.tensors()
        problem = shape.problem(kind, x, w, dy)
        way = ImplicitGemmCandidate(tile, loader)
        if way.refusal(problem) is None:
            check(problem, x, w, bias, dy, plan_of(problem, way))
            ran += 1
    assert ran or (loader is fprop_dgrad.TAPS_VECTOR and tile.m * 8 // tile.threads < 4), (
        "no problem reached this variant"
    )


@pytest.mark.parametrize("tile", WGRAD_TILES, ids=lambda t: t.name)
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
def test_every_wgrad_variant(vector: bool, mode: str, tile: fprop_dgrad.GemmTile) -> None:
    shape = Shape((3, 9, 12, 11), 70, (3, 4), padding=(1, 1, 2, 2), mode=mode)
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(Pass.WGRAD, x, w, dy)
    way = WgradCandidate(tile, vector, bordered=mode != "zeros")
    check(problem, x, w, bias, dy, plan_of(problem, way, workspace=2**20))


@pytest.mark.parametrize("tile", PLANE_TILES, ids=lambda t: t.name)
@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_every_depthwise_variant(kind: Pass, tile: PlaneTile) -> None:
    shape = Shape((3, 3, 37, 70), 6, (3, 5), (1, 2), (1, 2, 3, 0), groups=3)
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(kind, x, w, dy)
    ways = [HaloWgradCandidate(tile, taps) for taps in WGRAD_TAPS] if kind is Pass.WGRAD else [HaloCandidate(tile)]
    for way in ways:
        if way.refusal(problem) is None:
            check(problem, x, w, bias, dy, plan_of(problem, way, sms=2, workspace=2**20))


def _strip_variants() -> list[Any]:
    found = []
    for kind in PASSES:
        for (lanes, stride), kernels in strip.KERNELS.items():
            for taps in kernels:
                scatters = kind is Pass.DGRAD and stride > 1
                way: CudaCandidate = strip.StripWgradCandidate(taps, stride, lanes)
                if kind is not Pass.WGRAD:
                    way = strip.StripCandidate(taps, stride, lanes, scatters)
                found.append(pytest.param(kind, way, id=f"{kind} {way.name}"))
    return found


@pytest.mark.parametrize(("kind", "way"), _strip_variants())
def test_every_strip_variant(kind: Pass, way: strip.StripCandidate | strip.StripWgradCandidate) -> None:
    """Strips of several heights: one multiprocessor gets tall ones, eighty get short ones."""
    layout, channels = ("channels_last", 34) if way.lanes == strip.CHANNELS else ("contiguous", 3)
    stride = (way.stride, way.stride)
    shape = Shape((2, channels, 21, 13), channels, way.taps, stride, (2, 1, 3, 0), groups=channels, layout=layout)
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(kind, x, w, dy)
    for sms in (1, V100.sms):
        check(problem, x, w, bias, dy, plan_of(problem, way, sms=sms, workspace=2**20))


@pytest.mark.parametrize("tile", wgrad_1x1.TILES, ids=lambda t: t.name)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(Shape((3, 20, 6, 6), 36, (1, 1)), id="ragged in channels and pixels"),
        pytest.param(Shape((9, 64, 2, 4), 128, (1, 1), bias=False), id="an image each step"),
        pytest.param(Shape((2, 24, 8, 8), 40, (1, 1), groups=2), id="groups"),
    ],
)
def test_every_pointwise_wgrad_variant(shape: Shape, tile: fprop_dgrad.GemmTile) -> None:
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(Pass.WGRAD, x, w, dy)
    way = wgrad_1x1.Wgrad1x1Candidate(tile)
    for sms in (1, V100.sms):
        check(problem, x, w, bias, dy, plan_of(problem, way, sms=sms, workspace=2**20))


@pytest.mark.parametrize("kind", PASSES, ids=str)
@pytest.mark.parametrize("name", ["kb82", "kb83", "kb84", "kb85", "kb86"])
def test_depthwise_workloads_are_bound_by_memory(name: str, kind: Pass) -> None:
    """Counted at full size: DRAM binds, no other resource takes half its time, and L2 traffic is near the minimum."""
    plan = plan_cuda(workloads.find(name)[0].problem(kind), V100)
    assert "strip" in plan.algorithm
    counted = count_plan(gpu_emulator, plan, {spec: cubin(spec) for spec in plan.kernels}, V100)[0]
    others = {resource: counted.ms(resource) for resource in counted.cycles if resource != "DRAM"}
    assert max(others.values()) < 0.5 * counted.ms("DRAM"), others
    # 2048 bytes of L2 per clock: the traffic even if no block found its neighbour's rows in L2.
    assert counted.cycles["L2"] * 2048 < 1.2 * plan.launches[0].work.dram_bytes


def test_other_depthwise_problems_are_left_to_the_general_kernels() -> None:
    for name in ("dilation 6", "31x31", "gradient of a sum"):
        shape = SUITES["depthwise"][name]
        x, w, _, dy = shape.tensors()
        for kind in (Pass.DGRAD, Pass.WGRAD):
            assert "strip" not in plan_cuda(shape.problem(kind, x, w, dy), V100).algorithm


# ---- Properties of the results


@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_same_input_same_bits(kind: Pass) -> None:
    shape = EDGES["tiles across images"]
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(kind, x, w, dy)
    results = []
    for _ in range(2):
        tensors = {"x": x.clone(), "w": w.clone(), "y": dy.clone(), "bias": bias.clone()}  # type: ignore[union-attr]
        tensors |= {"dw": torch.full(shape.w, torch.nan), "db": torch.full((shape.out_channels,), torch.nan)}
        run_plan(plan_cuda(problem, V100), tensors)
        results.append(tensors)
    assert all(torch.equal(results[0][name], results[1][name]) or name in ("dw", "db") for name in results[0])
    if kind is Pass.WGRAD:
        assert torch.equal(results[0]["dw"], results[1]["dw"])
        assert torch.equal(results[0]["db"], results[1]["db"])


@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_infinities_stay_where_they_belong(kind: Pass) -> None:
    """Padding rows and ragged tiles multiply by zero; a value outside a sum must never reach it."""
    shape = Shape((2, 5, 9, 9), 7, (3, 3), padding=(1, 1, 1, 1), bias=False)
    x, w, _, dy = shape.tensors()
    x[1] = torch.inf
    dy[1] = 0
    problem = shape.problem(kind, x, w, dy)
    outputs = {"y": torch.empty_like(dy), "x": torch.empty_like(x), "dw": torch.empty_like(w)}
    if kind is Pass.FPROP:
        run_plan(plan_cuda(problem, V100), {"x": x, "w": w, "y": outputs["y"]})
        assert torch.isfinite(outputs["y"][0]).all()
    elif kind is Pass.DGRAD:
        dy[1] = torch.inf
        run_plan(plan_cuda(problem, V100), {"y": dy, "w": w, "x": outputs["x"]})
        assert torch.isfinite(outputs["x"][0]).all()
    else:
        dy[0, 3] = torch.inf
        x[1] = 0
        run_plan(plan_cuda(problem, V100), {"y": dy, "x": x, "dw": outputs["dw"]})
        assert torch.isfinite(outputs["dw"][[0, 1, 2, 4, 5, 6]]).all()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_infinities_stay_in_their_strips(layout: str) -> None:
    """Depthwise: a NaN reaches no other channel or image, nor outputs and taps that do not read it."""
    shape = Shape((2, 5, 80, 9), 5, (3, 3), groups=5, bias=False, layout=layout)
    x, w, _, dy = shape.tensors()
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
    x[1, 2, 0, 4] = dy[1, 2, 0, 3] = torch.inf
    run_plan(plan_cuda(shape.problem(Pass.FPROP, x, w, dy), V100), {"x": x, "w": w, "y": y})
    assert (~torch.isfinite(y)).nonzero().tolist() == [[1, 2, 0, column] for column in (2, 3, 4)]
    run_plan(plan_cuda(shape.problem(Pass.DGRAD, x, w, dy), V100), {"y": dy, "w": w, "x": dx})
    reached = [[1, 2, row, column] for row in (0, 1, 2) for column in (3, 4, 5)]
    assert (~torch.isfinite(dx)).nonzero().tolist() == reached
    dy[1, 2, 0, 3] = 0.5
    run_plan(plan_cuda(shape.problem(Pass.WGRAD, x, w, dy), V100), {"y": dy, "x": x, "dw": dw})
    assert (~torch.isfinite(dw)).nonzero().tolist() == [[2, 0, 0, column] for column in (0, 1, 2)]
