"""Half precision on the CPU: sums in float32, one rounding of the result, on every kernel and never on ATen's reference
path. Results are compared with float64 on the half-precision operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import polyconv
from cpu_passes import BORDERED, EDGES, STRIDED, Layer, layers, load_native, poisoned, same_bits_for_any_threads
from polyconv.activation import Activation
from polyconv.cpu import native
from polyconv.cpu.engines import aten, channel_lanes, depthwise, pointwise, reference
from polyconv.cpu.planner import CpuPlan, engine_of, here, offered, plan_cpu
from polyconv.cpu.weight_cache import TransformedWeights
from polyconv.numerics import reference as exact
from polyconv.problem import Pass, Problem
from polyconv.selection import Preference

load_native()

HALF = [torch.float16, torch.bfloat16]
both = pytest.mark.parametrize("dtype", HALF, ids=["float16", "bfloat16"])
MEMORY_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
LAYOUTS = ("contiguous", "channels_last", "sliced")
TOLERANCE = 1e-4
Shape = tuple[int, int, int, int]
FUNCTIONS = {1: polyconv.conv1d, 2: polyconv.conv2d, 3: polyconv.conv3d}
TRANSPOSED = {1: polyconv.conv_transpose1d, 2: polyconv.conv_transpose2d, 3: polyconv.conv_transpose3d}


def close(found: Tensor, expected: Tensor) -> None:
    """The tolerance of float32 sums, and one rounding to the dtype. Unwritten elements are NaN, and fail."""
    scale = expected.square().mean().sqrt().item() if expected.numel() else 0.0
    rounding = torch.finfo(found.dtype).eps / 2
    smallest = torch.finfo(found.dtype).smallest_normal * rounding
    torch.testing.assert_close(found.double(), expected, rtol=1.01 * rounding, atol=TOLERANCE * scale + smallest)


def problem_of(layer: Layer, kind: Pass, tensors: dict[str, Tensor], **more: Any) -> Problem:
    x, w, y = tensors["x"], tensors.get("w", tensors.get("dw")), tensors["y"]
    assert w is not None
    return Problem.make(
        kind,
        layer.x,
        layer.w,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=layer.groups,
        padding_mode=layer.border,
        x_strides=x.stride(),
        w_strides=w.stride(),
        y_strides=y.stride(),
        dtype=str(x.dtype).removeprefix("torch."),
        **more,
    )


def check(layer: Layer, kind: Pass, dtype: torch.dtype, x_layout: str, y_layout: str, pick: int | None = None) -> None:
    """One pass on poisoned outputs, by the chosen candidate or by another one; ``pick`` numbers those that may run."""

    def read(shape: tuple[int, ...], layout: str = "contiguous") -> Tensor:
        return poisoned(shape, layout, dtype).copy_(torch.randn(shape))

    def written(shape: tuple[int, ...], layout: str = "contiguous") -> Tensor:
        return poisoned(shape, layout, dtype)

    torch.manual_seed(0)
    if kind is Pass.FPROP:
        tensors = {"x": read(layer.x, x_layout), "w": read(layer.w), "y": written(layer.y, y_layout)}
        tensors["bias"] = read((layer.out_channels,))
        expected = {"y": exact.fprop(layer.moves, tensors["x"], tensors["w"], tensors["bias"])}
    elif kind is Pass.DGRAD:
        tensors = {"y": read(layer.y, y_layout), "w": read(layer.w), "x": written(layer.x, x_layout)}
        expected = {"x": exact.dgrad(layer.moves, tensors["y"], tensors["w"], layer.x)}
    else:
        tensors = {"x": read(layer.x, x_layout), "y": read(layer.y, y_layout), "dw": written(layer.w)}
        tensors["db"] = written((layer.out_channels,))
        expected = dict(zip(("dw", "db"), exact.wgrad(layer.moves, tensors["x"], tensors["y"], layer.w), strict=True))
    problem = problem_of(layer, kind, tensors, bias=kind is not Pass.DGRAD)
    plan = plan_cpu(problem)
    if pick is not None:
        able = [c.name for c in plan.candidates if c.cost is not None and not c.name.startswith("PyTorch's")]
        plan = plan_cpu(problem, prefer=Preference(able[pick % len(able)]))
    assert_ours(plan)
    before = {name: tensor.clone() for name, tensor in tensors.items() if name not in expected}
    plan.prepared(None)(tensors)
    for name, values in expected.items():
        close(tensors[name], values)
    assert all(torch.equal(tensors[name], values) for name, values in before.items())


def assert_ours(plan: CpuPlan) -> None:
    """ATen runs in half precision only where the processor has instructions for its kernels."""
    assert plan.engine is not aten or plan.chosen.widened or aten._runs_in_onednn(plan.problem.dtype)


@both
@pytest.mark.parametrize("kind", Pass, ids=str)
@settings(max_examples=40)
@given(
    layer=st.one_of(layers(), layers(depthwise=True)),
    x_layout=st.sampled_from(LAYOUTS),
    y_layout=st.sampled_from(LAYOUTS),
    pick=st.none() | st.integers(0, 40),
)
def test_any_geometry(
    layer: Layer, kind: Pass, dtype: torch.dtype, x_layout: str, y_layout: str, pick: int | None
) -> None:
    check(layer, kind, dtype, x_layout, y_layout, pick)


@both
@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("name", [*EDGES, *BORDERED, *STRIDED])
def test_edges(name: str, kind: Pass, dtype: torch.dtype) -> None:
    check({**EDGES, **BORDERED, **STRIDED}[name], kind, dtype, "contiguous", "contiguous")


DEPTHWISE = {
    "rows": Layer((3, 37, 30, 70), 37, (5, 3), (2, 2, 1, 1), groups=37),
    "planes": Layer((3, 70, 9, 9), 70, (3, 3), (1, 1, 1, 1), groups=70),
    "several blocks": Layer((2, 50, 60, 60), 50, (3, 3), (1, 1, 1, 1), stride=(2, 2), groups=50),
    "two outputs per channel": Layer((2, 19, 33, 21), 38, (3, 5), (1, 1, 2, 2), groups=19),
    "more images than partial sums": Layer((70, 3, 8, 8), 3, (3, 3), (1, 1, 1, 1), groups=3),
    "reflected": Layer((2, 20, 20, 24), 20, (3, 3), (1, 1, 1, 1), groups=20, border="reflect"),
}


@both
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_kernels_convert_themselves(
    name: str, kind: Pass, layout: str, dtype: torch.dtype, instruction_set: str
) -> None:
    check(DEPTHWISE[name], kind, dtype, layout, layout)


@both
def test_depthwise_epilogue(dtype: torch.dtype) -> None:
    x, w, bias = torch.randn(2, 20, 17, 19).to(dtype), torch.randn(20, 1, 3, 3).to(dtype), torch.randn(20).to(dtype)
    residual = torch.randn(2, 20, 17, 19).to(dtype)
    for layout in (torch.contiguous_format, torch.channels_last):
        arranged = [t.to(memory_format=layout) for t in (x, residual)]
        y = polyconv.conv2d(arranged[0], w, bias, padding=1, groups=20, residual=arranged[1], activation="silu")
        sums = F.conv2d(x.double(), w.double(), bias.double(), padding=1, groups=20) + residual.double()
        close(y, F.silu(sums))


@both
def test_the_bias_of_a_transposed_layer_may_have_any_stride(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 20, 17, 19).to(dtype), torch.randn(20, 1, 3, 3).to(dtype)
    for bias in (torch.randn(40).to(dtype)[::2], torch.full((1,), 0.5, dtype=dtype).expand(20)):
        for layout in (torch.contiguous_format, torch.channels_last):
            y = polyconv.conv_transpose2d(x.to(memory_format=layout), w, bias, groups=20)
            close(y, F.conv_transpose2d(x.double(), w.double(), bias.double(), groups=20))


@both
def test_depthwise_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    x, w, dy = torch.randn(5, 40, 30, 30).to(dtype), torch.randn(40, 1, 3, 3).to(dtype), torch.randn(5, 40, 28, 28)
    geometry = [1, 1, 0, 0, 1, 1, 40, 0]

    def passes() -> list[Tensor]:
        y, dx, dw = dy.to(dtype), torch.empty_like(x), torch.empty_like(w)
        native.operator("depthwise_fprop")(x, w, None, y, geometry)
        native.operator("depthwise_dgrad")(y, w, dx, geometry)
        native.operator("depthwise_wgrad")(x, y, dw, None, geometry)
        return [y, dx, dw]

    same_bits_for_any_threads(passes)


@both
@pytest.mark.parametrize("layouts", ["nchw nchw", "nhwc nhwc", "nchw nhwc"])
@pytest.mark.parametrize(
    "size",
    [
        *((3, 20, 13, 11), (2, 70, 40, 41), (5, 33, 7, 7), (2, 1, 6, 5), (2, 18, 1, 9), (21, 9, 2, 4), (9, 5, 2, 2)),
        (2, 1030, 3, 5),
    ],
)
def test_blocks_of_pixels(size: Shape, layouts: str, dtype: torch.dtype, instruction_set: str) -> None:
    """1x1 convolutions by blocks of planes or pixels that end within lines, vectors and images; bias and activation,
    strides, and tiny operands. The same bits for any number of threads."""
    channels = size[1]
    of_x, of_y = (MEMORY_FORMATS[layout] for layout in layouts.split())
    torch.manual_seed(0)
    for kind, stride, factor in (
        (Pass.FPROP, 1, 1.0),
        (Pass.DGRAD, 1, 1.0),
        (Pass.FPROP, 2, 1.0),
        (Pass.FPROP, 1, 1e-40),
    ):
        w, bias = torch.randn(37, channels, 1, 1).to(dtype), (factor * torch.randn(37)).to(dtype)
        x = (factor * torch.randn(size)).to(dtype).contiguous(memory_format=of_x)
        expected = torch.conv2d(x.double(), w.double(), bias.double(), stride).relu()
        y = torch.randn(expected.shape).to(dtype).contiguous(memory_format=of_y)
        strides = {"x_strides": x.stride(), "w_strides": w.stride(), "y_strides": y.stride()}
        name = str(dtype).removeprefix("torch.")
        activation = Activation.RELU if kind is Pass.FPROP else Activation.NONE
        problem = Problem.make(
            *(kind, size, w.shape), stride=(stride, stride), dtype=name, activation=activation, **strides
        )
        if pointwise.refusal(problem) is not None:
            assert stride == 2
            continue
        run = plan_cpu(problem, prefer=Preference("direct, pointwise", "test")).prepared(None)
        if kind is Pass.DGRAD:
            tensors = {"y": y, "w": w, "x": x.fill_(torch.nan)}
            expected = torch.nn.grad.conv2d_input(size, w.double(), y.double())
        else:
            tensors = {"x": x, "w": w, "bias": bias, "y": y.fill_(torch.nan)}
        result = tensors["y" if kind is Pass.FPROP else "x"]

        def passes(run: Any = run, tensors: dict[str, Tensor] = tensors, result: Tensor = result) -> list[Tensor]:
            run(dict(tensors))
            return [result.clone()]

        same_bits_for_any_threads(passes)
        if factor == 1.0:
            close(result, expected)
        elif dtype == torch.bfloat16:
            assert bool(((result.double() - expected).abs() <= 2.0**-134 + 2.0**-7 * expected.abs()).all())


@both
def test_conversions_are_exact_and_round_to_nearest(dtype: torch.dtype, instruction_set: str) -> None:
    """Through one tap: all numbers of the dtype, infinities and NaN included; products have ties and subnormals. Those
    of float32, which bfloat16 has as well, count as zero."""
    smallest = torch.finfo(torch.float32).smallest_normal
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    x, y = every.reshape(2, 2, 128, 128), torch.empty(2, 2, 128, 128, dtype=dtype)
    for factor in (1.0, 0.5, 1.0 + 2 * torch.finfo(dtype).eps, 2.0**-6 * 1.5, -3.0):
        w = torch.full((2, 1, 1, 1), factor, dtype=dtype)
        native.operator("depthwise_fprop")(x, w, None, y, [1, 1, 0, 0, 1, 1, 2, 0])
        expected = torch.where(x.float().abs() < smallest, 0.0, x.float()) * factor
        expected = torch.where(expected.abs() < smallest, 0.0, expected).to(dtype)
        assert torch.equal(y.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


@both
@pytest.mark.parametrize("axes", FUNCTIONS)
@pytest.mark.parametrize("groups", [1, 4])
def test_all_passes_of_functions(axes: int, groups: int, dtype: torch.dtype) -> None:
    """Convolutions and transposed ones over any number of axes, by autograd. The bias is added before the rounding."""
    torch.manual_seed(0)
    x, w = torch.randn(3, 4, *[7, 9, 8][:axes]).to(dtype), torch.randn(4, 4 // groups, *[3] * axes).to(dtype)
    bias = torch.randn(4).to(dtype)
    options = {"stride": 2, "padding": 1, "groups": groups}
    for ours, theirs in ((FUNCTIONS, "conv"), (TRANSPOSED, "conv_transpose")):
        leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
        y = ours[axes](*leaves, **options)
        dy = torch.randn_like(y)
        y.backward(dy)
        exact_leaves = [t.double().requires_grad_() for t in (x, w, bias)]
        expected = getattr(F, f"{theirs}{axes}d")(*exact_leaves, **options)
        expected.backward(dy.double())
        close(y, expected.detach())
        for leaf, its in zip(leaves, exact_leaves, strict=True):
            assert leaf.grad is not None
            assert its.grad is not None
            close(leaf.grad, its.grad)


@both
def test_four_ones_make_four(dtype: torch.dtype) -> None:
    one = torch.ones(1, 1, 2, 2, dtype=dtype)
    assert polyconv.conv2d(one, one).item() == 4.0


@both
def test_an_expanded_gradient_is_not_written_out(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 8, 12, 12).to(dtype).requires_grad_(), torch.randn(8, 8, 3, 3).to(dtype).requires_grad_()
    polyconv.conv2d(x, w).sum().backward()
    a, b = (t.detach().double().requires_grad_() for t in (x, w))
    F.conv2d(a, b).sum().backward()
    for leaf, its in ((x, a), (w, b)):
        assert leaf.grad is not None
        assert its.grad is not None
        close(leaf.grad, its.grad)


# ---- plans


def problem(dtype: str, kind: Pass = Pass.FPROP, **more: Any) -> Problem:
    padding = (1, 1, 1, 1)
    return Problem.make(kind, (1, 64, 64, 64), (64, 64, 3, 3), padding=padding, dtype=dtype, **more)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", Pass, ids=str)
def test_atens_reference_path_is_no_candidate(kind: Pass, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "_runs_in_onednn", lambda dtype: False)
    every = list(offered(problem(dtype, kind), here()))
    (theirs,) = (one for one in every if one.engine == aten.NAME and not one.widened)
    assert "its reference path would run" in str(theirs.refusal)
    assert any(one.engine not in (aten.NAME, reference.NAME) and one.refusal is None for one in every)


def test_onednn_with_instructions_for_the_dtype_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "_runs_in_onednn", lambda dtype: True)
    slow, fast = (
        next(one for one in offered(problem("bfloat16"), here()) if one.name == "PyTorch's convolution, ATen")
        for flag in (False, True)
        if not monkeypatch.setattr(aten, "has_instructions", lambda asked, flag=flag: flag)
    )
    assert slow.refusal is fast.refusal is None
    assert fast.cycles < slow.cycles / 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_predicted_error_has_one_rounding(dtype: str) -> None:
    half, single = plan_cpu(problem(dtype)), plan_cpu(problem("float32"))
    assert half.chosen.widened
    assert half.chosen.form == single.chosen.form
    rounding = {"float16": 5 * 2.0**-11, "bfloat16": 5 * 2.0**-8}[dtype]
    assert half.predicted_error == pytest.approx(single.predicted_error + rounding)
    (chosen,) = (one for one in half.candidates if one.rejected is None)
    assert chosen.error == pytest.approx(half.predicted_error)


def test_copies_cost_time() -> None:
    half, single = plan_cpu(problem("float16")), plan_cpu(problem("float32"))
    assert single.cost < half.cost < 1.5 * single.cost


@both
def test_transformed_weights_are_kept(dtype: torch.dtype) -> None:
    x, w = torch.randn(1, 64, 64, 64).to(dtype), torch.randn(64, 64, 3, 3).to(dtype)
    plan = plan_cpu(problem(str(dtype).removeprefix("torch.")), inference=True)
    assert plan.keeps_weights
    weights = TransformedWeights()
    run = plan.prepared(weights)
    for _ in range(2):
        for _ in range(2):
            tensors = {"x": x, "w": w, "y": poisoned((1, 64, 64, 64), dtype=dtype)}
            run(tensors)
            close(tensors["y"], F.conv2d(x.double(), w.double(), padding=1))
            assert len(weights._kept) == 1
        w.data.copy_(torch.randn(w.shape))  # does not move the version counter


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "stride", "padding"),
    [
        ((3, 12, 6, 1), (15, 4, 3, 4), (4, 5), (1, 3)),
        ((2, 48, 9, 4), (24, 16, 5, 4), (4, 5), (0, 3)),
        ((2, 16, 16, 3), (8, 16, 3, 7), (1, 5), (0, 2)),
    ],
    ids=str,
)
def test_memory_beside_the_tensors_does_not_matter(x_shape: Any, w_shape: Any, stride: Any, padding: Any) -> None:
    """Of any candidate: oneDNN's kernels for AMX read beyond rows that are no longer than a strided kernel."""

    def among_nans(t: Tensor) -> Tensor:
        around = torch.full((t.numel() + 4000,), float("nan"), dtype=t.dtype)
        return around[2000 : 2000 + t.numel()].view(t.shape).copy_(t)

    x, w = torch.randn(x_shape).bfloat16(), torch.randn(w_shape).bfloat16()
    groups = x_shape[1] // w_shape[1]
    exact = [x.double().requires_grad_(), w.double().requires_grad_()]
    y = F.conv2d(*exact, stride=stride, padding=padding, groups=groups)
    dy = torch.randn(y.shape).bfloat16()
    dx, dw = torch.autograd.grad(y, exact, dy.double())
    results = {Pass.FPROP: ("y", y.detach()), Pass.DGRAD: ("x", dx), Pass.WGRAD: ("dw", dw)}
    sides = (padding[0], padding[0], padding[1], padding[1])
    for kind, (written, expected) in results.items():
        more = {"stride": stride, "padding": sides, "groups": groups, "dtype": "bfloat16"}
        given = Problem.make(kind, x_shape, w_shape, **more)
        for name in [one.name for one in plan_cpu(given).candidates if one.cost is not None]:
            tensors = {"x": among_nans(x), "w": among_nans(w), "y": among_nans(dy)}
            tensors[written] = poisoned(expected.shape, dtype=torch.bfloat16)
            plan_cpu(given, prefer=Preference(name)).prepared(None)(tensors)
            close(tensors[written], expected)


@pytest.mark.parametrize("scale", [1.0, 2e-16, 1e-39], ids=["ordinary", "tiny", "denormal"])
def test_every_candidate_with_the_weight_cache(scale: float) -> None:
    """PyTorch's convolution in bfloat16 may give zeros: AVX512_BF16 and AMX read denormal operands as zero."""
    x, w = torch.randn(2, 5, 24, 30).bfloat16(), (scale * torch.randn(6, 5, 9, 9)).bfloat16()
    given = Problem.make("fprop", x.shape, w.shape, dtype="bfloat16")
    expected = F.conv2d(x.double(), w.double())
    plan = plan_cpu(given, inference=True)
    for name in [c.name for c in plan.candidates if c.cost is not None]:
        forced = plan_cpu(given, inference=True, prefer=Preference(name))
        run = forced.prepared(TransformedWeights())
        for _ in range(2):
            tensors = {"x": x, "w": w, "y": poisoned(expected.shape, dtype=torch.bfloat16)}
            run(tensors)
            if forced.engine is aten and not forced.chosen.widened and scale == 1e-39:
                assert torch.equal(tensors["y"], F.conv2d(x, w))
            else:
                close(tensors["y"], expected)


@both
def test_blocks_of_images(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyconv.cpu import planner

    monkeypatch.setattr(planner, "WIDENED_AT_A_TIME", 40_000)
    layer = Layer((7, 8, 30, 40), 8, (3, 3), (1, 1, 1, 1))
    x, w = torch.empty(layer.x), torch.empty(layer.w)
    given = problem_of(layer, Pass.FPROP, {"x": x.to(dtype), "w": w.to(dtype), "y": torch.empty(layer.y)})
    assert plan_cpu(given)._images == 2
    for kind in Pass:
        check(layer, kind, dtype, "contiguous", "contiguous")


@both
@pytest.mark.parametrize("kind", [Pass.FPROP, Pass.DGRAD], ids=str)
def test_the_kernels_pack_weights_of_any_strides(kind: Pass, dtype: torch.dtype, instruction_set: str) -> None:
    """1x1 layers on channels_last tensors. A weight that is no dense matrix is copied before."""
    dense = torch.randn(37, 50, 1, 1).to(dtype)
    weights = [dense, dense.transpose(0, 1).contiguous().transpose(0, 1), dense.repeat(1, 2, 1, 1)[:, ::2]]
    for w in (*weights, dense[:1].expand(37, 50, 1, 1), (1e-40 * dense)):
        x, y = (torch.randn(2, c, 9, 7).to(dtype).contiguous(memory_format=torch.channels_last) for c in (50, 37))
        given, result = (x, y) if kind is Pass.FPROP else (y, x)
        strides = {"x_strides": x.stride(), "w_strides": w.stride(), "y_strides": y.stride()}
        problem = Problem.make(kind, x.shape, w.shape, dtype=str(dtype).removeprefix("torch."), **strides)
        matrix = w.double().flatten(1) if kind is Pass.FPROP else w.double().flatten(1).t()
        expected = torch.einsum("kc,nchw->nkhw", matrix, given.double())
        result.fill_(torch.nan)
        plan_cpu(problem, prefer=Preference("direct, pointwise")).prepared(None)({"x": x, "w": w, "y": y})
        close(result, expected)


@both
@pytest.mark.parametrize("scale", [1.0, 1e-39])
@pytest.mark.parametrize(
    "layer",
    [
        Layer((3, 37, 9, 11), 50, (1, 1)),
        Layer((2, 20, 13, 12), 33, (3, 3), (1, 1, 2, 2), (2, 1), (1, 2)),
        Layer((1, 1, 12, 9), 5, (2, 3), (1, 0, 0, 2)),
        Layer((1, 4160, 2, 2), 4160, (1, 1)),  # the accumulators are split
    ],
    ids=str,
)
def test_the_weight_gradient_widens_what_it_packs(
    layer: Layer, scale: float, dtype: torch.dtype, instruction_set: str
) -> None:
    """On channels_last tensors the same bits as on float32 copies, rounded once: also of tiny x or dy."""
    for tiny in ("x", "y"):
        tensors = {name: torch.randn(getattr(layer, name)) for name in ("x", "y")}
        tensors[tiny] *= scale
        tensors = {n: t.to(dtype).contiguous(memory_format=torch.channels_last) for n, t in tensors.items()}
        tensors |= {"dw": poisoned(layer.w, dtype=dtype), "db": poisoned((layer.out_channels,), dtype=dtype)}
        given = problem_of(layer, Pass.WGRAD, tensors)
        assert channel_lanes.takes_half(given) or layer.x[1] == 1
        plan = plan_cpu(given, prefer=Preference("direct in float32, channel lanes"))
        assert plan.engine is channel_lanes
        plan.prepared(None)(tensors)
        wide = {name: tensor.float() for name, tensor in tensors.items()}
        same = plan_cpu(problem_of(layer, Pass.WGRAD, wide), prefer=Preference("direct, channel lanes"))
        same.prepared(None)(wide)
        assert torch.equal(tensors["dw"], wide["dw"].to(dtype))
        assert torch.equal(tensors["db"], wide["db"].to(dtype))


@both
def test_a_weight_is_kept_once_for_each_layout(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 64, 40, 40).to(dtype), torch.randn(64, 64, 1, 1).to(dtype)
    given = replace(Problem.make("fprop", x.shape, w.shape, dtype=str(dtype).removeprefix("torch.")), frozen=True)
    weights = TransformedWeights()
    found: list[list[Tensor]] = []
    for _ in range(2):
        for problem, layout in ((given, torch.contiguous_format), (given.channels_last(), torch.channels_last)):
            a = x.contiguous(memory_format=layout)
            y = torch.empty_like(a)
            plan = plan_cpu(problem, inference=True, prefer=Preference("direct, pointwise"))
            plan.prepared(weights)({"x": a, "w": w, "y": y})
            close(y, F.conv2d(x.double(), w.double()))
        found.append([kept.transformed for kept in weights._kept.values()])
    assert len(found[0]) == 2
    assert all(a is b for a, b in zip(*found, strict=True))


def test_only_dense_depthwise_tensors_are_converted_by_the_kernels() -> None:
    dense = Problem.make("fprop", (1, 8, 20, 20), (8, 1, 3, 3), groups=8, dtype="float16")
    assert depthwise.takes_half(dense)
    assert depthwise.takes_half(dense.channels_last())
    assert not depthwise.takes_half(replace(dense, x_strides=(0, 400, 20, 1), batch=2))
    assert not depthwise.takes_half(replace(dense, x_strides=(6400, 800, 40, 2)))
    assert engine_of(plan_cpu(dense).chosen) is depthwise


@both
def test_explain_names_the_conversion(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)).to(dtype)
    polyconv.replace(model)
    assert " in float32, " in str(polyconv.explain(model, (4, 8, 40, 40)))


@pytest.mark.parametrize("cores", [1, 2])
def test_copies_for_aten_cost_a_call(cores: int) -> None:
    """ATen on float32 copies is called as a native kernel is: it is no cheap way around both for the tiniest layer."""
    problem = Problem.make("fprop", (1, 1, 2, 2), (1, 1, 2, 2), dtype="bfloat16")
    plan = plan_cpu(problem, replace(here(), cores=cores), inference=True)
    (copied,) = (one for one in plan.candidates if one.name == "PyTorch's convolution in float32, ATen")
    assert copied.cost is not None
    assert copied.cost > plan.costs.call
    assert plan.choice == "direct in float32, depthwise"
