"""Problem: shapes, dense strides, and equality."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from polyconv.arguments import normalise
from polyconv.cpu.planner import plan_cpu
from polyconv.cuda.planner import DEVICES, plan_cuda
from polyconv.lowering.extreme_geometry import reduce_geometry
from polyconv.numerics import reference
from polyconv.problem import PaddingMode, Pass, Problem, Shape, channels_last_strides, contiguous_strides, output_extent
from polyconv.selection import PlanError

W1 = Problem.make("fprop", (8, 32, 512, 512), (64, 32, 5, 9), padding=(2, 2, 4, 4), dilation=(2, 3))

extents = st.tuples(*[st.integers(0, 5)] * 4)


@given(
    st.integers(1, 20), st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)
)
def test_output_extent_is_torchs(extent: int, before: int, after: int, kernel: int, stride: int, dilation: int) -> None:
    expected = output_extent(extent, before, after, kernel, stride, dilation)
    if expected <= 0:
        return
    padded = F.pad(torch.zeros(1, 1, extent), (before, after))
    assert F.conv1d(padded, torch.zeros(1, 1, kernel), stride=stride, dilation=dilation).shape[-1] == expected


@given(extents)
def test_dense_strides_are_torchs(shape: tuple[int, int, int, int]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()
    if all(shape):
        assert channels_last_strides(shape) == torch.empty(shape, memory_format=torch.channels_last).stride()


def test_shapes() -> None:
    assert W1.y_shape == (8, 64, 508, 496)
    assert W1.x_shape == (8, 32, 512, 512)
    assert W1.w_shape == (64, 32, 5, 9)
    assert W1.y_strides == contiguous_strides(W1.y_shape)
    assert W1.multiplications == 8 * 64 * 508 * 496 * 32 * 45


AXES_BY_NUMBER = [
    ((3, 4, 20), (6, 2, 5), {"stride": (2,), "padding": (3, 1), "dilation": (2,)}),
    ((3, 4, 20, 9), (6, 2, 5, 3), {"stride": (2, 1), "padding": (3, 1, 0, 2), "dilation": (2, 3)}),
    ((1, 4, 7, 20, 9), (6, 2, 2, 5, 3), {"stride": (3, 2, 1), "padding": (1, 0, 3, 1, -1, 2), "dilation": (1, 2, 3)}),
]
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@pytest.mark.parametrize(("x_shape", "w_shape", "moves"), AXES_BY_NUMBER, ids=["1", "2", "3"])
def test_one_to_three_axes(x_shape: Shape, w_shape: Shape, moves: dict[str, Any]) -> None:
    problem = Problem.make("fprop", x_shape, w_shape, groups=2, **moves)
    x, w = torch.randn(x_shape, dtype=torch.float64), torch.randn(w_shape, dtype=torch.float64)
    sides = [side for i in reversed(range(problem.rank)) for side in problem.padding[2 * i : 2 * i + 2]]
    y = CONVOLUTIONS[problem.rank](
        F.pad(x, sides), w, stride=problem.stride, dilation=problem.dilation, groups=problem.groups
    )
    assert problem.y_shape == y.shape
    assert (problem.x_strides, problem.y_strides) == (x.stride(), y.stride())
    assert torch.equal(reference.fprop(problem, x, w), y)
    assert reference.wgrad(problem, x, y, w_shape)[1].shape == (6,)
    geometry = normalise(w_shape[2:], **moves, groups=2, rank=problem.rank)
    assert (geometry.stride, geometry.padding, geometry.dilation) == (problem.stride, problem.padding, problem.dilation)
    assert geometry.out_size(x_shape[2:], w_shape[2:]) == y.shape[2:]
    assert reduce_geometry(Pass.FPROP, x_shape[2:], w_shape[2:], geometry) is None


def test_extreme_geometry_of_three_axes_is_reduced() -> None:
    geometry = normalise((1, 3, 2), stride=2**40, padding=(0, 0, 2**33, 2**33, 0, 0), dilation=(1, 2**33, 1), rank=3)
    reduction = reduce_geometry(Pass.FPROP, (5, 6, 7), (1, 3, 2), geometry)
    assert reduction is not None
    assert reduction.stride == (1, 1, 1)
    assert [len(axis.taps) for axis in reduction.axes] == [1, 1, 2]


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        (1, "convolve over height and width; this problem has length"),
        (3, "scaled_fp16_halo_volume.* its predicted error .* exceeds the tolerance"),
    ],
)
def test_kernels_refuse_other_axes_in_words(rank: int, words: str) -> None:
    problem = Problem.make("fprop", (1, 2, *[9] * rank), (2, 2, *[3] * rank))
    with pytest.raises(PlanError, match=words):
        plan_cuda(problem, DEVICES["v100"])
    if rank == 1:  # a volume is planned as 2-D problems
        with pytest.raises(PlanError, match="convolve over height and width"):
            plan_cpu(problem)


def test_more_axes_than_three_are_refused() -> None:
    with pytest.raises(ValueError, match="one to three axes"):
        Problem.make("fprop", (1, 2, 3, 3, 3, 3), (2, 2, 3, 3, 3, 3))


def test_grouped_shapes() -> None:
    problem = Problem.make("fprop", (1, 6, 8, 8), (12, 1, 3, 3), groups=6)
    assert problem.w_shape == (12, 1, 3, 3)
    assert problem.channels_per_group == (1, 2)
    assert problem.depthwise


def test_equal_questions_are_equal_and_hashable() -> None:
    again = Problem.make(Pass.FPROP, (8, 32, 512, 512), (64, 32, 5, 9), padding=(2, 2, 4, 4), dilation=(2, 3))
    assert again == W1
    assert hash(again) == hash(W1)
    assert W1.for_pass(Pass.DGRAD) != W1
    assert pickle.loads(pickle.dumps(W1)) == W1


def test_only_the_forward_pass_has_an_epilogue() -> None:
    fused = Problem.make("fprop", (1, 4, 8, 8), (4, 4, 3, 3), activation="relu", residual=True)
    assert str(fused) == "fprop 1x4x8x8, 4 channels, kernel 3x3, residual, relu"
    assert fused.for_pass(Pass.FPROP) == fused
    assert fused.for_pass(Pass.DGRAD) == Problem.make("dgrad", (1, 4, 8, 8), (4, 4, 3, 3))


def test_is_frozen() -> None:
    with pytest.raises(AttributeError):
        W1.batch = 1  # type: ignore[misc]


def test_prints_what_differs_from_the_defaults() -> None:
    assert str(W1) == "fprop 8x32x512x512, 64 channels, kernel 5x9, padding 2x4, dilation 2x3"
    other = Problem.make(
        "wgrad",
        (1, 4, 8, 8),
        (4, 2, 3, 3),
        stride=(2, 1),
        padding=(0, 1, 2, 3),
        groups=2,
        padding_mode=PaddingMode.REFLECT,
        bias=True,
    )
    assert str(other) == "wgrad 1x4x8x8, 4 channels, kernel 3x3, stride 2x1, padding 0,1,2,3 reflect, 2 groups, bias"
