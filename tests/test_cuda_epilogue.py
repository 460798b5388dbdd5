"""y = act(conv(x, w) + bias + residual) in the store of every forward kernel, as sm_70 machine code against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import volta
from emulate import V100, check, cubin, plan_of, run_plan
from machine_suites import Shape
from polyconv.backends import override
from polyconv.export import ExportError, conv2d_model, exported_file
from polyconv.inspection.counting import count_plan
from polyconv.plan import PlanError, all_kernels, fused, gather, plan_cuda, separable, strips
from polyconv.plan.cost import bound_us
from polyconv.plan.direct import DepthwiseWay, GatherWay
from polyconv.plan.epilogue import finishing_kernel, has_epilogue
from polyconv.plan.tiles import GATHER_TILES, PLANE_TILES, SLIMMER, SMALL, TALL, GemmTile, PlaneTile
from polyconv.plan.ways import Way
from polyconv.problem import Activation, Pass, Problem
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

RELU, SILU, NONE = Activation.RELU, Activation.SILU, Activation.NONE
EPILOGUES = [(RELU, True), (SILU, True), (NONE, True), (RELU, False), (SILU, False)]
"""Every activation, with and without a residual; without either there is no epilogue."""


def _name(epilogue: tuple[Activation, bool]) -> str:
    return f"{epilogue[0]}{' with a residual' if epilogue[1] else ''}"


def run(shape: Shape, activation: Activation, residual: bool, way: Way | None = None, *, sms: int = V100.sms) -> None:
    """One forward pass with an epilogue, by the planner's choice or by a given way; every check that there is."""
    x, w, bias, dy = shape.tensors()
    problem = replace(shape.problem(Pass.FPROP, x, w, dy), activation=activation, residual=residual)
    added = torch.empty_strided(problem.y_shape, problem.y_strides).normal_() if residual else None
    plan = plan_of(problem, way, sms=sms) if way else plan_cuda(problem, V100)
    finishing = [launch for launch in plan.launches if launch.kernel.twin]
    assert finishing
    assert all(launch.kernel.symbol.endswith("_epilogue") for launch in finishing)
    check(problem, x, w, bias, dy, plan, added)


# ---- What the planner chooses

NAMED = {
    "one pixel": Shape((1, 1, 1, 1), 1, (1, 1)),
    "ragged": Shape((2, 13, 9, 11), 11, (3, 3), padding=(1, 1, 1, 1)),
    "batch 1, odd sizes": Shape((1, 7, 13, 5), 3, (3, 5), padding=(1, 1, 2, 2)),
    "strided": Shape((2, 16, 13, 11), 24, (3, 3), (2, 2), (1, 1, 1, 1)),
    "strided, no bias": Shape((1, 3, 39, 39), 20, (11, 11), (4, 4), (2, 2, 2, 2), bias=False),
    "dilated": Shape((1, 16, 14, 30), 40, (5, 9), padding=(2, 2, 4, 4), dilation=(2, 3)),
    "groups": Shape((2, 24, 9, 9), 36, (3, 3), padding=(1, 1, 1, 1), groups=3),
    "pointwise": Shape((3, 24, 8, 6), 70, (1, 1)),
    "channels_last": Shape((2, 16, 9, 9), 24, (3, 3), padding=(1, 1, 1, 1), layout="channels_last"),
    "channels_last, odd channels": Shape((1, 5, 9, 7), 7, (3, 3), layout="channels_last"),
    "reflected border": Shape((1, 8, 9, 8), 12, (3, 3), padding=(1, 1, 1, 1), mode="reflect"),
    "cropped, circular": Shape((1, 8, 12, 11), 8, (3, 3), padding=(-2, 1, 1, -3), mode="circular"),
    "a window of a larger input": Shape((2, 8, 9, 9), 8, (3, 3), padding=(1, 1, 1, 1), layout="sliced"),
    "depthwise": Shape((2, 5, 17, 19), 5, (3, 3), padding=(1, 1, 1, 1), groups=5),
    "depthwise, strided, multiplier": Shape((1, 3, 20, 21), 9, (5, 3), (2, 3), (2, 2, 1, 1), groups=3),
    "depthwise, dilated": Shape((3, 3, 33, 33), 3, (3, 3), padding=(6, 6, 6, 6), dilation=(6, 6), groups=3),
    "depthwise, channels_last": Shape((2, 35, 9, 10), 35, (5, 5), padding=(2, 2, 2, 2), groups=35, layout="channels_last"),
}


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=_name)
@pytest.mark.parametrize("shape", [pytest.param(shape, id=name) for name, shape in NAMED.items()])
def test_named(shape: Shape, epilogue: tuple[Activation, bool]) -> None:
    run(shape, *epilogue)


# ---- Every instance

GATHERED = {
    gather.TAPS: Shape((1, 16, 13, 11), 40, (3, 2), padding=(1, 2, 0, 1), dilation=(2, 1)),
    gather.TAPS_VECTOR: Shape((1, 16, 13, 11), 40, (3, 2), padding=(1, 2, 0, 1), layout="channels_last"),
    gather.POINTWISE: Shape((2, 20, 10, 14), 36, (1, 1)),
    gather.ROWS: Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1)),
    gather.ROWS_BORDERED: Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1), mode="reflect"),
}
PLANE = Shape((3, 3, 37, 70), 6, (3, 5), (1, 2), (1, 2, 3, 0), groups=3)
SMALL_3X3 = Shape((2, 6, 19, 70), 40, (3, 3), padding=(1, 1, 1, 1))
EVEN_3X3 = Shape((1, 6, 16, 128), 40, (3, 3), padding=(1, 1, 1, 1))
"""Whole tiles: fused_resident.cuh stores pairs of columns."""
DILATED_3X3 = Shape((1, 6, 17, 41), 33, (3, 3), padding=(2, 2, 3, 3), dilation=(2, 3))
UNEVEN = Shape((2, 9, 19, 37), 21, (5, 5), padding=(2, 2, 2, 2))
QUADS = Shape((1, 9, 16, 40), 21, (5, 5), padding=(2, 2, 2, 2))
"""Rows of y that half_inverse.cuh stores by four."""


def _every() -> Iterator[tuple[Way, Shape]]:
    for loader, tiles in gather.EPILOGUE_TILES.items():
        yield from ((GatherWay(tile, loader), GATHERED[loader]) for tile in tiles)
    yield from ((DepthwiseWay(tile), PLANE) for tile in PLANE_TILES)
    for (lanes, stride), kernels in strips.KERNELS.items():
        layout, c = ("channels_last", 34) if lanes == strips.CHANNELS else ("contiguous", 3)
        for taps in kernels:
            shape = Shape((2, c, 21, 13), c, taps, (stride, stride), (2, 1, 3, 0), groups=c, layout=layout)
            yield strips.StripWay(taps, stride, lanes, scatters=False), shape
    for way in fused.WAYS:
        yield from ((way, shape) for shape in (SMALL_3X3, EVEN_3X3, DILATED_3X3))
    for h in separable.H_AXES:
        for w in (separable.F23, separable.F45):
            yield from ((separable.SeparableWay(h, w, 32), shape) for shape in (UNEVEN, QUADS))


EVERY = [
    pytest.param(way, shape, EPILOGUES[number % 2], id=f"{way.name}, {shape.x}, {_name(EPILOGUES[number % 2])}")
    for number, (way, shape) in enumerate(_every())
    if way.refusal(Problem.make(Pass.FPROP, shape.x, shape.w)) is None or True
]


@pytest.mark.parametrize(("way", "shape", "epilogue"), EVERY)
def test_every_instance(way: Way, shape: Shape, epilogue: tuple[Activation, bool]) -> None:
    run(shape, *epilogue, way, sms=2)
