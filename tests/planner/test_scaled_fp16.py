"""float32 tensors by one scaled FP16 product, as sm_80 machine code: results against float64, TF32's error, choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product
from math import prod
from types import ModuleType

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import gpu_emulator
from emulate import A100, NAN, check, cubin, plan_of, run_plan
from machine_suites import Shape, explore, zero_bordered
from nightly import NIGHTLY, sampled
from polyconv.activation import Activation
from polyconv.cuda.planner import DEVICES, CudaDevice, plan_cuda
from polyconv.cuda.planner.aten import AtenPlan, chosen
from polyconv.cuda.planner.candidate import CudaCandidate
from polyconv.cuda.planner.cost import bound_us, cold
from polyconv.cuda.planner.scaled_fp16 import fprop_dgrad, halo, halo_wgrad, wgrad
from polyconv.measure.workloads import find
from polyconv.numerics.prediction import torch_error, with_numeric_tolerance
from polyconv.problem import TF32, TORCH_FLOAT32, TORCH_TOLERANCE, Pass, Problem
from polyconv.tools.inspect.emulated_cost import Counted, count_plan
from polyconv.util.gpu_arch import capability

LAST = "channels_last"
SHAPES = {
    "two steps per tap, ragged pixels": Shape((2, 64, 9, 7), 72, (3, 3), padding=(1, 1, 1, 1)),
    "dense quads of pixels": Shape((3, 24, 8, 10), 40, (3, 3), padding=(1, 1, 1, 1)),
    "channels_last": Shape((2, 40, 6, 7), 24, (3, 2), padding=(1, 1, 0, 1), layout=LAST),
    "dilated, stride two": Shape((1, 16, 13, 11), 24, (3, 2), (2, 1), (1, 2, 0, 1), (1, 2)),
    "groups": Shape((3, 32, 5, 6), 48, (3, 3), padding=(1, 1, 1, 1), groups=2),
    "stride two": Shape((2, 16, 11, 9), 24, (3, 3), (2, 2), (1, 1, 1, 1), layout=LAST),
    "more than one tile of channels": Shape((1, 72, 5, 6), 136, (1, 1), bias=False),
    "padding only": Shape((1, 8, 4, 4), 8, (3, 3), padding=(5, 5, 0, 0)),
    "windows of larger tensors": Shape((1, 8, 9, 9), 8, (3, 3), padding=(1, 1, 1, 1), layout="sliced"),
    "gradient of a sum": Shape((2, 8, 9, 9), 8, (3, 3), padding=(1, 1, 1, 1), layout="expanded"),
    "image channels": Shape((2, 3, 11, 12), 20, (3, 3), padding=(1, 1, 1, 1)),
    "ragged groups": Shape((2, 24, 5, 6), 36, (3, 3), groups=2, layout=LAST),
}
RANDOM = 200 if NIGHTLY else 8


WAYS = [(wgrad, Pass.WGRAD), (halo_wgrad, Pass.WGRAD), *product((fprop_dgrad, halo), (Pass.FPROP, Pass.DGRAD))]
"""Families, and their passes."""


def ways(kind: Pass) -> tuple[CudaCandidate, ...]:
    return wgrad.CANDIDATES if kind is Pass.WGRAD else fprop_dgrad.CANDIDATES


def family(one: object) -> str:
    return str(getattr(one, "__name__", one)).rpartition(".")[2]


def in_tf32(problem: Problem) -> Problem:
    return with_numeric_tolerance(replace(problem, tolerance=TORCH_TOLERANCE), has_tf32=True)


def run(shape: Shape, kind: Pass, way: CudaCandidate, sms: int = 4, workspace: int = 2**22) -> bool:
    x, w, bias, dy = shape.tensors()
    problem, x = shape.lowered(kind, x, w, dy)
    problem = in_tf32(problem)
    if way.refusal(problem) is not None:
        return False
    plan = plan_of(problem, way, sms=sms, workspace=workspace)
    # TF32's prediction counts a bias as one more product, which shows in sums of 16
    assert plan.expected_error <= problem.tolerance * (1.01 if bias is not None else 1)
    check(problem, x, w, bias, dy, plan)
    return True


@pytest.mark.parametrize(("of", "kind"), WAYS, ids=family)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_tile(shape: Shape, of: ModuleType, kind: Pass) -> None:
    every = of.CANDIDATES
    for way in every if NIGHTLY else every[:: max(1, len(every) - 1)]:
        run(shape, kind, way)


@pytest.mark.parametrize(("of", "kind"), WAYS, ids=family)
def test_random(of: ModuleType, kind: Pass) -> None:
    """Any channels forward; weight gradients of whole chunks, or in place of even channels, in one slice and in many.
    With the source in place, input gradients have no strides, and sums of several parts are scaled anew."""
    whole, any_number = [8, 8, 16, 24, 40, 64], [1, 3, 8, 16, 20, 40, 64]
    channels, outputs = (st.sampled_from(whole if of is wgrad else any_number),) * 2
    if of is halo_wgrad:
        channels = st.sampled_from([2, 6, 8, 16, 20, 40, 64])
    cases = cycle((way, sms) for way in of.CANDIDATES for sms in (1, 4))
    strides = ((1,), (1,)) if of is halo and kind is Pass.DGRAD else ((1, 1, 1, 2, 3), (1, 1, 1, 2, 4))
    number = RANDOM * (len(halo.CANDIDATES) if of is halo else 1)
    ran = 0

    def one(shape: Shape) -> None:
        nonlocal ran
        ran += run(shape, kind, *next(cases))

    explore(zero_bordered(channels, outputs, (5, 5), strides), one, part=32, each=number + number // 4)
    assert ran >= number


@pytest.mark.parametrize("layout", ["contiguous", LAST])
@pytest.mark.parametrize("kind", Pass, ids=str)
def test_slabs_of_images(kind: Pass, layout: str) -> None:
    """A workspace of a few images: the result is the same."""
    shape = Shape((7, 16, 12, 10), 24, (3, 3), padding=(1, 1, 1, 1), layout=layout)
    way = ways(kind)[0]
    problem = in_tf32(shape.problem(kind, *(shape.tensors()[i] for i in (0, 1, 3))))
    if isinstance(way, fprop_dgrad.ScaledCandidate):
        small = way._before(problem, 4) + 3 * way._source(problem, 4).image_bytes
    else:
        small = 2**17
    launches = [launch.kernel.symbol for launch in way.schedule(problem, 4, small).launches]
    assert sum("convert" in symbol for symbol in launches) > 2
    run(shape, kind, way, workspace=small)


@pytest.mark.parametrize("layout", ["contiguous", LAST])
@pytest.mark.parametrize("way", [*fprop_dgrad.CANDIDATES, *halo.CANDIDATES], ids=lambda way: way.name)
def test_epilogue(way: fprop_dgrad.ScaledCandidate, layout: str) -> None:
    shape = Shape((1, 16, 9, 12), 24, (3, 3), padding=(1, 1, 1, 1), layout=layout)
    x, w, bias, dy = shape.tensors()
    problem = replace(shape.problem(Pass.FPROP, x, w, dy), residual=True, activation=Activation.SILU)
    problem = in_tf32(problem)
    check(problem, x, w, bias, dy, plan_of(problem, way), residual=torch.randn_like(dy))


# ---- The error is TF32's

CHANNELS = 32


def _heavy_tailed(*size: int) -> Tensor:
    return torch.distributions.StudentT(3.0).sample(size)


def _one_channel_louder(*size: int) -> Tensor:
    x = torch.randn(size)
    x[:, 0] *= 100
    return x


DATA: dict[str, Callable[..., Tensor]] = {
    "normal": torch.randn,
    "ReLU": lambda *size: torch.randn(size).relu(),
    "uniform": torch.rand,
    "heavy-tailed": _heavy_tailed,
    "one channel a hundred times louder": _one_channel_louder,
    "lognormal": lambda *size: (2 * torch.randn(size)).exp(),
    "at the upper end of float32": lambda *size: torch.rand(size) * 2.0**120,
    "at the lower end of float32": lambda *size: torch.randn(size) * 2.0**-118,
}


def to_tf32(values: Tensor) -> Tensor:
    """float64 values rounded to the 11 significant bits of TF32, ties to even."""
    mantissa, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.round(mantissa * 2**11), exponent - 11)


def computed(problem: Problem, way: CudaCandidate, tensors: dict[str, Tensor]) -> Tensor:
    name, shape = {Pass.FPROP: ("y", problem.y_shape), Pass.DGRAD: ("x", problem.x_shape)}.get(
        problem.kind, ("dw", problem.w_shape)
    )
    result = torch.full(shape, NAN)
    run_plan(plan_of(problem, way), {**tensors, name: result})
    return result.double()


@pytest.mark.parametrize(("of", "kind"), WAYS, ids=family)
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_error_is_that_of_tf32(data: Callable[..., Tensor], of: ModuleType, kind: Pass) -> None:
    """Operands at either end of float32, beside weights that bring the result back, lose nothing more."""
    torch.manual_seed(7)
    x, w = data(1, CHANNELS, 8, 9), torch.randn(16, CHANNELS, 3, 3)
    dy = data(1, 16, 6, 7) if kind is Pass.DGRAD else torch.randn(1, 16, 6, 7)
    loudest = float((dy if kind is Pass.DGRAD else x).abs().max())
    back = 2.0**-100 if loudest > 2.0**100 else 2.0**90 if loudest < 2.0**-90 else 1.0
    w, dy = w * back, dy if kind is Pass.DGRAD else dy * back
    problem = in_tf32(Problem.make(kind, tuple(x.shape), tuple(w.shape)))

    def exact(a: Tensor, b: Tensor) -> Tensor:
        a, b = a.double(), b.double()
        if kind is Pass.FPROP:
            return torch.nn.functional.conv2d(a, b)
        if kind is Pass.DGRAD:
            return torch.nn.grad.conv2d_input(x.shape, b, a)  # type: ignore[no-any-return]
        return torch.nn.grad.conv2d_weight(a, w.shape, b)  # type: ignore[no-any-return]

    operands = {Pass.FPROP: (x, w), Pass.DGRAD: (dy, w), Pass.WGRAD: (x, dy)}[kind]
    want = exact(*operands)
    tf32 = (exact(*map(to_tf32, operands)) - want).square().mean().sqrt()
    names = {Pass.FPROP: ("x", "w"), Pass.DGRAD: ("y", "w"), Pass.WGRAD: ("x", "y")}[kind]
    got = computed(problem, of.CANDIDATES[0], dict(zip(names, operands, strict=True)))
    ours = (got - want).square().mean().sqrt()
    assert 0.8 * tf32 <= ours <= 1.1 * tf32


@pytest.mark.parametrize("way", [fprop_dgrad.CANDIDATES[-1], halo.CANDIDATES[0]], ids=lambda way: way.name)
def test_infinities_and_nans_stay_where_they_are_read(way: CudaCandidate) -> None:
    x, w = torch.randn(1, 8, 6, 20), torch.randn(8, 8, 3, 3)
    x[0, 2, 3, 4], x[0, 5, 2, 15] = torch.inf, torch.nan
    problem = in_tf32(Problem.make(Pass.FPROP, tuple(x.shape), tuple(w.shape), padding=(1, 1, 1, 1)))
    got = computed(problem, way, {"x": x, "w": w})
    want = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    assert torch.equal(got.isfinite(), want.isfinite())
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[got.isinf()], want[want.isinf()])


@pytest.mark.parametrize("way", [fprop_dgrad.CANDIDATES[0], halo.CANDIDATES[0]], ids=lambda way: way.name)
def test_an_operand_of_zeros(way: CudaCandidate) -> None:
    x, w = torch.zeros(1, 8, 6, 6), torch.randn(8, 8, 3, 3)
    problem = in_tf32(Problem.make(Pass.FPROP, tuple(x.shape), tuple(w.shape)))
    assert not computed(problem, way, {"x": x, "w": w}).any()


@pytest.mark.parametrize("operand", ["x", "y"])
def test_rectangles_of_pixels_have_scales_of_their_own(operand: str) -> None:
    """In a weight gradient of two slices, each image is a thousand times louder than the one before: the sums, those of
    the bias too, are scaled down."""
    tensors = {"x": torch.randn(6, 8, 6, 7), "y": torch.randn(6, 8, 6, 7)}
    tensors[operand] *= 1000.0 ** torch.arange(6)[:, None, None, None]
    problem = in_tf32(Problem.make(Pass.WGRAD, (6, 8, 6, 7), (8, 8, 3, 3), padding=(1, 1, 1, 1), bias=True))
    x, dy = tensors["x"].double(), tensors["y"].double()
    wanted = torch.nn.grad.conv2d_weight(x, (8, 8, 3, 3), dy, padding=1), dy.sum((0, 2, 3))
    results = {"dw": torch.full((8, 8, 3, 3), NAN), "db": torch.full((8,), NAN)}
    run_plan(plan_of(problem, halo_wgrad.CANDIDATES[0], sms=1), {**tensors, **results})
    for got, want in zip(results.values(), wanted, strict=True):
        assert (got - want).abs().max() <= 4e-3 * want.std()


def test_parts_of_the_channels_have_scales_of_their_own() -> None:
    """Each part of 32 channels is a thousand times louder than the one before: the sums are scaled down twice."""
    x, w = torch.randn(1, 96, 6, 7), torch.randn(8, 96, 3, 3)
    x *= 1000.0 ** (torch.arange(96) // 32)[:, None, None]
    w *= 1000.0 ** -(torch.arange(96) // 32)[:, None, None]
    problem = in_tf32(Problem.make(Pass.FPROP, tuple(x.shape), tuple(w.shape)))
    want = torch.nn.functional.conv2d(x.double(), w.double())
    got = computed(problem, halo.CANDIDATES[0], {"x": x, "w": w})
    assert (got - want).abs().max() <= 4e-3 * want.std()


# ---- The choice


def layer(kind: Pass = Pass.FPROP, tolerance: float = TORCH_TOLERANCE, **more: object) -> Problem:
    shapes = (32, 256, 14, 14), (256, 256, 3, 3)
    return Problem.make(kind, *shapes, padding=(1, 1, 1, 1), tolerance=tolerance, **more)  # type: ignore[arg-type]


def is_scaled(plan: object) -> bool:
    return any(kernel.symbol.startswith("scaled_fp16") for kernel in getattr(plan, "kernels", ()))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_runs_at_the_error_of_torch_alone(device: CudaDevice) -> None:
    """At PyTorch's error where that is TF32's, and at no tolerance that float32 keeps."""
    for kind in Pass:
        for last in (False, True):
            one, exact, default = layer(kind), layer(kind, TORCH_FLOAT32), layer(kind, 1e-4)
            if last:
                one, exact, default = one.channels_last(), exact.channels_last(), default.channels_last()
            assert not is_scaled(plan_cuda(exact, device))
            assert not is_scaled(plan_cuda(default, device))
            assert is_scaled(plan_cuda(one, device)) is (capability(device.arch) >= 80)


def test_the_error_of_torch_is_a_number_in_plans() -> None:
    v100, problem = DEVICES["v100"], layer()
    assert plan_cuda(problem, A100).problem.tolerance == torch_error(problem, tf32=True) < 1e-2
    assert plan_cuda(problem, v100).problem.tolerance == torch_error(problem, tf32=False) < 1e-4


def test_policy_weighs_it_against_pytorch() -> None:
    """Of a layer that is left to PyTorch at the default tolerance, polyconv's plan runs at TF32's."""
    default = replace(layer(tolerance=1e-4), torch_format=TF32)
    assert isinstance(chosen(default, A100), AtenPlan)
    assert is_scaled(chosen(replace(default, tolerance=TORCH_TOLERANCE), A100))


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (layer(padding_mode="reflect"), "cannot read a reflect border"),
        (replace(layer(), batch=2**31 // (256 * 14 * 14) + 1), "2^31 elements or more"),
    ],
)
def test_refuses(problem: Problem, reason: str) -> None:
    for of, kind in WAYS:
        way = of.CANDIDATES[0]
        if of in (halo, halo_wgrad) and problem.batch > 32:
            continue  # their limit is that of pixels, below
        assert reason in (way.refusal(replace(problem, kind=kind)) or "")
    small = Problem.make(Pass.FPROP, (20_000_000, 8, 4, 4), (8, 8, 3, 3), padding=(1, 1, 1, 1))  # tiles of 16 pixels
    assert halo.CANDIDATES[0].refusal(small) == "too many pixels for one launch"
    many = replace(small, kind=Pass.WGRAD, batch=2**29)
    assert halo_wgrad.CANDIDATES[0].refusal(many) == "too many pixels for one launch"
    odd = Problem.make(Pass.WGRAD, (1, 3, 9, 9), (16, 3, 3, 3))
    assert halo_wgrad.CANDIDATES[0].refusal(odd) == "an odd number of channels per group"
    ragged = Problem.make(Pass.WGRAD, (1, 12, 9, 9), (16, 12, 3, 3))
    assert "multiples of 8" in (ways(Pass.WGRAD)[0].refusal(ragged) or "")


def test_a_workspace_without_room_for_an_image() -> None:
    """The operands are then read in place."""
    for kind in Pass:
        names = {kernel.stem for kernel in plan_cuda(layer(kind), A100, workspace=2**12).kernels}
        assert "scaled_fp16/halo" + "_wgrad" * (kind is Pass.WGRAD) in names
        assert not names & {"scaled_fp16/fprop_dgrad", "implicit_gemm/wgrad_nhwc"}


def tf32_us(problem: Problem, device: CudaDevice) -> float:
    """Time of TF32 arithmetic at 65 % of its peak, or of x and y at 85 % of the bandwidth, and of a launch."""
    rate = device.products_per_clock("float16") / 2 * device.sms * device.clock_mhz
    moved = 4 * (prod(problem.x_shape) + prod(problem.y_shape)) / (device.dram_gbs * 1e3)
    return max(problem.multiplications / rate / 0.65, moved / 0.85) + 3


@pytest.mark.parametrize("layout", ["contiguous", LAST])
@pytest.mark.parametrize("device", ["a100", "rtx4090"])
@pytest.mark.parametrize("name", ["resnet50-2b", "resnet50-3b", "resnet50-4b", "unet-enc1", "vgg-conv1_2"])
def test_modelled_ahead_of_tf32(name: str, device: str, layout: str) -> None:
    """With the weights packed at every call; where there are few channels, with the source read in place, and in weight
    gradients with both operands."""
    for kind in Pass:
        problem = replace(find(name)[0].problem(kind), tolerance=TORCH_TOLERANCE)
        plan = plan_cuda(problem.channels_last() if layout == LAST else problem, DEVICES[device])
        assert plan.cost_us < tf32_us(problem, DEVICES[device])
        in_place = {"scaled_fp16/halo", "scaled_fp16/halo_wgrad"} & {kernel.stem for kernel in plan.kernels}
        assert in_place or (problem.in_channels > 64 and kind is not Pass.WGRAD)


def counted(problem: Problem, layout: str) -> list[Counted]:
    """The launches of a plan for an A100, as counted. The model of all agrees with the count within 15 %."""
    plan = plan_cuda(problem.channels_last() if layout == LAST else problem, A100)
    every = count_plan(gpu_emulator, plan, {kernel: cubin(kernel) for kernel in set(plan.kernels)}, A100)
    counted_us = 1e3 * sum(one.bound_ms for one in every)
    assert sum(bound_us(cold(launch), A100) for launch in plan.launches) == pytest.approx(counted_us, rel=0.15)
    return every


@pytest.mark.parametrize(
    ("kind", "layout"), sampled(product([Pass.FPROP, Pass.DGRAD], ("contiguous", LAST)), 1, "in place")
)
def test_counted_with_the_source_in_place(kind: Pass, layout: str) -> None:
    """On an A100: x and y are moved once, and L1 and tensor cores take no longer than 1.1 times that."""
    problem = replace(find("resnet50-2b")[0].problem(kind), tolerance=TORCH_TOLERANCE)
    every = counted(problem, layout)
    moved_us = 4 * (prod(problem.x_shape) + prod(problem.y_shape)) / (A100.dram_gbs * 1e3)
    assert 1e3 * every[-1].bound_ms <= 1.1 * moved_us


@pytest.mark.parametrize("layout", sampled(["contiguous", LAST], 1, "both in place"))
def test_counted_with_both_operands_in_place(layout: str) -> None:
    """On an A100: x, dy and the slices' sums are moved once, and L1 and tensor cores take no longer."""
    problem = replace(find("resnet50-2b")[0].problem(Pass.WGRAD), tolerance=TORCH_TOLERANCE)
    multiply, _ = counted(problem, layout)
    sums = 4 * 100 * prod(problem.w_shape)
    moved_us = (4 * (prod(problem.x_shape) + prod(problem.y_shape)) + sums) / (A100.dram_gbs * 1e3)
    assert 1e3 * multiply.bound_ms <= 1.05 * moved_us


@pytest.mark.parametrize(("kind", "layout"), sampled(product(Pass, ("contiguous", LAST)), 1, "shares"), ids=str)
def test_counted_share_of_the_tensor_peak(kind: Pass, layout: str) -> None:
    """The GEMM reaches 60 % or more on an A100; the model of all launches agrees with the count within 15 %."""
    problem = replace(find("resnet50-4b")[0].problem(kind), tolerance=TORCH_TOLERANCE)
    every = counted(problem, layout)
    gemm_ms = max(one.bound_ms for one in every)
    peak_ms = prod(problem.y_shape) * prod(problem.w_shape[1:]) / A100.products_per_clock("float16")
    assert peak_ms / (A100.sms * A100.clock_mhz) / 1e3 >= 0.6 * gemm_ms
