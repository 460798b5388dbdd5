"""The fast depthwise algorithm for many taps (``csrc/cpu/depthwise/segments-inl.h``) against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cpu_passes import (
    Layer,
    Run,
    close,
    instruction_sets,
    load_native,
    on_instruction_set,
    poisoned,
    same_bits_for_any_threads,
)
from polyconv.activation import Activation
from polyconv.cpu.engines import depthwise
from polyconv.cpu.plan import CpuCandidate
from polyconv.cpu.planner import plan_cpu
from polyconv.problem import Pass, Problem, channels_last_strides
from polyconv.selection import Preference

load_native()

FAST = ("avx512", "avx2", "neon")
"""Instruction sets that have the algorithm."""

FORM = "F(4,4) x F(4,4) in segments, depthwise"


@pytest.fixture
def fast_set(instruction_set: str) -> str:
    if instruction_set not in FAST:
        pytest.skip(f"{instruction_set} has no kernels for segments")
    return instruction_set


def layer(
    batch: int, channels: int, size: tuple[int, int], kernel: tuple[int, int], padding: tuple[int, ...] | None = None
) -> Layer:
    """Padding that keeps the size, by default."""
    h, w = kernel[0] // 2, kernel[1] // 2
    around = padding or (h, h, w, w)
    return Layer((batch, channels, *size), channels, kernel, around, groups=channels)  # type: ignore[arg-type]


def forward(run: Run, bias: Tensor | None, out_layout: str = "contiguous", transformed: Tensor | None = None) -> Tensor:
    y = poisoned(run.layer.y, out_layout)
    geometry, nothing = run.layer.geometry, (None, 0, 0.0, 0.0)
    torch.ops.polyconv_cpu.depthwise_fprop(run.x, run.w, bias, y, geometry, *nothing, True, transformed)
    return y


def input_gradient(run: Run, out_layout: str = "contiguous") -> Tensor:
    dx = poisoned(run.layer.x, out_layout)
    torch.ops.polyconv_cpu.depthwise_dgrad(run.dy, run.w, dx, run.layer.geometry, None, True)
    return dx


@st.composite
def geometries(draw: st.DrawFn) -> Layer:
    """Any padding, odd sizes, channels that fill no vector, images smaller than the kernel."""
    kernel = draw(st.integers(1, 33)), draw(st.integers(1, 33))
    size = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    padding = tuple(draw(st.integers(-3, 34)) for _ in range(4))
    height = max(size[0], kernel[0] - padding[0] - padding[1], 1 - min(0, *padding[:2]) * 2)
    width = max(size[1], kernel[1] - padding[2] - padding[3], 1 - min(0, *padding[2:]) * 2)
    return layer(draw(st.integers(1, 2)), draw(st.integers(1, 35)), (height, width), kernel, padding)


LAYOUTS = ["contiguous", "channels_last", "window", "offset", "sliced"]


@given(
    layer=geometries(),
    x_layout=st.sampled_from(LAYOUTS),
    y_layout=st.sampled_from(LAYOUTS),
    out_layout=st.sampled_from(LAYOUTS),
    name=instruction_sets.filter(FAST.__contains__),
    kept=st.booleans(),
)
def test_any_geometry(layer: Layer, x_layout: str, y_layout: str, out_layout: str, name: str, kept: bool) -> None:
    with on_instruction_set(name):
        run = Run.make(layer, torch.float32, x_layout, y_layout)
        takes = "sliced" not in (x_layout, out_layout)  # others are summed directly
        transformed = torch.ops.polyconv_cpu.depthwise_transform(run.w) if kept and takes else None
        close(forward(run, run.bias, out_layout, transformed), run.expected["y"])
        close(input_gradient(run, out_layout), run.expected["dx"])


def test_points_are_those_of_the_error_model(fast_set: str) -> None:
    """Transformed weights are G w G^T with the matrices of the exact scheme, up to the sign of a row."""
    torch.manual_seed(0)
    w = torch.randn(19, 1, 9, 6)
    lanes = {"avx512": 16, "avx2": 8}.get(fast_set, 4)
    found = torch.ops.polyconv_cpu.depthwise_transform(w).view(-1, 7, 7, 3, 2, lanes)
    g = torch.tensor(np.array(depthwise._scheme().h.weight_transform, dtype=float))
    g[:, 1:] *= torch.where(g[:, :1] < 0, -1.0, 1.0)
    g[:, 0].abs_()
    segments = F.pad(w.double(), (0, 2, 0, 3)).view(19, 3, 4, 2, 4)
    expected = torch.einsum("pr,qs,cirjs->cpqij", g, g, segments)
    expected = F.pad(expected, (0, 0) * 4 + (0, -19 % lanes)).view(-1, lanes, 7, 7, 3, 2).permute(0, 2, 3, 4, 5, 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("x_layout", ["contiguous", "channels_last"])
def test_bits_depend_on_neither_threads_nor_kept_weights(x_layout: str) -> None:
    run = Run.make(layer(2, 21, (37, 45), (13, 19)), torch.float32, x_layout, x_layout)
    transformed = torch.ops.polyconv_cpu.depthwise_transform(run.w)
    same_bits_for_any_threads(lambda: [forward(run, run.bias), input_gradient(run)])
    assert torch.equal(forward(run, run.bias), forward(run, run.bias, transformed=transformed))


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_near(special: float) -> None:
    """In its channel and image, and less than two tiles beyond the outputs that read it."""
    run = Run.make(layer(2, 18, (40, 48), (13, 13)), torch.float32)
    run.x[1, 5, 20, 30] = special
    finite = forward(run, run.bias).isfinite()
    reached = torch.zeros_like(finite)
    reached[1, 5, 14 - 7 : 27 + 7, 24 - 7 : 37 + 7] = True
    direct = torch.zeros_like(finite)
    direct[1, 5, 14:27, 24:37] = True
    assert (finite | reached).all()
    assert not (finite & direct).any()


@pytest.mark.parametrize("exponent", [-140, -100, 0, 90])
def test_magnitudes(fast_set: str, exponent: int) -> None:
    """Tiny operands are scaled, denormal results are rounded once."""
    run = Run.make(layer(1, 5, (20, 22), (11, 11)), torch.float32)
    run.x.mul_(2.0**exponent)
    y = forward(run, None)
    exact = F.conv2d(run.x.double(), run.w.double(), padding=5, groups=5)
    scale = 11 * 2.0**exponent
    assert (y.double() - exact).abs().max() <= 4e-5 * scale + 2.0**-149


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu"])
def test_epilogue(activation: str, channels_last: bool) -> None:
    torch.manual_seed(0)
    more = {"residual": True, "activation": Activation(activation)}
    problem, candidate = planned(Pass.FPROP, (2, 19, 17, 23), 11, channels_last, **more)
    x, residual = torch.randn(problem.x_shape), torch.randn(problem.y_shape)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    w, bias, y = torch.randn(problem.w_shape), torch.randn(19), torch.full(problem.y_shape, torch.nan)
    x, residual, y = (t.contiguous(memory_format=layout) for t in (x, residual, y))
    tensors = {"x": x, "w": w, "bias": bias, "residual": residual, "y": y}
    depthwise.prepare(candidate, problem, None)(tensors)
    wide = F.conv2d(x.double(), w.double(), bias.double(), padding=5, groups=19) + residual.double()
    close(y, problem.activation.in_place(wide))


def planned(
    kind: Pass, x_shape: tuple[int, ...], kernel: int, channels_last: bool = False, **more: object
) -> tuple[Problem, CpuCandidate]:
    """A problem of a padding that keeps the size, and its fast candidate."""
    strides = channels_last_strides(x_shape) if channels_last else None
    pad, channels = kernel // 2, x_shape[1]
    problem = Problem.make(
        kind,
        x_shape,
        (channels, 1, kernel, kernel),
        padding=(pad,) * 4,
        groups=channels,
        x_strides=strides,
        y_strides=strides,
        **more,  # type: ignore[arg-type]
    )
    _, fast = depthwise.candidates(problem, plan_cpu(problem).device)
    return problem, fast


@pytest.mark.parametrize("kernel", [9, 13, 31, 51])
@pytest.mark.parametrize("kind", [Pass.FPROP, Pass.DGRAD], ids=str)
@pytest.mark.parametrize("weights", ["normal", "uniform", "positive"])
def test_predicted_error_holds(fast_set: str, kind: Pass, kernel: int, weights: str) -> None:
    torch.manual_seed(0)
    problem, fast = planned(kind, (1, 24, 57, 62), kernel)
    x, w = torch.randn(problem.x_shape), torch.randn(problem.w_shape)
    w = {"normal": w, "uniform": torch.rand_like(w) * 2 - 1, "positive": torch.rand_like(w)}[weights]
    written = torch.full(problem.y_shape, torch.nan)
    given = {"x": x, "w": w, "y": written} if kind is Pass.FPROP else {"x": written, "w": w, "y": x}
    depthwise.prepare(fast, problem, None)(given)
    compute = F.conv2d if kind is Pass.FPROP else F.conv_transpose2d
    exact = compute(x.double(), w.double(), padding=kernel // 2, groups=24)
    scale = w.double().square().sum((1, 2, 3)).sqrt()[:, None, None]
    observed = ((written.double() - exact).abs() / scale).max().item()
    assert fast.error / 20 < observed <= fast.error <= problem.tolerance


def test_is_chosen_for_many_taps() -> None:
    for channels_last in (False, True):
        problem, _ = planned(Pass.FPROP, (1, 96, 56, 56), 31, channels_last)
        assert plan_cpu(problem, inference=True).choice == FORM
        problem, _ = planned(Pass.FPROP, (1, 96, 56, 56), 7, channels_last)
        assert plan_cpu(problem, inference=True).choice != FORM


def test_refusals() -> None:
    for more, why in (
        ({"stride": (2, 2)}, "unit stride"),
        ({"dilation": (2, 2)}, "without dilation"),
        ({"padding_mode": "reflect"}, "zeros around the input"),
    ):
        assert why in str(planned(Pass.FPROP, (1, 8, 70, 70), 31, **more)[1].refusal)
    assert "not weights" in str(planned(Pass.WGRAD, (1, 8, 70, 70), 31)[1].refusal)
    assert "taps" in str(planned(Pass.FPROP, (1, 8, 70, 70), 7)[1].refusal)


def test_a_weight_far_from_even_takes_another_kernel() -> None:
    """A shift has its energy in one tap, of which the roundings of the others are many times as large."""
    problem, fast = planned(Pass.FPROP, (1, 16, 40, 40), 31)
    plan = plan_cpu(problem, inference=True, prefer=Preference(fast.name))
    assert plan.choice == FORM
    w = torch.zeros(problem.w_shape)
    w[:, :, 15, 15] = 1.0
    assert plan.for_weights(torch.randn(problem.w_shape)) is plan
    other = plan.for_weights(w)
    assert other is plan or other.choice != FORM
