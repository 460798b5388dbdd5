"""Predicted errors hold for every CPU kernel: no output deviates by more.

On data that the derivation does not assume, as far as a plan can detect it: expanded or overlapping tensors, output
channels of different scales, one operand without randomness.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

import uneven_data
from every_candidate import Layer, Shape, Trial
from polyconv.algebra.segments import Scheme2d
from polyconv.algebra.steps import Form
from polyconv.cpu.engines import channel_lanes, tile_lanes
from polyconv.cpu.plan import CpuCandidate
from polyconv.cpu.planner import plan_cpu
from polyconv.cuda.planner import DEVICES
from polyconv.cuda.planner.planner import plan_cuda
from polyconv.measure.workloads import find
from polyconv.numerics.aliasing import repetition_of, times
from polyconv.numerics.error_model import INDEPENDENT, predicted_error
from polyconv.numerics.prediction import reduction_of
from polyconv.problem import DEFAULT_TOLERANCE, Pass, Problem
from polyconv.selection import by_cost

LAYER = Layer(batch=2, channels=40, filters=36, size=18)
DIMENSIONS = list(chain.from_iterable(combinations(range(4), count) for count in range(1, 5)))
NAMES = "NCHW"


def drawn(shape: Shape, kind: str = "normal") -> Tensor:
    """Normal values, or those of ``nn.Conv2d``'s initialisation, up to a factor."""
    return torch.rand(shape) * 2 - 1 if kind == "uniform" else torch.randn(shape)


def expanded(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The first index of each of these dimensions, expanded over all."""
    kept = tensor
    for dim in dims:
        kept = kept.narrow(dim, 0, 1)
    return kept.expand(tensor.shape)


def keeps_its_promise(trial: Trial) -> None:
    broken = [
        f"{candidate.name}: {observed:.1e}, predicted {candidate.error:.1e}"
        for candidate, observed in trial.errors(trial.scale)
        if observed > candidate.error
    ]
    assert not broken, f"{trial.problem}: {broken}"


# ------------------------------------------------------------------------------------------- expanded, overlapping


@pytest.mark.parametrize("dims", DIMENSIONS, ids=lambda dims: "".join(NAMES[d] for d in dims))
@pytest.mark.parametrize("which", ["one", "other", "both"])
@pytest.mark.parametrize("kind", Pass, ids=str)
def test_expanded_operands(kind: Pass, which: str, dims: tuple[int, ...]) -> None:
    torch.manual_seed(sum(2**d for d in dims))
    one, other = map(drawn, LAYER.operands(kind))
    one = one if which == "other" else expanded(one, dims)
    other = other if which == "one" else expanded(other, dims)
    keeps_its_promise(Trial(LAYER, kind, one, other))


def overlapping(shape: Shape, steps: np.random.Generator) -> Tensor:
    """Overlapping windows: strides far smaller than the extents they step over."""
    strides = [int(steps.choice([0, 1, 1, 2, 3, 7, shape[3]])) for _ in shape]
    reach = sum(stride * (extent - 1) for stride, extent in zip(strides, shape, strict=True))
    return torch.as_strided(torch.randn(reach + 1), shape, strides)


@pytest.mark.parametrize("kind", Pass, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_overlapping_windows(kind: Pass, seed: int) -> None:
    torch.manual_seed(seed)
    steps = np.random.default_rng(seed)
    layer = Layer(2, int(steps.choice([1, 8, 40])), int(steps.choice([1, 8, 40])), 20, ((3, 3), (5, 9))[seed % 2], 2)
    one, other = (overlapping(shape, steps) if steps.random() < 0.8 else drawn(shape) for shape in layer.operands(kind))
    keeps_its_promise(Trial(layer, kind, one, other))


def test_what_repeats_is_counted_exactly() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        extents = [int(n) for n in draw.integers(1, 6, 3)]
        operands = [[int(s) for s in draw.choice([-1, 0, 1, 1, 2, 3, 5, 25], 3)] for _ in range(draw.integers(1, 3))]
        addresses = [np.tensordot(steps, np.indices(extents).reshape(3, -1), 1) for steps in operands]
        _, counts = np.unique(np.stack(addresses), axis=1, return_counts=True)
        assert times(extents, *operands) == pytest.approx((counts**2).sum() / counts.sum(), rel=1e-12)


def test_dense_tensors_repeat_nothing() -> None:
    for workload in find("all"):
        for kind in Pass:
            assert repetition_of(workload.problem(kind)) is INDEPENDENT


def test_equal_products_refuse_fast_schemes() -> None:
    """Equal channels of input and weights: rounding errors add up, and only direct summation remains."""
    shapes = ((2, 128, 24, 24), (32, 128, 3, 3))
    strides = {"x_strides": (576, 0, 24, 1), "w_strides": (9, 0, 3, 1)}
    dense, repeated = Problem.make("fprop", *shapes), Problem.make("fprop", *shapes, **strides)  # type: ignore[arg-type]
    assert any("F(4,3)" in candidate.name for candidate in by_cost(plan_cpu(dense).candidates))
    assert not any("F(" in candidate.name for candidate in by_cost(plan_cpu(repeated).candidates))


@pytest.mark.parametrize("name", ["W1", "W2", "W3"])
@pytest.mark.parametrize("kind", [Pass.DGRAD, Pass.WGRAD], ids=str)
def test_the_gradient_of_a_sum_stays_fast(name: str, kind: Pass) -> None:
    """``y.sum().backward()``: dy is one expanded number, for which the error is known best."""
    dense = find(name)[0].problem(kind)
    problem = replace(dense, y_strides=(0, 0, 0, 0))
    on_cpu, on_gpu = plan_cpu(problem), plan_cuda(problem, DEVICES["v100"])
    assert on_cpu.chosen.direct == plan_cpu(dense).chosen.direct
    assert on_cpu.predicted_error <= DEFAULT_TOLERANCE
    assert not on_gpu.algorithm.startswith("direct")
    assert on_gpu.expected_error <= DEFAULT_TOLERANCE


@pytest.mark.parametrize("value", [1.0, 0.1])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 5), (5, 9)], ids=str)
@pytest.mark.parametrize("kind", [Pass.DGRAD, Pass.WGRAD], ids=str)
def test_the_gradient_of_a_sum_or_a_mean(kind: Pass, kernel: tuple[int, int], value: float) -> None:
    torch.manual_seed(0)
    layer = Layer(2, 24, 8, 32, kernel)
    dy = torch.tensor(value).expand(layer.y)
    operands = (dy, drawn(layer.w, "uniform")) if kind is Pass.DGRAD else (drawn(layer.x), dy)
    keeps_its_promise(Trial(layer, kind, *operands))


# ------------------------------------------------------------------------------------------------ output maps


MAPS = {
    "filters": (Pass.FPROP, 1, 0),
    "images": (Pass.FPROP, 0, 0),
    "input channels, backwards": (Pass.DGRAD, 1, 1),
    "images, backwards": (Pass.DGRAD, 0, 0),
    "input channels of a weight gradient": (Pass.WGRAD, 0, 1),
    "filters of a weight gradient": (Pass.WGRAD, 1, 1),
}
"""Pass, operand and dimension along which each output map reads its own part of the operand."""


@pytest.mark.parametrize("name", MAPS)
def test_every_output_map_keeps_the_promise_in_its_own_scale(name: str) -> None:
    """Scales from 1 to 1e-4: each map is as exact as if alone. An rms over all maps would hide that, and the largest
    map exceeds the prediction in units of it."""
    kind, which, dim = MAPS[name]
    torch.manual_seed(0)
    layer = Layer(8, 36, 36, 14)
    operands = list(map(drawn, layer.operands(kind)))
    count = operands[which].shape[dim]
    by_map = [count if d == dim else 1 for d in range(4)]
    operands[which] = operands[which] * torch.logspace(0, -4, count).view(by_map)
    keeps_its_promise(Trial(layer, kind, *operands))


# --------------------------------------------------------------------------------------------- one operand structured


def _one_hot(shape: Shape) -> Tensor:
    found = torch.zeros(shape)
    found.view(-1)[int(torch.randint(found.numel(), ()))] = 1.7
    return found


STRUCTURED = {
    "constant": lambda shape: torch.full(shape, 0.1),
    "ramp": lambda shape: torch.linspace(-1, 1, shape[3]).expand(shape).contiguous(),
    "two ramps": lambda shape: (
        (torch.linspace(0, 1, shape[2])[:, None] + torch.linspace(0, 2, shape[3])).expand(shape).clone()
    ),
    "one hot": _one_hot,
    "rows repeated": lambda shape: torch.randn(shape[:3])[..., None].expand(shape).clone(),
    "channels repeated": lambda shape: torch.randn(shape[0], 1, *shape[2:]).expand(shape).clone(),
    "outliers": lambda shape: torch.randn(shape) * torch.where(torch.rand(shape) < 1e-3, 1e4, 1.0),
    "positive": lambda shape: torch.randn(shape).relu(),
    "channel scales": lambda shape: torch.randn(shape) * torch.logspace(0, -4, shape[1]).view(1, -1, 1, 1),
}


def scheme_of(candidate: CpuCandidate, kind: Pass) -> Scheme2d | None:
    if candidate.engine == tile_lanes.NAME:
        return tile_lanes.schemes()[candidate.algorithm].exact
    if candidate.engine == channel_lanes.NAME:
        return channel_lanes.schemes(kind)[candidate.algorithm].exact
    return None


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize("which", ["one", "other"])
@pytest.mark.parametrize("kind", Pass, ids=str)
def test_structured_data(kind: Pass, which: str, name: str) -> None:
    """Dense in memory: only magnitudes show the structure. Their prediction holds if the other operand is random."""
    torch.manual_seed(1)
    layer = replace(LAYER, channels=24, filters=20)
    one, other = map(drawn, layer.operands(kind))
    one, other = (STRUCTURED[name](one.shape), other) if which == "one" else (one, STRUCTURED[name](other.shape))
    trial = Trial(layer, kind, one, other)
    reduction = reduction_of(trial.problem)
    # Axes of the model: images, then channels of the map; for weights, output channels first.
    swapped = other.transpose(0, 1) if kind is Pass.DGRAD else other
    magnitudes = uneven_data.measure(one.numpy(), swapped.numpy(), trial.exact.numpy())
    form: Form = "weight gradient" if kind is Pass.WGRAD else "forward"
    for candidate, observed in trial.errors(torch.tensor(magnitudes.scale(reduction))):
        scheme = scheme_of(candidate, kind)
        known = predicted_error(scheme, reduction, form=form, magnitudes=magnitudes)
        promised = candidate.error * known / predicted_error(scheme, reduction, form=form)
        assert observed <= promised, f"{candidate.name}: {observed:.1e}, predicted {promised:.1e}"


# -------------------------------------------------------------------------------------- beyond any prediction


def script(name: str) -> ModuleType:
    """The program that prints the figures of docs/accuracy.md."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "cpu" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_lone_pixel_disturbs_its_tile_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    extreme = script("extreme_values")
    monkeypatch.setattr(extreme, "PLACES", range(16, 22))
    monkeypatch.setattr(extreme, "CHANNELS", 8)
    torch.manual_seed(0)
    for scheme, kernel in extreme.SHOWN.items():
        error, reach = extreme.lone_pixel(scheme, kernel)
        # The first and the last input of a tile contribute to one output only.
        assert reach == tuple(max(0, m - 2) for m in (scheme.m_h, scheme.m_w))
        assert error < (5e-5 if max(reach) else 1e-12)


def test_where_transforms_overflow() -> None:
    """Not below the figures of their matrices, and not far above."""
    extreme = script("extreme_values")
    torch.manual_seed(0)
    for scheme, kernel in extreme.SHOWN.items():
        x, w = extreme.operands(kernel)
        inputs, products, outputs = extreme.stages(scheme)
        assert inputs >= 1
        assert outputs >= products
        terms = max(inputs, extreme.CHANNELS * outputs * float(w.abs().max()))
        safe = torch.sign(x) * (0.99 * extreme.LARGEST / terms)
        assert torch.isfinite(extreme.convolve(scheme, safe, w)).all()
    large = extreme.KernelScheme(6, 3, 6, 3)
    assert extreme.overflows_from(large, (3, 3)) == "1e36"
    assert extreme.overflows_from(extreme.KernelScheme(1, 1, 1, 1), (3, 3)) == "with the result"


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=["one", "other", "both"])
@pytest.mark.parametrize("kind", Pass, ids=str)
def test_operands_below_the_smallest_exponent(kind: Pass, which: tuple[int, ...]) -> None:
    """Operands of 1e-39, where the other one makes the result an ordinary number, and of 1e-18, whose products are
    denormal on the way: kernels scale them, so transforms lose no digits."""
    torch.manual_seed(0)
    layer = Layer(1, 5, 5, 24)
    factors = [1e-18 if len(which) == 2 else 1e-39 if place in which else 1e16 for place in range(2)]
    one, other = (drawn(shape) * factor for shape, factor in zip(layer.operands(kind), factors, strict=True))
    keeps_its_promise(Trial(layer, kind, one, other))


def test_a_gradient_jumps_where_the_last_digits_decide() -> None:
    """A max-pool or ReLU that decides otherwise: float64's own gradient jumps when its forward pass is disturbed in the
    sixth digit. With the decisions fixed, polyconv's gradient is as exact as its convolutions."""
    jumps = script("gradient_jumps")
    for seed in range(4):
        found = jumps.outcomes(seed, pixels=64, batch=4, width=0.25)
        for outcome in found.values():
            assert outcome.given < 1e-5
            assert outcome.own < 1e-5 or outcome.differing
        if found["float64 with noise"].differing and found["float64 with noise"].own > 1e-4:
            return
    pytest.fail("noise changed no decision that matters: the test shows nothing")
