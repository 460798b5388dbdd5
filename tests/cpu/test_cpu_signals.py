"""Depthwise signals and patches against float64: passes, geometries, layouts and dtypes, in one property each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod, sqrt

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cpu_passes import instruction_sets, load_native, on_instruction_set, same_bits_for_any_threads
from polyconv import functional
from polyconv.cpu.engines import signals
from polyconv.cpu.engines.in_torch import patches
from polyconv.cpu.plan import CpuCandidate
from polyconv.cpu.planner import here, offered, offered_for_volumes, plan_cpu
from polyconv.cpu.weight_cache import TransformedWeights
from polyconv.numerics import reference
from polyconv.problem import RESULTS, Pass, Problem
from polyconv.selection import Preference

load_native()

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
APPLIED = {"none": lambda y: y, "relu": F.relu, "silu": F.silu}


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The tensor as contiguous rows, with contiguous channels, or with gaps of NaN."""
    if layout == "rows":
        return tensor.contiguous()
    if layout == "channels":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    gaps = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), torch.nan)
    return gaps[..., 1:-2:2].copy_(tensor)


def close(found: Tensor, expected: Tensor, terms: int, dtype: torch.dtype) -> None:
    """Every element within one rounding, and a float32 sum."""
    unit = sqrt(terms) + expected.abs()
    assert torch.isfinite(found).all()
    assert bool(((found.double() - expected).abs() <= (1.05 * ROUNDING[dtype] + 2e-6) * unit).all())


def check(engine: str, problem: Problem, dtype: torch.dtype, tensors: dict[str, Tensor]) -> None:
    """Run one pass by an engine's kernel on NaN, and compare with float64."""
    candidate = next(each for each in offered_by(problem) if each.engine == engine)
    plan = plan_cpu(problem, prefer=Preference(candidate.name))
    assert plan.choice == candidate.name
    given = dict(tensors)
    written = RESULTS[problem.kind]
    given[written] = torch.full_like(tensors.get(written, tensors["w"]), torch.nan)
    if problem.kind is Pass.WGRAD and problem.bias:
        given["db"] = torch.full((problem.out_channels,), torch.nan, dtype=dtype)
    plan.prepared(TransformedWeights())(given)
    x, w, y = (tensors[name].double() for name in "xwy")
    terms = prod(problem.kernel) * problem.channels_per_group[0]
    if problem.kind is Pass.FPROP:
        bias, residual = tensors.get("bias"), tensors.get("residual")
        sums = reference.fprop(problem, x, w, None if bias is None else bias.double())
        sums = sums if residual is None else sums + residual.double()
        close(given["y"], APPLIED[problem.activation](sums), terms, dtype)
    elif problem.kind is Pass.DGRAD:
        expected = reference.dgrad(problem, y, w, problem.x_shape)
        close(given["x"], expected, prod(problem.kernel) * problem.channels_per_group[1], dtype)
    else:
        terms = problem.batch * prod(problem.out_size)
        dw, db = reference.wgrad(problem, x, y, problem.w_shape)
        close(given["dw"], dw, terms, dtype)
        if problem.bias:
            close(given["db"], db, terms, dtype)


def offered_by(problem: Problem) -> Iterator[CpuCandidate]:
    return (offered_for_volumes if problem.rank == 3 else offered)(problem, here())


def tensors_of(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    def random(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype).copy_(torch.randn(shape))

    found = {
        "x": random(problem.x_shape, problem.x_strides),
        "w": random(problem.w_shape, problem.w_strides),
        "y": random(problem.y_shape, problem.y_strides),
    }
    if problem.kind is Pass.FPROP:
        found |= {"bias": torch.randn(problem.out_channels).to(dtype)} if problem.bias else {}
        found |= {"residual": random(problem.y_shape, problem.y_strides)} if problem.residual else {}
    return found


@st.composite
def signal_problems(draw: st.DrawFn) -> tuple[Problem, torch.dtype]:
    kind, dtype = draw(st.sampled_from(list(Pass))), draw(st.sampled_from(list(ROUNDING)))
    plain = kind is Pass.DGRAD
    channels = draw(st.sampled_from([1, 3, 8, 17, 40, 70]))
    multiplier, stride = (1, 1) if plain else (draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 1, 2, 3])))
    taps = draw(st.one_of(st.integers(1, 8), st.sampled_from([16, 17, 33, 47, 64, 70])))
    dilation, length = draw(st.sampled_from([1, 1, 2, 5])), draw(st.sampled_from([1, 5, 16, 33, 100, 300, 2500]))
    reach = (taps - 1) * dilation
    left = draw(st.sampled_from([0, reach, reach // 2, -1, 3]))
    right = draw(st.sampled_from([0, reach, -1, 3])) + max(0, reach + 4 - length)
    x, w = (draw(st.integers(1, 2)), channels, 1, length), (channels * multiplier, 1, 1, taps)
    modes = (
        ["zeros"] if plain or min(left, right) < 0 or max(left, right) >= length else ["zeros", "reflect", "circular"]
    )
    problem = Problem.make(
        kind,
        x,
        w,
        stride=(1, stride),
        padding=(0, 0, left, right),
        dilation=(1, dilation),
        groups=channels,
        padding_mode=draw(st.sampled_from(modes)),
        bias=draw(st.booleans()),
        dtype=NAMES[dtype],
        activation=draw(st.sampled_from(list(APPLIED))) if kind is Pass.FPROP else "none",
        residual=kind is Pass.FPROP and draw(st.booleans()),
        tolerance=1e30,
    )
    layouts = {
        "x": draw(st.sampled_from(["rows", "channels", "gaps"])),
        "y": draw(st.sampled_from(["rows", "channels"])),
    }
    if kind is not Pass.WGRAD:
        layouts["x" if plain else "y"] = "rows"
    shapes = {"x": problem.x_shape, "y": problem.y_shape}
    strides = {f"{name}_strides": laid_out(torch.zeros(shapes[name]), layouts[name]).stride() for name in layouts}
    return replace(problem, **strides), dtype


@given(case=signal_problems(), name=instruction_sets)
def test_any_signal(case: tuple[Problem, torch.dtype], name: str) -> None:
    with on_instruction_set(name):
        check(signals.NAME, case[0], case[1], tensors_of(*case))


@given(
    kind=st.sampled_from(list(Pass)),
    dtype=st.sampled_from(list(ROUNDING)),
    patch=st.sampled_from([(1, 90), (7, 14), (16, 16), (2, 14, 14), (3, 6, 6)]),
    counts=st.tuples(*[st.integers(1, 7)] * 3),
    rest=st.tuples(*[st.integers(0, 3)] * 3),
    layout=st.sampled_from(["rows", "channels"]),
    bias=st.booleans(),
    activation=st.sampled_from(list(APPLIED)),
)
def test_any_patches(
    kind: Pass,
    dtype: torch.dtype,
    patch: tuple[int, ...],
    counts: tuple[int, ...],
    rest: tuple[int, ...],
    layout: str,
    bias: bool,
    activation: str,
) -> None:
    size = [n * k + min(r, k - 1) for n, k, r in zip(counts, patch, rest, strict=False)]
    x, w = (2, 3, *size), (10, 3, *patch)
    outputs = (2, 10, *counts[: len(patch)])
    forward = kind is Pass.FPROP
    problem = Problem.make(
        kind,
        x,
        w,
        stride=patch,
        bias=bias,
        dtype=NAMES[dtype],
        activation=activation if forward else "none",
        residual=forward and bias,
        x_strides=laid_out(torch.zeros(x), layout).stride(),
        y_strides=laid_out(torch.zeros(outputs), layout).stride(),
    )
    if patches.refusal(problem) is None:
        check(patches.NAME, problem, dtype, tensors_of(problem, dtype))


def test_many_patches_are_a_product_per_image() -> None:
    problem = Problem.make("fprop", (2, 3, 60, 70), (5, 3, 10, 10), stride=(10, 10), bias=True, activation="relu")
    assert prod(problem.out_size) > patches.FEW_PATCHES
    check(patches.NAME, problem, torch.float32, tensors_of(problem, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", Pass, ids=str)
def test_patches_of_weights_with_adjacent_channels(kind: Pass, dtype: torch.dtype) -> None:
    problem = Problem.make(kind, (2, 3, 27, 31), (10, 3, 12, 9), stride=(12, 9), bias=kind is Pass.FPROP)
    tensors = tensors_of(problem, dtype)
    tensors["w"] = tensors["w"].contiguous(memory_format=torch.channels_last)  # and the gradient like it
    check(patches.NAME, problem, dtype, tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["rows", "channels"])
def test_same_bits_for_any_threads(dtype: torch.dtype, layout: str) -> None:
    x = laid_out(torch.randn(3, 40, 1, 2500).to(dtype), layout)
    w, y = torch.randn(40, 1, 1, 4).to(dtype), torch.randn(3, 40, 1, 2503).to(dtype)
    geometry, ops = [1, 1, 0, 3, 1, 1, 40, 0], torch.ops.polyconv_cpu

    def compute() -> list[Tensor]:
        out, dw = torch.full_like(y, torch.nan), torch.full_like(w, torch.nan)
        ops.signal_fprop(x, w, None, out, geometry)
        ops.signal_wgrad(x, y, dw, None, geometry)
        return [out, dw]

    same_bits_for_any_threads(compute)


def test_a_causal_convolution_with_its_activation() -> None:
    """One-sided padding and SiLU in one call equal the usual form: symmetric padding, a slice, SiLU."""
    x, w, bias = torch.randn(2, 24, 300), torch.randn(24, 1, 4), torch.randn(24)
    found = functional.conv1d(x, w, bias, padding=(3, 0), groups=24, activation="silu")
    usual = F.silu(F.conv1d(x.double(), w.double(), bias.double(), padding=3, groups=24)[..., :300])
    assert found.shape == x.shape
    close(found, usual, 4, torch.float32)


def test_other_problems_are_refused() -> None:
    signal = {"groups": 8, "dtype": "bfloat16"}
    for refused in (
        Problem.make("fprop", (1, 8, 2, 30), (8, 1, 1, 4), **signal),
        Problem.make("fprop", (1, 8, 1, 30), (8, 2, 1, 4), groups=4),
        Problem.make("dgrad", (1, 8, 1, 30), (8, 1, 1, 4), stride=(1, 2), **signal),
        Problem.make("fprop", (1, 8, 1, 30), (8, 1, 1, 4), y_strides=(216, 1, 216, 8), **signal),
        Problem.make("fprop", (1, 8, 1, 30), (8, 1, 1, 4), groups=8, dtype="float64"),
    ):
        assert signals.refusal(refused)
    for refused in (
        Problem.make("fprop", (1, 3, 32, 32), (8, 3, 16, 16), stride=(8, 16)),
        Problem.make("fprop", (1, 3, 32, 32), (8, 3, 16, 16), stride=(16, 16), padding=(0, 0, 1, 0)),
        Problem.make("fprop", (1, 3, 32, 32), (8, 3, 2, 2), stride=(2, 2)),
    ):
        assert patches.refusal(refused)
