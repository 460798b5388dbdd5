"""Half-precision volumes in channels_last_3d as sm_80 machine code: results, choice, counted share of the peak."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import gpu_emulator
import polyconv
from any_volume import check as check_run
from any_volume import volumes
from emulate import A100, check, cubin, plan_of
from machine_suites import explore
from nightly import NIGHTLY
from polyconv.activation import Activation
from polyconv.backend import override
from polyconv.cuda.planner import DEVICES, CudaDevice, plan_cuda
from polyconv.cuda.planner.cost import bound_us
from polyconv.cuda.planner.implicit_gemm import ndhwc
from polyconv.cuda.planner.volumes import plan_volume
from polyconv.lowering.volume import WHOLE
from polyconv.problem import HALF_DTYPES, PaddingMode, Pass, Problem, contiguous_strides
from polyconv.selection import PlanError
from polyconv.tools.inspect.emulated_cost import count_plan
from polyconv.util.gpu_arch import capability
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

SAME = (1,) * 6
DEEP = (1, 1, 0, 0, 0, 0)


def volume(
    x: tuple[int, ...], channels: int, kernel: tuple[int, ...], groups: int = 1, kind: Pass = Pass.FPROP, **more: object
) -> Problem:
    w = (channels, x[1] // groups, *kernel)
    return Problem.make(kind, x, w, groups=groups, dtype="bfloat16", **more).channels_last()  # type: ignore[arg-type]


SHAPES = {
    "two steps per tap, two volumes": volume((2, 64, 4, 5, 6), 72, (3, 3, 3), padding=SAME, bias=True),
    "four taps per step": volume((1, 8, 5, 6, 7), 8, (3, 2, 3), padding=(2, 0, 1, 1, 0, 2), dilation=(2, 1, 1)),
    "step across slices of taps": volume((2, 24, 5, 4, 5), 40, (2, 1, 1), padding=(1, 1, 0, 0, 0, 0)),
    "more than one tile of channels": volume((1, 32, 3, 4, 6), 136, (1, 1, 1), bias=True),
    "groups": volume((3, 32, 3, 4, 5), 48, (3, 3, 3), 2, padding=SAME),
    "strides": volume((2, 16, 7, 6, 9), 24, (3, 3, 3), stride=(2, 3, 2), padding=SAME, bias=True),
    "fewer steps than stages": volume((1, 8, 3, 9, 8), 16, (1, 1, 1)),
    "padding only": volume((1, 8, 2, 4, 4), 8, (3, 1, 1), padding=(4, 4, 0, 0, 0, 0)),
    "cropped": volume((1, 16, 6, 6, 6), 8, (2, 3, 1), padding=(-1, 1, -2, 2, 1, -1)),
}
LAYERS = {
    "unet": volume((1, 32, 128, 128, 128), 32, (3, 3, 3), padding=SAME),
    "64 to 64": volume((2, 64, 32, 64, 64), 64, (3, 3, 3), padding=SAME),
    "strided": volume((8, 128, 8, 28, 28), 256, (3, 3, 3), padding=SAME, stride=(2, 2, 2)),
}
COUNTED = [*(("64 to 64", kind) for kind in Pass), ("strided", Pass.DGRAD)]
RANDOM = 340 if NIGHTLY else 8


STRIDES = [(2, 2, 2), (1, 2, 3), (3, 1, 1), (2, 3, 2)]
Way = ndhwc.VolumeCandidate | ndhwc.StridedGradient


def in_pass(problem: Problem, kind: Pass) -> Problem:
    """Input gradients without strides: with them, others compute them."""
    return (
        replace(problem, stride=(1, 1, 1)).channels_last().for_pass(kind)
        if kind is Pass.DGRAD
        else replace(problem.for_pass(kind), bias=problem.bias)
    )


def with_strides(problem: Problem, stride: tuple[int, ...]) -> Problem:
    """The input gradient."""
    return replace(problem, stride=stride).channels_last().for_pass(Pass.DGRAD)


def ways(kind: Pass, strided: bool = False) -> list[Way]:
    """Every tile in both formats; except nightly, in one of them."""
    of_dtype: dict[str, tuple[Way, ...]] = {
        dtype: (*(ndhwc.STRIDED if strided else ndhwc.WGRAD if kind is Pass.WGRAD else ndhwc.FPROP_DGRAD)[dtype],)
        for dtype in HALF_DTYPES
    }
    every = [way for dtype in HALF_DTYPES for way in of_dtype[dtype]]
    half = len(every) // 2
    return every if NIGHTLY else [every[i + half * (i % 2)] for i in range(half)]


def run(problem: Problem, way: Way, sms: int = 4) -> None:
    problem = replace(problem, dtype=way.kernel.dtype)
    dtype = getattr(torch, problem.dtype)

    def randn(shape: tuple[int, ...], strides: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype).copy_(scale * torch.randn(shape))

    x, dy = randn(problem.x_shape, problem.x_strides), randn(problem.y_shape, problem.y_strides)
    w = randn(problem.w_shape, problem.w_strides, torch.Size(problem.w_shape[1:]).numel() ** -0.5)
    bias = torch.randn(problem.out_channels).to(dtype) if problem.bias else None
    residual = randn(problem.y_shape, problem.y_strides) if problem.residual else None
    check(problem, x, w, bias, dy, plan_of(problem, way, sms=sms, workspace=2**22), residual)


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES)
def test_every_tile(problem: Problem, kind: Pass) -> None:
    for way in ways(kind):
        run(in_pass(problem, kind), way)


@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES)
def test_every_tile_of_gradients_with_strides(problem: Problem) -> None:
    """Classes without a tap, slices whose rows fill no step, volumes that have more slices of one class than others."""
    for way, stride in zip(ways(Pass.DGRAD, True), STRIDES, strict=True) if not NIGHTLY else STRIDED:
        run(with_strides(problem, stride), way)


@pytest.mark.parametrize("strided", [False, True], ids=["", "strided"])
@pytest.mark.parametrize("kind", Pass, ids=str)
def test_random(kind: Pass, strided: bool) -> None:
    """Contiguous weights and channels_last ones; weight gradients in one slice, and in many."""
    if strided and kind is not Pass.DGRAD:
        return  # drawn with strides in any case
    cases = cycle((way, sms) for way in ways(kind, strided) for sms in (1, 4))
    drawn: set[Problem] = set()

    def run_one(problem: Problem) -> None:
        drawn.add(problem)
        run(problem, *next(cases))

    def wide(problem: Problem, outputs: int, last: bool) -> Problem:
        found = replace(
            problem,
            in_channels=8 * problem.in_channels,
            out_channels=outputs * problem.out_channels,
            padding_mode=PaddingMode.ZEROS,
            residual=problem.residual and kind is Pass.FPROP,
        )
        stride = found.stride if max(found.stride) > 1 else (2, 1, 2)
        found = with_strides(found, stride) if strided else in_pass(found.channels_last(), kind)
        return found if last else replace(found, w_strides=contiguous_strides(found.w_shape))

    explore(
        st.builds(wide, volumes(), st.sampled_from([8, 8, 24]), st.booleans()),
        run_one,
        part=37,
        each=RANDOM,
    )
    assert len(drawn) >= (200 if NIGHTLY else 7)


STRIDED = [*product(ways(Pass.DGRAD, True), STRIDES)]


@pytest.mark.parametrize("activation", [Activation.NONE, Activation.SILU], ids=str)
@pytest.mark.parametrize("way", ways(Pass.FPROP), ids=lambda way: way.name)
def test_the_epilogue_rounds_once(way: ndhwc.VolumeCandidate, activation: Activation) -> None:
    run(replace(SHAPES["two steps per tap, two volumes"], residual=True, activation=activation), way)


SMALL = volume((2, 16, 4, 6, 7), 24, (3, 3, 3), padding=SAME, bias=True)
ON_AN_A100 = {"FAKE_CUDA_DEVICES": "a100", "POLYCONV_STRICT": "off", "POLYCONV_TUNING_FILE": "off"}
PLAIN = LAYERS["64 to 64"]


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (volume((1, 12, 8, 8, 8), 8, (3, 3, 3)), "channels per group are not multiples of 8"),
        (replace(PLAIN, vector_aligned=False), "aligned to 16 bytes"),
        (replace(PLAIN.contiguous(), batch=1), "channels are not adjacent"),
        (PLAIN.contiguous(), "do not follow one another"),
        (replace(PLAIN, padding_mode=PaddingMode.REFLECT), "cannot read a reflect border"),
        (volume((1, 8, 4, 8, 8), 8, (1, 3, 3), padding=DEEP, padding_mode="reflect"), "cannot read a reflect border"),
        (replace(PLAIN, w_strides=(1728, 27, 1, 9, 3)), "the slices of the weight do not follow one another"),
        (replace(PLAIN, x_strides=(1, 1, *PLAIN.x_strides[2:])), "not aligned to 16 bytes"),
        (replace(PLAIN, batch=2**14).channels_last(), "too many pixels for one launch"),
    ],
)
def test_refuses(problem: Problem, reason: str) -> None:
    assert reason in (next(ndhwc.candidates(problem)).refusal(problem) or "")
    with pytest.raises(PlanError, match=reason):
        plan_cuda(problem, A100)


STRIDED_PLAIN = LAYERS["strided"].for_pass(Pass.DGRAD)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (PLAIN.for_pass(Pass.DGRAD), "only for input gradients with strides"),
        (
            volume(
                (1, 8, 4, 8, 8), 8, (3, 1, 1), kind=Pass.DGRAD, stride=(2, 1, 1), padding=DEEP, padding_mode="reflect"
            ),
            "cannot read a reflect border",
        ),
        (volume((1, 12, 8, 8, 8), 8, (3, 3, 3), stride=(2, 2, 2), kind=Pass.DGRAD), "not multiples of 8"),
        (replace(STRIDED_PLAIN, vector_aligned=False), "aligned to 16 bytes"),
        (STRIDED_PLAIN.contiguous(), "channels are not adjacent"),
        (replace(STRIDED_PLAIN, x_strides=(1, 1, *STRIDED_PLAIN.x_strides[2:])), "volumes are not aligned"),
        (replace(STRIDED_PLAIN, x_strides=(802816, 1, 4, *STRIDED_PLAIN.x_strides[3:])), "volumes are not aligned"),
        (replace(STRIDED_PLAIN, batch=2**22).channels_last(), "too many pixels for one launch"),
        (with_strides(PLAIN, (8, 8, 8)), "phases"),
        (replace(with_strides(PLAIN, (3, 2, 2)), batch=64).channels_last(), "phases"),
    ],
)
def test_strided_gradients_refuse(problem: Problem, reason: str) -> None:
    assert reason in (ndhwc.STRIDED["bfloat16"][0].refusal(problem) or "")


def test_strided_gradients_have_a_launch_per_class() -> None:
    """Of depth, and per number of taps of a row; and one per slice of the kernel, which packs it. Where the number of
    slices is no multiple of the stride, a launch serves one volume."""
    way = ndhwc.STRIDED["bfloat16"][0]

    def launches(problem: Problem) -> list[str]:
        return [one.kernel.symbol for one in way.schedule(problem, A100.sms, 2**26).launches]

    assert sum("pack" in name for name in launches(STRIDED_PLAIN)) == 3
    assert sum("pack" not in name for name in launches(STRIDED_PLAIN)) == 4
    odd = replace(STRIDED_PLAIN, in_size=(7, 28, 28)).channels_last()
    assert sum("pack" not in name for name in launches(odd)) == 4 * odd.batch
    tasks = way.tasks(odd, A100.sms, 2**26)
    assert [task.kernel.symbol for task in tasks] == launches(odd)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_is_chosen_where_it_runs(device: CudaDevice) -> None:
    """Without a copy; contiguous volumes and float32 have other plans."""
    for kind, problem in product(Pass, LAYERS.values()):
        problem = problem.for_pass(kind)
        plan = plan_volume(problem, device)
        assert (plan.choice == WHOLE) is (capability(device.arch) >= 80)
        if plan.choice == WHOLE:
            assert plan.parts.extra_traffic == (0, 0)
            assert "1 problem over depth, height, width" in plan.explain()
        assert plan_volume(problem.contiguous(), device).choice != WHOLE
        assert plan_volume(replace(problem, dtype="float32"), device).choice != WHOLE


@pytest.mark.parametrize("problem", [*(in_pass(SMALL, kind) for kind in Pass), with_strides(SMALL, (2, 2, 2))], ids=str)
def test_runs(problem: Problem) -> None:
    run_in_virtual_gpu(_runs, problem, environment=ON_AN_A100)


def _runs(problem: Problem) -> None:
    torch.manual_seed(0)
    with VirtualGpu() as gpu:
        backend = gpu.backend()
        check_run(problem, lambda problem: backend.prepare(backend.plan(problem)))
        assert any("_ndhwc_" in launch.name for launch in gpu.launches)


@pytest.mark.parametrize(
    ("function", "faults"), [("cuLibraryLoadData", 4), ("cuLaunchKernel", 2)], ids=["when loaded", "when launched"]
)
def test_is_lowered_when_its_kernels_fail(function: str, faults: int) -> None:
    """The first packs the weights. No tile can be loaded; or one tile, then the packing, is not launched."""
    run_in_virtual_gpu(_is_lowered, function, faults, environment=ON_AN_A100)


def _is_lowered(function: str, faults: int) -> None:
    torch.manual_seed(0)
    with VirtualGpu() as gpu, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = gpu.backend()
        gpu.fail(function, 2, faults, 4321)
        check_run(SMALL, lambda problem: backend.prepare(backend.plan(problem)))
        assert gpu.repair() == len(caught) == len(backend.description.refused) == faults
        assert backend.plan(SMALL).choice != WHOLE


def test_a_module_trains_and_keeps_frozen_weights() -> None:
    run_in_virtual_gpu(_module, environment=ON_AN_A100)


def _module() -> None:
    torch.manual_seed(0)
    conv = polyconv.Conv3d(16, 24, 3, padding=1).bfloat16()
    x = torch.randn(2, 16, 4, 6, 7).bfloat16().to(memory_format=torch.channels_last_3d).requires_grad_()
    with VirtualGpu() as gpu, override("cpu", gpu.backend()):

        def launched() -> list[str]:
            gpu.launches.clear()
            exact = F.conv3d(x.double(), conv.weight.double(), conv.bias.double(), padding=1)
            y = conv(x)
            torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
            if y.requires_grad:
                dy = torch.randn_like(y)
                ours, theirs = (torch.autograd.grad(z, [x, conv.weight], dy.to(z.dtype)) for z in (y, exact))
                for one, other in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(one.double(), other.double(), rtol=2e-2, atol=2e-2 * float(other.std()))
            return [one.name for one in gpu.launches]

        names = launched()
        assert sum("_ndhwc_" in name for name in names) == 3
        assert sum("pack" in name for name in names) == 2
        polyconv.freeze(conv)
        with torch.no_grad():
            first = launched()
            assert ["pack" in name for name in first] == [True, False]
            assert launched() == first[1:]
            conv.weight.mul_(-0.5)
            assert launched() == first
            assert launched() == first[1:]


@pytest.mark.parametrize(("name", "kind"), COUNTED, ids=str)
def test_counted_share_of_the_tensor_peak(name: str, kind: Pass) -> None:
    """At least 60 % on an A100; the model agrees with the count within 25 %."""
    plan = plan_cuda(LAYERS[name].for_pass(kind), A100)
    every = count_plan(gpu_emulator, plan, {kernel: cubin(kernel) for kernel in set(plan.kernels)}, A100)
    pairs = [pair for pair in zip(plan.launches, every, strict=True) if "_ndhwc_" in pair[0].kernel.symbol]
    us, counted_ms = sum(bound_us(one, A100) for one, _ in pairs), sum(counted.bound_ms for _, counted in pairs)
    peak_ms = LAYERS[name].multiplications / (A100.products_per_clock("bfloat16") * A100.sms * A100.clock_mhz) / 1e3
    assert us / 1e3 == pytest.approx(counted_ms, rel=0.25)
    assert peak_ms >= 0.6 * counted_ms
