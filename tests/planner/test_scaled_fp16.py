"""float32 tensors by one scaled FP16 product, as sm_80 machine code: results against float64, TF32's error, choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from hypothesis import strategies as st

from emulate import A100, check, plan_of
from machine_suites import Shape, explore, zero_bordered
from nightly import NIGHTLY
from polyconv.activation import Activation
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.scaled_fp16 import fprop_dgrad, wgrad
from polyconv.numerics.prediction import with_numeric_tolerance
from polyconv.problem import TORCH_TOLERANCE, Pass, Problem

SHAPES = {
    "two steps per tap, ragged pixels": Shape((2, 64, 9, 7), 72, (3, 3), padding=(1, 1, 1, 1)),
    "dense quads of pixels": Shape((3, 24, 8, 10), 40, (3, 3), padding=(1, 1, 1, 1)),
    "channels_last": Shape((2, 40, 6, 7), 24, (3, 2), padding=(1, 1, 0, 1), layout="channels_last"),
    "dilated, stride two": Shape((1, 16, 13, 11), 24, (3, 2), (2, 1), (1, 2, 0, 1), (1, 2)),
    "groups": Shape((3, 32, 5, 6), 48, (3, 3), padding=(1, 1, 1, 1), groups=2),
    "stride two": Shape((2, 16, 11, 9), 24, (3, 3), (2, 2), (1, 1, 1, 1), layout="channels_last"),
    "more than one tile of channels": Shape((1, 72, 5, 6), 136, (1, 1), bias=False),
    "padding only": Shape((1, 8, 4, 4), 8, (3, 3), padding=(5, 5, 0, 0)),
}
RAGGED = {
    "image channels": Shape((2, 3, 11, 12), 20, (3, 3), padding=(1, 1, 1, 1)),
    "ragged groups, channels_last": Shape((2, 20, 5, 6), 30, (3, 3), groups=2, layout="channels_last"),
}
RANDOM = 200 if NIGHTLY else 6


def in_tf32(problem: Problem) -> Problem:
    return with_numeric_tolerance(replace(problem, tolerance=TORCH_TOLERANCE), has_tf32=True)


def ways(kind: Pass) -> tuple[CudaCandidate, ...]:
    return wgrad.CANDIDATES if kind is Pass.WGRAD else fprop_dgrad.CANDIDATES


def run(shape: Shape, kind: Pass, way: CudaCandidate, sms: int = 4, workspace: int = 2**22) -> None:
    x, w, bias, dy = shape.tensors()
    problem, x = shape.lowered(kind, x, w, dy)
    problem = in_tf32(problem)
    if way.refusal(problem) is None:
        plan = plan_of(problem, way, sms=sms, workspace=workspace)
        assert plan.expected_error <= problem.tolerance
        check(problem, x, w, bias, dy, plan)


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_tile(shape: Shape, kind: Pass) -> None:
    every = ways(kind)
    for way in every if NIGHTLY else every[:: len(every) - 1]:
        run(shape, kind, way)
