"""Constants of an exported file are constant for all tensors, devices and workspaces at run time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from exported_files import EVERY, V100, any_convolution
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.plan import Launch
from polyconv.measure.workloads import find
from polyconv.problem import Pass, Problem, Strides
from polyconv.tools.export import convolution_model, named_model, parameters
from polyconv.tools.export.host_code import chosen_for, launching


def any_tensors(problem: Problem, choose: random.Random) -> Problem:
    """The same convolution on other tensors: batch, image, strides, alignment."""
    kernel = [d * (k - 1) + 1 for d, k in zip(problem.dilation, problem.kernel, strict=True)]
    size = tuple(k + choose.choice([0, 1, 7, choose.randrange(64), choose.randrange(300)]) for k in kernel)
    other = replace(problem, batch=choose.choice([1, 2, 3, 8, choose.randrange(1, 40)]), in_size=(size[0], size[1]))
    x, y = (other.batch, other.in_channels, *size), other.y_shape
    return replace(
        other,
        x_strides=written(x, choose) if problem.kind is Pass.DGRAD else any_strides(x, choose),
        y_strides=written(y, choose) if problem.kind is Pass.FPROP else any_strides(y, choose),
        vector_aligned=choose.random() < 0.5,
    )


def written(shape: tuple[int, ...], choose: random.Random) -> Strides:
    """Dense, or the slices of a volume."""
    n, c, h, w = shape
    return choose.choice([(c * h * w, h * w, w, 1), (h * w, n * h * w, w, 1)])


def any_strides(shape: tuple[int, ...], choose: random.Random) -> Strides:
    """Dense, in any order of the axes, sliced, or expanded along some of them."""
    order = choose.choice([(0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 3, 2)])
    strides, step = [0, 0, 0, 0], choose.choice([1, 1, 2])
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis] + choose.choice([0, 0, 3])
    n, c, h, w = (0 if choose.random() < 0.2 else stride for stride in strides)
    return (n, c, h, w)


def launches(candidate: CudaCandidate, problem: Problem, seed: int) -> Iterator[Launch]:
    """Launches of a pass of an exported file for given tensors and device."""
    choose = random.Random(seed)
    other = any_tensors(problem, choose)
    sms, workspace = choose.choice([1, 2, 30, 80, 132]), choose.choice([2**22, 2**24, 64 * 2**20])
    if candidate.refusal(other) is None:
        yield from candidate.schedule(other, sms, workspace).launches


def check_fixed_fields(forward: Problem, seeds: int) -> None:
    for kind in Pass:
        problem = replace(forward, kind=kind)
        # The direct kernels have no candidate: all of their parameters are given at run time.
        for candidate in launching(problem, chosen_for(problem, V100), V100).candidates:
            fixed = parameters.fixed_fields(parameters.launches(candidate, problem))
            met = 0
            for seed in range(seeds):
                now = parameters.fixed_fields(launches(candidate, problem, seed))
                met += bool(now)
                for struct, fields in now.items():
                    differing = [field for field, value in fixed[struct].items() if fields.get(field) != value]
                    assert not differing, f"{struct}, for {any_tensors(problem, random.Random(seed))}"
            assert met >= seeds // 20


@pytest.mark.parametrize("name", EVERY)
def test_fixed_fields_are_the_same_in_every_launch(name: str) -> None:
    check_fixed_fields(named_model(name).layers[0].picture, 200)


@pytest.mark.parametrize("seed", range(40))
def test_fixed_fields_of_any_convolution(seed: int) -> None:
    """Also exported for a small image: a constant must not be one only because the image is small."""
    shape, arguments = any_convolution(seed)
    check_fixed_fields(convolution_model(shape, **arguments).layers[0].problem, 40)


def test_fixed_fields_of_a_small_depthwise_convolution() -> None:
    """Its strips are one slice, until the batch is large."""
    arguments: Any = {"in_channels": 6, "out_channels": 12, "kernel_size": 3, "groups": 6, "padding_mode": "circular"}
    check_fixed_fields(convolution_model((2, 6, 33, 40), **arguments).layers[0].problem, 100)


def test_a_field_that_must_stay_unknown_is_not_fixed() -> None:
    """A zero that the compiler must not know."""
    problem = find("kb80")[0].problem(Pass.FPROP)
    (candidate,) = launching(problem, chosen_for(problem, V100), V100).candidates
    for fields in parameters.fixed_fields(parameters.launches(candidate, problem)).values():
        assert "zero" not in fields


def test_fields_leave_a_struct() -> None:
    struct = """\
struct Params {
  const float* x;  // read
  int rows, columns[4], tiles;  // of a slab
  FastDivisor by;
  __device__ int more() const { return rows; }
};
"""
    assert (
        parameters.without_fields(struct, ["rows", "columns", "by"])
        == """\
struct Params {
  const float* x;  // read
  int tiles;  // of a slab
  __device__ int more() const { return rows; }
};
"""
    )
    assert parameters.without_fields(struct, []) == struct
