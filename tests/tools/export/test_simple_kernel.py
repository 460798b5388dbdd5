"""The kernel of ``polyconv export --simple`` as machine code, in the emulator, against float64 PyTorch."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

import gpu_emulator
from exported_files import PROBLEMS
from geometries import LAYOUTS, laid_out
from nightly import NIGHTLY, sampled
from polyconv.cuda.jit.cubin import read_cubin
from polyconv.numerics import reference
from polyconv.problem import Problem
from polyconv.tools.export import named_model
from polyconv.tools.export.simple_model import geometry_of
from simple_gemm import NAN, Run, check, compiled

COUNT, PER_KERNEL = 220, 4
"""Random geometries, and how many of them in a row differ only in batch, size and layouts: compiling takes seconds."""
SAMPLE = 12
ARCHS = ("sm_70", "sm_80")


def any_problem(seed: int) -> Problem:
    """A small convolution, of one tile or a few."""
    choose = Random(seed // PER_KERNEL)
    kernel = (choose.randint(1, 4), choose.randint(1, 5))
    stride, dilation = [(choose.choice([1, 1, 2, 3]), choose.choice([1, 1, 2, 3])) for _ in range(2)]
    groups = choose.choice([1, 1, 1, 2, 3, 5])
    channels, filters = choose.choice([1, 2, 3, 8, 17, 40]), choose.choice([1, 2, 3, 12, 20, 33, 70])
    sides = tuple(choose.randint(-2, 4) for _ in range(4))
    bias, choose, size = choose.random() < 0.5, Random(seed), []
    for axis in (0, 1):
        before, after = sides[2 * axis : 2 * axis + 2]
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        crop = max(-before, 0) + max(-after, 0)
        size.append(max(1, reach - before - after, crop + 1) + choose.randint(0, 12))
    return Problem.make(
        "fprop",
        (choose.choice([1, 2, 3]), groups * channels, *size),
        (groups * filters, channels, *kernel),
        stride=stride,
        padding=sides,
        dilation=dilation,
        groups=groups,
        bias=bias,
    )


def tensors(problem: Problem, x_layout: str, dy_layout: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Input, weight, bias and gradient. The gradient of a sum is one number with strides of 0."""
    bias = torch.randn(problem.out_channels) if problem.bias else None
    dy = (
        torch.randn(()).expand(problem.y_shape)
        if dy_layout == "sum"
        else laid_out(problem.y_shape, dy_layout, torch.float32)
    )
    return laid_out(problem.x_shape, x_layout, torch.float32), torch.randn(problem.w_shape), bias, dy


@pytest.mark.parametrize("seed", sampled(range(COUNT), SAMPLE, "simple"))
def test_any_geometry(seed: int) -> None:
    """Without a race, an access out of bounds or a read of uninitialised memory: the emulator stops at each."""
    torch.manual_seed(seed)
    problem, choose = any_problem(seed), Random(-seed)
    operands = tensors(problem, choose.choice(LAYOUTS), choose.choice([*LAYOUTS, "sum"]))
    check(problem, *operands, slices=choose.choice([1, 1, 2, 5]), arch=ARCHS[seed // PER_KERNEL % 2])


@pytest.mark.parametrize("name", sampled(PROBLEMS, 3, "simple"))
def test_kernelbench(name: str) -> None:
    """Its geometries, on images of a few tiles."""
    torch.manual_seed(0)
    for layer in named_model(name).layers:
        p = layer.problem
        size = [p.dilation[i] * (p.kernel[i] - 1) + 10 + 3 * i for i in (0, 1)]
        moves = {"stride": p.stride, "padding": p.padding, "dilation": p.dilation, "groups": p.groups}
        small = Problem.make("fprop", (2, p.in_channels, *size), p.w_shape, bias=p.bias, **moves)
        check(small, *tensors(small, "contiguous", "contiguous"), slices=2, arch="sm_70")


@pytest.mark.parametrize("arch", ["sm_70", "sm_80", "sm_90", "sm_100", "sm_120"] if NIGHTLY else ["sm_70", "sm_90"])
@pytest.mark.parametrize("name", PROBLEMS if NIGHTLY else ("kb80", "kb82"))
def test_no_spills(name: str, arch: str) -> None:
    for layer in named_model(name).layers:
        kernels = read_cubin(compiled(geometry_of(layer.problem), arch))
        assert len(kernels) == 3
        assert {symbol: kernel.stack for symbol, kernel in kernels.items() if kernel.stack} == {}


def test_random_geometries_do_not_spill() -> None:
    for seed in sampled(range(COUNT), 4, "spills"):
        for arch in ARCHS:
            assert not any(k.stack for k in read_cubin(compiled(geometry_of(any_problem(seed)), arch)).values())


def test_an_empty_batch_has_gradients() -> None:
    """No terms: the weight gradient is zero."""
    problem = Problem.make("fprop", (0, 3, 5, 6), (4, 3, 3, 3), bias=True)
    x, w, bias, dy = tensors(problem, "contiguous", "contiguous")
    check(problem, x, w, bias, dy, slices=1, arch="sm_70")
    dw = torch.full((1, *w.shape), NAN)
    Run(problem).weight_gradient(x, dy, dw)
    assert not dw.any()


def test_more_than_2_31_elements() -> None:
    """The last blocks of W2 at twice its batch: the output has 4,278,206,464 elements."""
    torch.manual_seed(0)
    problem = Problem.make("fprop", (32, 16, 1024, 1024), (128, 16, 3, 3))
    x, y, dx = (torch.from_numpy(gpu_emulator.sparse(s)) for s in (problem.x_shape, problem.y_shape, problem.x_shape))
    w = torch.randn(problem.w_shape)
    x[-1, :, -6:] = torch.randn(16, 6, 1024)
    run = Run(problem, blocks=1)
    run.forward(x, w, None, y)
    last_rows = x[-1:, :, -6:]
    torch.testing.assert_close(
        y[-1, 64:, -1, -40:].double(), reference.fprop(problem, last_rows, w)[0, 64:, -1, -40:], rtol=0, atol=1e-4
    )
    y[-1, :, -4:] = torch.randn(128, 4, 1022)
    run.input_gradient(y, w, dx)
    expected = reference.dgrad(problem, y[-1:, :, -4:], w, last_rows.shape)
    torch.testing.assert_close(dx[-1, :, -1, -128:].double(), expected[0, :, -1, -128:], rtol=0, atol=1e-3)
