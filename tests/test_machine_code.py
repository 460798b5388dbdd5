"""Every kernel as sm_70 machine code against float64 PyTorch: named suites, random geometries, every variant."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings

from emulate import V100, check, plan_of, run_plan
from machine_suites import EDGES, SUITES, Shape, shapes
from polyconv.plan import gather, plan_cuda
from polyconv.plan.direct import DepthwiseWay, DepthwiseWgradWay, GatherWay, WgradWay
from polyconv.plan.tiles import GATHER_TILES, PLANE_TILES, WGRAD_TAPS, WGRAD_TILES, PlaneTile
from polyconv.problem import Pass

PASSES = tuple(Pass)
RANDOM_PARTS, RANDOM_EACH = 4, 60
NAMED = [pytest.param(shape, id=f"{suite}: {name}") for suite, cases in SUITES.items() for name, shape in cases.items()]


def run(shape: Shape, kind: Pass) -> None:
    x, w, bias, dy = shape.tensors()
    check(shape.problem(kind, x, w, dy), x, w, bias, dy)


@pytest.mark.parametrize("kind", PASSES, ids=str)
@pytest.mark.parametrize("shape", NAMED)
def test_named(shape: Shape, kind: Pass) -> None:
    run(shape, kind)


@pytest.mark.parametrize("part", range(RANDOM_PARTS))
@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_random(kind: Pass, part: int) -> None:
    """The same geometries every time: in parts, so that test workers share them."""

    @seed(part)
    @settings(max_examples=RANDOM_EACH, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(shapes())
    def explore(shape: Shape) -> None:
        torch.manual_seed(part)
        run(shape, kind)

    explore()


def test_the_suites_are_large_enough() -> None:
    """At least 300 different geometries for each pass."""
    drawn: set[Shape] = {param.values[0] for param in NAMED}  # type: ignore[misc]
    for part in range(RANDOM_PARTS):

        @seed(part)
        @settings(max_examples=RANDOM_EACH, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(shapes())
        def draw(shape: Shape) -> None:
            drawn.add(shape)

        draw()
    assert len(drawn) >= 300


# ---- Every variant, whatever the planner would choose


GATHER_EXAMPLES = {
    gather.TAPS: (Shape((1, 16, 13, 11), 40, (3, 2), padding=(1, 2, 0, 1), dilation=(2, 1)), PASSES[:2]),
    gather.TAPS_VECTOR: (
        Shape((1, 16, 13, 11), 40, (3, 2), padding=(1, 2, 0, 1), layout="channels_last"),
        PASSES[:2],
    ),
    gather.POINTWISE: (Shape((2, 20, 10, 14), 36, (1, 1)), PASSES[:2]),
    gather.ROWS: (Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1)), PASSES[:2]),
    gather.ROWS_BORDERED: (Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1), mode="reflect"), PASSES[:1]),
    gather.FOLDED: (Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1), mode="circular"), PASSES[1:2]),
}


@pytest.mark.parametrize("tile", GATHER_TILES, ids=lambda t: t.name)
@pytest.mark.parametrize("loader", gather.LOADERS, ids=lambda kind: kind.name)
def test_every_gather_variant(loader: gather.LoaderKind, tile: gather.GemmTile) -> None:
    shape, kinds = GATHER_EXAMPLES[loader]
    ran = 0
    for kind in kinds:
        x, w, bias, dy = shape.tensors()
        problem = shape.problem(kind, x, w, dy)
        way = GatherWay(tile, loader)
        if way.refusal(problem) is None:
            check(problem, x, w, bias, dy, plan_of(problem, way))
            ran += 1
    assert ran or (loader is gather.TAPS_VECTOR and tile.m * 8 // tile.threads < 4), "no problem reached this variant"


@pytest.mark.parametrize("tile", WGRAD_TILES, ids=lambda t: t.name)
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
def test_every_wgrad_variant(vector: bool, mode: str, tile: gather.GemmTile) -> None:
    shape = Shape((3, 9, 12, 11), 70, (3, 4), padding=(1, 1, 2, 2), mode=mode)
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(Pass.WGRAD, x, w, dy)
    way = WgradWay(tile, vector, bordered=mode != "zeros")
    check(problem, x, w, bias, dy, plan_of(problem, way, workspace=2**20))


@pytest.mark.parametrize("tile", PLANE_TILES, ids=lambda t: t.name)
@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_every_depthwise_variant(kind: Pass, tile: PlaneTile) -> None:
    shape = Shape((3, 3, 37, 70), 6, (3, 5), (1, 2), (1, 2, 3, 0), groups=3)
    x, w, bias, dy = shape.tensors()
    problem = shape.problem(kind, x, w, dy)
    ways = [DepthwiseWgradWay(tile, taps) for taps in WGRAD_TAPS] if kind is Pass.WGRAD else [DepthwiseWay(tile)]
    for way in ways:
        if way.refusal(problem) is None:
            check(problem, x, w, bias, dy, plan_of(problem, way, sms=2, workspace=2**20))


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
    """Padding rows and ragged tiles multiply by zero; a value outside the sum must never reach it."""
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
