"""float32 volumes by one scaled FP16 product, as sm_80 machine code: results against float64, choice, counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from hypothesis import strategies as st

import gpu_emulator
from any_volume import volumes
from emulate import A100, V100, check, cubin, plan_of
from machine_suites import explore
from nightly import NIGHTLY, sampled
from polyconv.activation import Activation
from polyconv.cuda.planner import plan_cuda
from polyconv.cuda.planner.cost import bound_us, cold
from polyconv.cuda.planner.scaled_fp16 import halo_volume
from polyconv.cuda.planner.volumes import plan_volume
from polyconv.lowering.volume import WHOLE
from polyconv.numerics.prediction import with_numeric_tolerance
from polyconv.problem import TORCH_TOLERANCE, PaddingMode, Pass, Problem, contiguous_strides
from polyconv.selection import PlanError
from polyconv.tools.inspect.emulated_cost import count_plan
from virtual_gpu import run_in_virtual_gpu
from virtual_gpu.gpu import VirtualGpu

SAME = (1,) * 6
PASSES = (Pass.FPROP, Pass.DGRAD)
RANDOM = 340 if NIGHTLY else 8


def volume(x: tuple[int, ...], channels: int, kernel: tuple[int, ...], groups: int = 1, **more: object) -> Problem:
    w = (channels, x[1] // groups, *kernel)
    return Problem.make(Pass.FPROP, x, w, groups=groups, **more)  # type: ignore[arg-type]


SHAPES = {
    "two parts of the channels, two volumes": volume((2, 40, 4, 5, 6), 72, (3, 3, 3), padding=SAME, bias=True),
    "dilated": volume((1, 3, 7, 6, 7), 8, (3, 2, 3), padding=(2, 0, 1, 1, 0, 2), dilation=(2, 1, 1)),
    "more than one tile of channels": volume((1, 32, 3, 4, 6), 136, (2, 1, 1), bias=True),
    "groups": volume((3, 32, 3, 4, 5), 48, (3, 3, 3), 2, padding=SAME),
    "strides": volume((2, 16, 7, 6, 9), 24, (3, 3, 3), stride=(2, 3, 2), padding=SAME, bias=True),
    "padding only": volume((1, 8, 2, 4, 4), 8, (3, 1, 1), padding=(4, 4, 0, 0, 0, 0)),
    "cropped": volume((1, 16, 6, 6, 6), 8, (2, 3, 1), padding=(-1, 1, -2, 2, 1, -1)),
}
LAYER = volume((2, 64, 32, 64, 64), 64, (3, 3, 3), padding=SAME, tolerance=TORCH_TOLERANCE)
LAYERS = {
    "64 to 64": LAYER,
    "r3d_18, layer 1": volume((8, 64, 8, 56, 56), 64, (3, 3, 3), padding=SAME, tolerance=TORCH_TOLERANCE),
    "3-D U-Net, first level": volume((1, 32, 128, 128, 128), 32, (3, 3, 3), padding=SAME, tolerance=TORCH_TOLERANCE),
}


def in_pass(problem: Problem, kind: Pass) -> Problem:
    """Input gradients have no strides."""
    if kind is Pass.FPROP:
        return problem
    last = problem.x_strides[1] == 1
    found = replace(problem, stride=(1, 1, 1))
    return (found.channels_last() if last else found.contiguous()).for_pass(kind)


def run(problem: Problem, way: halo_volume.HaloVolumeCandidate, sms: int = 4) -> None:
    problem = with_numeric_tolerance(replace(problem, tolerance=TORCH_TOLERANCE), has_tf32=True)

    def randn(shape: tuple[int, ...], strides: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        return torch.empty_strided(shape, strides).copy_(scale * torch.randn(shape))

    x, dy = randn(problem.x_shape, problem.x_strides), randn(problem.y_shape, problem.y_strides)
    w = randn(problem.w_shape, problem.w_strides, torch.Size(problem.w_shape[1:]).numel() ** -0.5)
    bias = torch.randn(problem.out_channels) if problem.bias else None
    residual = randn(problem.y_shape, problem.y_strides) if problem.residual else None
    plan = plan_of(problem, way, sms=sms, workspace=2**22)
    assert plan.expected_error <= problem.tolerance
    check(problem, x, w, bias, dy, plan, residual)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", PASSES, ids=str)
@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES)
def test_shapes(problem: Problem, kind: Pass, last: bool) -> None:
    for way in halo_volume.CANDIDATES if NIGHTLY else halo_volume.CANDIDATES[-1:]:
        run(in_pass(problem.channels_last() if last else problem, kind), way)


@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_random(kind: Pass) -> None:
    cases = cycle(product(halo_volume.CANDIDATES, (1, 4)))
    drawn: set[Problem] = set()

    def run_one(problem: Problem) -> None:
        drawn.add(problem)
        run(problem, *next(cases))

    def plain(problem: Problem, wider: int, outputs: int, last: bool) -> Problem:
        found = replace(
            problem,
            in_channels=wider * problem.in_channels,
            out_channels=outputs * problem.out_channels,
            padding_mode=PaddingMode.ZEROS,
            residual=problem.residual and kind is Pass.FPROP,
        )
        found = in_pass(found.channels_last() if last else found.contiguous(), kind)
        return replace(found, w_strides=contiguous_strides(found.w_shape))

    drawing = st.builds(plain, volumes(), st.sampled_from([1, 8, 20]), st.sampled_from([1, 8, 24]), st.booleans())
    explore(drawing, run_one, part=41, each=RANDOM)
    assert len(drawn) >= (200 if NIGHTLY else 7)


@pytest.mark.parametrize("kind", PASSES, ids=str)
def test_volumes_apart_and_not_aligned(kind: Pass) -> None:
    """Slices are aligned to 16 bytes, and the second volume is not: elements are read and stored one at a time."""
    one = in_pass(volume((2, 16, 3, 4, 8), 16, (3, 3, 3), padding=SAME).channels_last(), kind)
    x, y = ((strides[0] + 41, *strides[1:]) for strides in (one.x_strides, one.y_strides))
    run(replace(one, x_strides=x, y_strides=y), halo_volume.CANDIDATES[0])


def test_the_epilogue() -> None:
    shape = replace(SHAPES["two parts of the channels, two volumes"], residual=True, activation=Activation.SILU)
    for one in (shape, shape.channels_last()):
        run(one, halo_volume.CANDIDATES[0])


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (replace(LAYER, padding_mode=PaddingMode.REFLECT), "cannot read a reflect border"),
        (replace(LAYER, w_strides=(1728, 27, 1, 9, 3)), "the slices of the weight do not follow one another"),
        (replace(LAYER.for_pass(Pass.DGRAD), stride=(2, 1, 1)), "not for input gradients with strides"),
    ],
)
def test_refuses(problem: Problem, reason: str) -> None:
    assert reason in (next(halo_volume.candidates(problem)).refusal(problem) or "")
    with pytest.raises(PlanError, match=reason):
        plan_cuda(problem, A100)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", PASSES, ids=str)
@pytest.mark.parametrize("problem", LAYERS.values(), ids=LAYERS)
def test_is_chosen_at_the_error_of_torch_alone(problem: Problem, kind: Pass, last: bool) -> None:
    """Modelled to take less time than TF32 arithmetic at 65 % of its peak, unless half of a tile is padding."""
    problem = (problem.channels_last() if last else problem).for_pass(kind)
    chosen = plan_volume(problem, A100)
    rate = A100.products_per_clock("float16") / 2 * A100.sms * A100.clock_mhz
    assert chosen.choice == WHOLE
    assert chosen.cost < problem.multiplications / rate / 0.65 + 3 or problem.out_channels < 64
    assert plan_volume(replace(problem, tolerance=1e-4), A100).choice != WHOLE
    assert plan_volume(problem, V100).choice != WHOLE


@pytest.mark.parametrize(
    ("name", "kind", "last"), sampled(product(LAYERS, PASSES, (False, True)), 1, "counted"), ids=str
)
def test_the_model_agrees_with_the_count(name: str, kind: Pass, last: bool) -> None:
    problem = LAYERS[name].for_pass(kind)
    plan = plan_cuda(problem.channels_last() if last else problem, A100)
    every = count_plan(gpu_emulator, plan, {kernel: cubin(kernel) for kernel in set(plan.kernels)}, A100)
    counted_us = 1e3 * sum(one.bound_ms for one in every)
    assert sum(bound_us(cold(launch), A100) for launch in plan.launches) == pytest.approx(counted_us, rel=0.2)


def test_runs() -> None:
    """From the plan to the launch."""
    run_in_virtual_gpu(_runs, environment={"FAKE_CUDA_DEVICES": "a100", "POLYCONV_STRICT": "off"})


def _runs() -> None:
    problem = replace(SHAPES["two parts of the channels, two volumes"], tolerance=TORCH_TOLERANCE)
    torch.manual_seed(0)
    with VirtualGpu() as gpu:
        backend = gpu.backend()
        x, w = torch.randn(problem.x_shape), torch.randn(problem.w_shape)
        bias, y = torch.randn(problem.out_channels), torch.full(problem.y_shape, torch.nan)
        backend.prepare(backend.plan(problem))({"x": x, "w": w, "bias": bias, "y": y})
        exact = torch.nn.functional.conv3d(x.double(), w.double(), bias.double(), padding=1)
        assert (y - exact).abs().max() <= 5e-3 * exact.std()
        assert gpu.launches[-1].name.startswith("scaled_fp16_halo_volume")
