"""Full-size launches on sparse memory: selected blocks of W2 and of problems past 2^31 elements, against float64.

The tensors span many gigabytes of addresses, with memory only where a test writes. A block's inputs are random around
its pixels, and only those are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpu_emulator
from emulate import V100, execute
from nightly import nightly
from polyconv.cuda.planner import Plan, plan_cuda
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad import ImplicitGemmParams
from polyconv.cuda.planner.implicit_gemm.wgrad import WgradParams
from polyconv.problem import Pass, Problem

pytestmark = pytest.mark.usefixtures("every_arch")
W2 = Problem.make("fprop", (16, 16, 1024, 1024), (128, 16, 3, 3))
PAST_2_31 = Problem.make("fprop", (3, 24, 6000, 8192), (40, 24, 3, 3), padding=(1, 1, 1, 1), bias=True)
"""3.5e9 elements of x, 5.9e9 of y: offsets need more than 32 bits."""
TALL = Problem.make("fprop", (1, 8, 70000, 40000), (8, 8, 1, 3), padding=(0, 0, 1, 1))
"""2.8e9 pixels: one image needs several launches, each a slab of its rows."""


def sparse(shape: Iterable[int]) -> Tensor:
    return torch.from_numpy(gpu_emulator.sparse(tuple(shape)))


def corners(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def source_row(source: Tensor, image: int, row: int) -> Tensor:
    """One row of all channels, filled on first use; zeros outside the image."""
    if not 0 <= row < source.shape[2]:
        return torch.zeros(source.shape[1], source.shape[3])
    if not source[image, 0, row, 0]:
        source[image, :, row] = torch.randn(source.shape[1], source.shape[3]) + 1e-3
    return source[image, :, row]


def expected_row(problem: Problem, source: Tensor, w: Tensor, bias: Tensor | None, image: int, row: int) -> Tensor:
    """One row of the output (or, for dgrad of a convolution with stride 1, of the input's gradient) in float64."""
    top, _, left, right = problem.padding
    (r, s), (dh, dw) = problem.kernel, problem.dilation
    if problem.kind is Pass.DGRAD:
        w, top = w.flip(2, 3).transpose(0, 1), dh * (r - 1) - top
        left, right = dw * (s - 1) - left, dw * (s - 1) - right
    patch = torch.stack([source_row(source, image, row - top + i * dh) for i in range(r)], 1)[None].double()
    bias = None if bias is None else bias.double()
    return F.conv2d(F.pad(patch, (left, right)), w.double(), bias, dilation=(1, dw))[0, :, 0]


@pytest.mark.parametrize("kind", [Pass.FPROP, Pass.DGRAD], ids=str)
@pytest.mark.parametrize("problem", [W2, PAST_2_31, TALL], ids=["W2", "past 2^31 elements", "past 2^31 pixels"])
def test_corner_blocks_of_the_gather(problem: Problem, kind: Pass) -> None:
    problem = problem.for_pass(kind)
    plan: Plan = plan_cuda(replace(problem, tolerance=0.0), V100)
    tile = int(plan.algorithm.rstrip(")").split("_")[-1].split("x")[0])
    w = torch.randn(problem.w_shape) * 0.1
    bias = torch.randn(problem.out_channels) if problem.bias and kind is Pass.FPROP else None
    tensors = {"x": sparse(problem.x_shape), "y": sparse(problem.y_shape), "w": w}
    tensors["workspace"] = torch.full((plan.workspace_bytes // 4,), torch.nan)
    if bias is not None:
        tensors["bias"] = bias
    source, written = (tensors["x"], tensors["y"]) if kind is Pass.FPROP else (tensors["y"], tensors["x"])
    width = written.shape[3]
    gathers = [launch for launch in plan.launches if launch.kernel.stem == "implicit_gemm/fprop_dgrad"]
    assert (len(gathers) > 1) == (problem is TALL or problem == TALL.for_pass(kind))
    for launch in plan.launches:
        if launch.kernel.stem != "implicit_gemm/fprop_dgrad":
            execute(launch, tensors)
            continue
        params = ImplicitGemmParams.from_buffer_copy(launch.params)
        (offset,) = (slot.byte_offset for slot in launch.pointers if slot.offset == ImplicitGemmParams.written.offset)
        first_image = offset // (4 * problem.x_strides[0] if kind is Pass.DGRAD else 4 * problem.y_strides[0])
        lines, first_line = params.phase_h[0].count.divisor, params.phase_h[0].written_first
        pixels = params.batch * lines * width
        channel_tiles = params.channel_tiles.divisor
        for number in corners(launch.grid[0] // channel_tiles):
            covered = range(number * tile, min((number + 1) * tile, pixels))
            rows = sorted({index // width for index in covered})
            places = {row: (first_image + row // lines, first_line + row % lines) for row in rows}
            expected = {row: expected_row(problem, source, w, bias, *places[row]) for row in rows}
            execute(launch, tensors, blocks=[(number * channel_tiles + n, 0, 0) for n in range(channel_tiles)])
            for row in rows:
                columns = [index - row * width for index in covered if index // width == row]
                image, line = places[row]
                got = written[image, :, line, columns[0] : columns[-1] + 1].double()
                want = expected[row][:, columns[0] : columns[-1] + 1]
                assert (got - want).abs().max() <= 1e-4, (number, row)


@pytest.mark.parametrize(
    "problem", [pytest.param(W2, id="W2", marks=nightly), pytest.param(PAST_2_31, id="past 2^31 elements")]
)
def test_corner_blocks_of_the_weight_gradient(problem: Problem) -> None:
    problem = problem.for_pass(Pass.WGRAD)
    plan = plan_cuda(replace(problem, tolerance=0.0), V100)
    first, *_ = plan.launches
    params = WgradParams.from_buffer_copy(first.params)
    out_h, out_w = problem.out_size
    tensors = {"x": sparse(problem.x_shape), "y": sparse(problem.y_shape)}
    partial = sparse((first.grid[2], problem.out_channels, params.columns_padded))
    tensors["workspace"] = partial
    top, _, left, right = problem.padding
    r, _ = problem.kernel
    for number in corners(first.grid[2]):
        covered = range(number * params.pixels_per_slice, min((number + 1) * params.pixels_per_slice, params.pixels))
        expected = torch.zeros(problem.w_shape, dtype=torch.float64)
        total = torch.zeros(problem.out_channels, dtype=torch.float64)
        for row in range(covered[0] // out_w, covered[-1] // out_w + 1):
            image, line = divmod(row, out_h)
            begin, end = max(covered[0], row * out_w), min(covered[-1] + 1, (row + 1) * out_w)
            dy = source_row(tensors["y"], image, line).double().clone()
            dy[:, : begin - row * out_w] = 0
            dy[:, end - row * out_w :] = 0
            patch = torch.stack([source_row(tensors["x"], image, line - top + i) for i in range(r)], 1)[None].double()
            weight = torch.zeros(problem.w_shape, dtype=torch.float64, requires_grad=True)
            with torch.enable_grad():
                y = F.conv2d(F.pad(patch, (left, right)), weight)
            expected += torch.autograd.grad(y, weight, dy[None, :, None])[0]
            total += dy.sum(1)
        execute(first, tensors, blocks=[(x, 0, number) for x in range(first.grid[0])])
        got = partial[number].double()
        flat = expected.reshape(problem.out_channels, -1)
        # Sums over thousands of pixels of order one: the tolerance is relative to their size.
        scale = max(1.0, len(covered) ** 0.5)
        assert (got[:, : flat.shape[1]] - flat).abs().max() <= 1e-4 * scale
        if problem.bias:
            assert (got[:, flat.shape[1]] - total).abs().max() <= 1e-4 * scale
