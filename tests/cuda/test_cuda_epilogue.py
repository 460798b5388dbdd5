"""y = act(conv(x, w) + bias + residual) in the store of every forward kernel, as sm_70 machine code against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gpu_emulator
from emulate import V100, check, cubin, plan_of, run_plan
from machine_suites import Shape
from polyconv.activation import Activation
from polyconv.cuda.planner import all_kernels, plan_cuda
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.cost import bound_us
from polyconv.cuda.planner.depthwise import strip
from polyconv.cuda.planner.depthwise.halo import PLANE_TILES, HaloCandidate
from polyconv.cuda.planner.epilogue import has_epilogue
from polyconv.cuda.planner.implicit_gemm import fprop_dgrad
from polyconv.cuda.planner.implicit_gemm.fprop_dgrad import FPROP_DGRAD_TILES, ImplicitGemmCandidate
from polyconv.cuda.planner.implicit_gemm.tiles import SLIMMER, SMALL, TALL, GemmTile
from polyconv.cuda.planner.winograd import fused as winograd_fused
from polyconv.cuda.planner.winograd import nonfused as winograd_nonfused
from polyconv.cuda.planner.winograd_fp16x3 import fused as winograd_fp16x3_fused
from polyconv.cuda.planner.winograd_fp16x3 import nonfused as winograd_fp16x3_nonfused
from polyconv.measure.workloads import find
from polyconv.numerics import reference
from polyconv.problem import Pass, Problem
from polyconv.tools.export import ExportError, convolution_model, exported_file
from polyconv.tools.inspect.emulated_cost import count_plan
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

RELU, SILU, NONE = Activation.RELU, Activation.SILU, Activation.NONE
EPILOGUES = [(RELU, True), (SILU, True), (NONE, True), (RELU, False), (SILU, False)]
"""Every activation, with and without a residual, except the empty epilogue."""


def _name(epilogue: tuple[Activation, bool]) -> str:
    return f"{epilogue[0]}{' with a residual' if epilogue[1] else ''}"


def run(
    shape: Shape, activation: Activation, residual: bool, way: CudaCandidate | None = None, *, sms: int = V100.sms
) -> None:
    """One forward pass with an epilogue, by the planner's choice or a given variant, with all checks."""
    x, w, bias, dy = shape.tensors()
    problem, x = shape.lowered(Pass.FPROP, x, w, dy)
    problem = replace(problem, activation=activation, residual=residual)
    added = torch.empty_strided(problem.y_shape, problem.y_strides).normal_() if residual else None
    plan = plan_of(problem, way, sms=sms) if way else plan_cuda(problem, V100)
    finished = [launch for launch in plan.launches if launch.kernel.twin]
    assert finished
    assert all(launch.kernel.symbol.endswith("_epilogue") for launch in finished)
    check(problem, x, w, bias, dy, plan, added)


# ---- The planner's choice

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
    "depthwise, channels_last": Shape(
        (2, 35, 9, 10), 35, (5, 5), padding=(2, 2, 2, 2), groups=35, layout="channels_last"
    ),
}


@pytest.mark.usefixtures("every_arch")
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=_name)
@pytest.mark.parametrize("shape", [pytest.param(shape, id=name) for name, shape in NAMED.items()])
def test_named(shape: Shape, epilogue: tuple[Activation, bool]) -> None:
    run(shape, *epilogue)


# ---- Every instance

GATHERED = {
    fprop_dgrad.TAPS: Shape((1, 16, 13, 11), 40, (3, 2), padding=(1, 2, 0, 1), dilation=(2, 1)),
    fprop_dgrad.TAPS_VECTOR: Shape((1, 16, 13, 11), 40, (3, 2), padding=(1, 2, 0, 1), layout="channels_last"),
    fprop_dgrad.POINTWISE: Shape((2, 20, 10, 14), 36, (1, 1)),
    fprop_dgrad.ROWS: Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1)),
    fprop_dgrad.ROWS_BORDERED: Shape((1, 11, 13, 11), 37, (3, 2), (2, 1), (1, 2, 0, 1), mode="reflect"),
}
PLANE = Shape((3, 3, 37, 70), 6, (3, 5), (1, 2), (1, 2, 3, 0), groups=3)
SMALL_3X3 = Shape((2, 6, 19, 70), 40, (3, 3), padding=(1, 1, 1, 1))
PLAIN_AXES = winograd_nonfused.F43, winograd_nonfused.F23
EVEN_3X3 = Shape((1, 6, 16, 128), 40, (3, 3), padding=(1, 1, 1, 1))
"""Whole tiles: winograd/fused_resident.cuh stores pairs of columns."""
DILATED_3X3 = Shape((1, 6, 17, 41), 33, (3, 3), padding=(2, 2, 3, 3), dilation=(2, 3))
UNEVEN = Shape((2, 9, 19, 37), 21, (3, 5), padding=(1, 1, 2, 2))
QUADS = Shape((1, 9, 16, 40), 21, (3, 5), padding=(1, 1, 2, 2))
"""Rows of y that winograd/nonfused_output.cuh stores by four."""


def _every() -> Iterator[tuple[CudaCandidate, Shape]]:
    for loader in fprop_dgrad.LOADERS:
        for tile in FPROP_DGRAD_TILES:
            if tile.name in loader.epilogue_tiles:
                yield ImplicitGemmCandidate(tile, loader), GATHERED[loader]
    yield from ((HaloCandidate(tile), PLANE) for tile in PLANE_TILES)
    for (lanes, stride), kernels in strip.KERNELS.items():
        layout, c = ("channels_last", 34) if lanes == strip.CHANNELS else ("contiguous", 3)
        for taps in kernels:
            shape = Shape((2, c, 21, 13), c, taps, (stride, stride), (2, 1, 3, 0), groups=c, layout=layout)
            yield strip.StripCandidate(taps, stride, lanes, scatters=False), shape
    for way in (*winograd_fused.CANDIDATES, winograd_fp16x3_fused.CANDIDATE):
        yield from ((way, shape) for shape in (SMALL_3X3, EVEN_3X3, DILATED_3X3))
    for h in winograd_nonfused.H_AXES:
        for w in (winograd_nonfused.F23, winograd_nonfused.F45):
            yield from ((winograd_nonfused.NonfusedCandidate(h, w, 32), shape) for shape in (UNEVEN, QUADS))
    for way in winograd_fp16x3_nonfused.CANDIDATES:
        yield way, Shape((1, 9, 6, 11), 10, (1, {winograd_nonfused.F23: 3}.get(way.w, 5)), padding=(0, 0, 1, 1))


EVERY = [
    pytest.param(way, shape, EPILOGUES[number % 2], id=f"{way.name}, {shape.x}, {_name(EPILOGUES[number % 2])}")
    for number, (way, shape) in enumerate(_every())
]


@pytest.mark.usefixtures("every_arch")
@pytest.mark.parametrize(("way", "shape", "epilogue"), EVERY)
def test_every_instance(way: CudaCandidate, shape: Shape, epilogue: tuple[Activation, bool]) -> None:
    run(shape, *epilogue, way, sms=2)


def test_no_instance_is_missing() -> None:
    ran: set[str] = set()
    for way, shape in _every():
        x, w, _, dy = shape.tensors()
        problem = replace(shape.problem(Pass.FPROP, x, w, dy), activation=RELU)
        symbols = (launch.kernel.symbol for launch in plan_of(problem, way).launches)
        ran |= {symbol for symbol in symbols if symbol.endswith("_epilogue")}
    assert ran == {kernel.symbol for kernel in all_kernels() if kernel.symbol.endswith("_epilogue")}


# ---- Results in parts: each takes its part of the residual


@pytest.mark.usefixtures("every_arch")
def test_slabs_of_the_separable_chain() -> None:
    way = winograd_nonfused.NonfusedCandidate(winograd_nonfused.F43, winograd_nonfused.F45, 32)
    x, w, bias, dy = UNEVEN.tensors()
    problem = replace(UNEVEN.problem(Pass.FPROP, x, w, dy), activation=SILU, residual=True)
    plan = plan_of(problem, way, sms=2, workspace=way.least_workspace(problem))
    assert sum(bool(launch.kernel.twin) for launch in plan.launches) > 1
    check(problem, x, w, bias, dy, plan, torch.randn(problem.y_shape))


@pytest.mark.usefixtures("every_arch")
@pytest.mark.parametrize("most", [400, 100], ids=["images", "rows of an image"])
def test_launches_of_a_large_gemm(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More pixels than one launch can index: whole images per launch, or rows of one image."""
    monkeypatch.setattr(fprop_dgrad, "DIVIDEND_LIMIT", most)
    shape = Shape((5, 8, 10, 14), 12, (3, 3), padding=(1, 1, 1, 1))
    x, w, bias, dy = shape.tensors()
    problem = replace(shape.problem(Pass.FPROP, x, w, dy), activation=RELU, residual=True)
    plan = plan_of(problem, ImplicitGemmCandidate(SMALL, fprop_dgrad.TAPS))
    assert len(plan.launches) > 3
    check(problem, x, w, bias, dy, plan, torch.randn(problem.y_shape))


@pytest.mark.usefixtures("every_arch")
@pytest.mark.parametrize(
    "way", [*winograd_fused.CANDIDATES[::4], winograd_fp16x3_fused.CANDIDATE], ids=lambda way: way.name
)
def test_channels_split_between_blocks(way: winograd_fused.FusedCandidate) -> None:
    run(Shape((1, 6, 9, 33), 130, (3, 3), padding=(1, 1, 1, 1)), SILU, True, way)


@pytest.mark.usefixtures("every_arch")
def test_the_residual_may_be_the_output() -> None:
    """Every thread reads its residual before it stores: y += conv(x, w) in place."""
    for way in (
        ImplicitGemmCandidate(TALL, fprop_dgrad.TAPS),
        winograd_fused.CANDIDATES[0],
        winograd_nonfused.NonfusedCandidate(winograd_nonfused.F43, winograd_nonfused.F23, 16),
    ):
        shape = Shape((1, 8, 12, 36), 20, (3, 3), padding=(1, 1, 1, 1), bias=False)
        x, w, _, dy = shape.tensors()
        problem = replace(shape.problem(Pass.FPROP, x, w, dy), activation=RELU, residual=True)
        y = torch.randn(problem.y_shape)
        want = reference.with_epilogue(problem, x, w, None, y.clone(), "relu")
        run_plan(plan_of(problem, way), {"x": x, "w": w, "y": y, "residual": y})
        torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)


# ---- The activations themselves


def activated(activation: Activation, z: Tensor, tile: GemmTile = SLIMMER) -> Tensor:
    """One channel and a single tap of 1: the sums are the input."""
    x = z.reshape(1, 1, 1, -1)
    problem = Problem.make(Pass.FPROP, tuple(x.shape), (1, 1, 1, 1), activation=activation)  # type: ignore[arg-type]
    y = torch.full_like(x, torch.nan)
    run_plan(
        plan_of(problem, ImplicitGemmCandidate(tile, fprop_dgrad.ROWS)), {"x": x, "w": torch.ones(1, 1, 1, 1), "y": y}
    )
    return y.flatten()


SPECIAL = torch.tensor(
    [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, -1e-40, 88.0, -88.0, -89.0, -104.0, 3e38, -3e38, 1.0, -1.0]
)


@pytest.mark.usefixtures("every_arch")
def test_relu_is_exact_and_keeps_nan() -> None:
    torch.testing.assert_close(activated(RELU, SPECIAL), torch.relu(SPECIAL), rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("every_arch")
def test_silu_of_special_values() -> None:
    want = torch.nn.functional.silu(SPECIAL)
    torch.testing.assert_close(activated(SILU, SPECIAL), want, rtol=1e-6, atol=1e-36, equal_nan=True)


@pytest.mark.usefixtures("every_arch")
def test_silu_errs_by_less_than_it_says() -> None:
    """3.2e-7 |z| (common/epilogue.cuh); special functions are exact to half an ulp in the emulator, to two on a GPU."""
    z = torch.cat([torch.linspace(-100, 100, 20_000), torch.logspace(-30, 2, 2_000), -torch.logspace(-30, 2, 2_000)])
    error = (activated(SILU, z).double() - torch.nn.functional.silu(z.double())).abs()
    assert (error <= 3.2e-7 * z.double().abs() + 1e-37).all()


OTHERS = ("hardtanh(-0.5, 2)", "leaky_relu(0.2)", "hardswish", "hardsigmoid", "sigmoid", "gelu", "gelu_tanh")


@pytest.mark.usefixtures("every_arch")
@pytest.mark.parametrize("name", OTHERS)
def test_other_activations_are_as_in_torch(name: str) -> None:
    activation = Activation(name)
    wanted = activation(SPECIAL.double()).float() if name == "gelu" else activation(SPECIAL)  # torch: NaN at infinity
    torch.testing.assert_close(activated(activation, SPECIAL), wanted, rtol=2e-6, atol=1e-6, equal_nan=True)
    z = torch.cat([torch.linspace(-20, 20, 20_000), torch.logspace(-30, 1, 2_000), -torch.logspace(-30, 1, 2_000)])
    error = (activated(activation, z).double() - activation(z.double())).abs()
    limit = activation.roundings * 2.0**-24 * torch.maximum(z.double().abs(), activation(z.double()).abs())
    assert (error <= limit + 1e-37).all()


@pytest.mark.usefixtures("every_arch")
@pytest.mark.parametrize("name", OTHERS)
def test_other_activations_in_every_family(name: str) -> None:
    for way in (None, winograd_fused.CANDIDATES[0], winograd_nonfused.NonfusedCandidate(*PLAIN_AXES, 16)):
        run(SMALL_3X3, Activation(name), True, way)


@pytest.mark.usefixtures("every_arch")
def test_a_nan_in_the_residual_stays_in_its_place() -> None:
    shape = Shape((1, 8, 9, 40), 12, (3, 3), padding=(1, 1, 1, 1))
    for way in (
        ImplicitGemmCandidate(TALL, fprop_dgrad.TAPS),
        winograd_fused.CANDIDATES[0],
        winograd_nonfused.NonfusedCandidate(winograd_nonfused.F43, winograd_nonfused.F45, 16),
    ):
        x, w, bias, dy = shape.tensors()
        problem = replace(shape.problem(Pass.FPROP, x, w, dy), activation=RELU, residual=True)
        residual, y = torch.zeros(problem.y_shape), torch.zeros(problem.y_shape)
        residual[0, 7, 3, 5] = torch.nan
        assert bias is not None
        run_plan(plan_of(problem, way), {"x": x, "w": w, "bias": bias, "y": y, "residual": residual})
        assert y.isnan().nonzero().tolist() == [[0, 7, 3, 5]]


# ---- Plans


def test_a_plain_problem_is_planned_as_before() -> None:
    """Kernels with an epilogue run only for an activation or a residual, never in gradient passes."""
    plain = Problem.make(Pass.FPROP, (2, 32, 28, 28), (64, 32, 3, 3), padding=(1, 1, 1, 1), bias=True)
    wanted = replace(plain, activation=SILU, residual=True)
    assert has_epilogue(wanted)
    assert not any(launch.kernel.twin for launch in plan_cuda(plain, V100).launches)
    for kind in (Pass.DGRAD, Pass.WGRAD):
        assert not has_epilogue(wanted.for_pass(kind))
        assert plan_cuda(wanted.for_pass(kind), V100).launches == plan_cuda(plain.for_pass(kind), V100).launches


def test_an_instance_without_a_twin_says_so() -> None:
    problem = Problem.make(Pass.FPROP, (1, 8, 9, 9), (8, 8, 1, 1), activation="relu")
    lacking = [tile for tile in FPROP_DGRAD_TILES if tile.name not in fprop_dgrad.ROWS.epilogue_tiles]
    assert lacking
    for tile in lacking:
        assert "without an activation or a residual" in (
            ImplicitGemmCandidate(tile, fprop_dgrad.ROWS).refusal(problem) or ""
        )


@pytest.mark.parametrize(
    "name", ["kb50", "kb55", "kb62", "kb63", "kb80", "kb82", "kb87", "resnet50-3b", "mobilenet-dw5s2"]
)
def test_predicted_bounds_are_the_counted_ones(name: str) -> None:
    problem = replace(find(name)[0].problem(Pass.FPROP), activation=SILU, residual=True)
    plan = plan_cuda(problem, V100)
    counted = count_plan(gpu_emulator, plan, {kernel: cubin(kernel) for kernel in set(plan.kernels)}, V100)
    predicted_ms = sum(bound_us(launch, V100) for launch in plan.launches) / 1e3
    assert predicted_ms == pytest.approx(sum(one.bound_ms for one in counted), rel=0.15)


def test_an_exported_file_adds_no_residual_and_holds_no_unused_epilogue() -> None:
    model = convolution_model((1, 8, 9, 9), in_channels=8, out_channels=8, kernel_size=3)
    layer = model.layers[0]
    with pytest.raises(ExportError, match="would add a residual"):
        exported_file(replace(model, layers=(replace(layer, problem=replace(layer.problem, residual=True)),)), V100)
    text = exported_file(model, V100)
    assert "_epilogue(const __grid_constant__" not in text
    assert "kernel_with_epilogue" not in text


# ---- End to end


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=_name)
def test_on_the_virtual_gpu(epilogue: tuple[Activation, bool]) -> None:
    """From plan to results: compiler, cache, driver, machine code."""
    run_in_virtual_gpu(_on_the_virtual_gpu, *epilogue)


def _on_the_virtual_gpu(activation: Activation, with_residual: bool) -> None:
    torch.manual_seed(0)
    x, w, bias = torch.randn(2, 9, 23, 30), torch.randn(40, 9, 3, 3) / 9, torch.randn(40)
    problem = Problem.make(
        Pass.FPROP,
        (2, 9, 23, 30),
        (40, 9, 3, 3),
        padding=(1, 1, 1, 1),
        bias=True,
        activation=activation,
        residual=with_residual,
    )
    residual = torch.randn(problem.y_shape) if with_residual else None
    tensors = {"x": x, "w": w, "bias": bias, "y": torch.full(problem.y_shape, torch.nan)}
    if residual is not None:
        tensors["residual"] = residual
    with VirtualGpu() as gpu:
        gpu.backend().run(problem, tensors)
        assert gpu.launches[-1].name.endswith("_epilogue")
        assert gpu.synchronisations == 0
    want = reference.with_epilogue(problem, x, w, bias, residual, activation)
    torch.testing.assert_close(tensors["y"].double(), want, rtol=1e-4, atol=1e-4)
