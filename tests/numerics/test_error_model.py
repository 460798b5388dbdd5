"""The error model against float32: never below the observed error, and close to it on ordinary data.

``pytest tests/numerics/test_error_model.py --hypothesis-profile=wide`` tries thousands of problems instead of dozens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import inf, isclose
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import float32_toom as float32
import uneven_data
from float32_toom import axis_schemes
from polyconv.algebra.segments import AxisScheme, Scheme2d, schemes
from polyconv.algebra.steps import Form, axis_steps
from polyconv.measure.workloads import find
from polyconv.numerics.error_model import (
    Magnitudes,
    error_bound,
    expected_rms,
    growth,
    largest_over_rms,
    predicted_error,
)
from uneven_data import Array

cut, direct = AxisScheme.cut, AxisScheme.direct


def square(scheme: AxisScheme) -> Scheme2d:
    return Scheme2d(scheme, scheme)


NESTED = cut(4, 9, 4, 5, tiles=2)

DESIGN: dict[str, tuple[Scheme2d | None, tuple[int, int]]] = {
    "5x9 F(4,3) in 2x3 segments": (Scheme2d(cut(4, 5, 3, 2), cut(4, 9, 3, 3, 3)), (5, 9)),
    "5x9 F(4,5), two segments": (Scheme2d(cut(4, 5), cut(4, 9, 4, 5)), (5, 9)),
    "5x9 F(4,5), nested": (Scheme2d(cut(4, 5), NESTED), (5, 9)),
    "5x9 along W only": (Scheme2d(direct(5), cut(4, 9, 4, 5)), (5, 9)),
    "5x9 F(6,5) x F(6,3)": (Scheme2d(cut(6, 5), cut(6, 9, 3, 3, 3)), (5, 9)),
    "5x9 direct": (None, (5, 9)),
    "3x3 F(2,3)": (square(cut(2, 3)), (3, 3)),
    "3x3 F(4,3)": (square(cut(4, 3)), (3, 3)),
    "3x3 F(6,3)": (square(cut(6, 3)), (3, 3)),
    "3x3 direct": (None, (3, 3)),
}
"""The algorithms in the table of the design and in docs/accuracy.md."""


def exact_forward(x: Array, w: Array) -> Array:
    y: Array = F.conv2d(torch.from_numpy(x).double()[None], torch.from_numpy(w).double())[0].numpy()
    return y


def exact_weight_gradient(x: Array, dy: Array) -> Array:
    images, gradients = (torch.from_numpy(t).double().transpose(0, 1) for t in (x, dy))
    dw: Array = F.conv2d(images, gradients).transpose(0, 1).numpy()
    return dw


def ordinary(channels: int, filters: int, size: int, kernel: tuple[int, int], seed: int = 0) -> tuple[Array, Array]:
    """Normal input and weights as ``nn.Conv2d`` initialises them; the output's scale is 3 ** -0.5."""
    g = np.random.default_rng(seed)
    x = g.standard_normal((channels, size + kernel[0] - 1, size + kernel[1] - 1)).astype(np.float32)
    bound = (channels * kernel[0] * kernel[1]) ** -0.5
    return x, g.uniform(-bound, bound, (filters, channels, *kernel)).astype(np.float32)


def forward(scheme: Scheme2d | None, x: Array, w: Array, *, block: int | None = None, h_first: bool = False) -> Array:
    if scheme is None:
        return float32.direct(x, w, block=block)
    return float32.forward(scheme, x, w, block=block, h_first=h_first)


# ------------------------------------------------------------------------------------------------- steps are exact


@given(axis_schemes(), st.sampled_from(["forward", "weight gradient"]))
def test_the_steps_of_an_axis_are_its_matrices(scheme: AxisScheme, form: Form) -> None:
    steps = axis_steps(scheme, form)
    assert steps.input.matrix() == steps.bt
    assert steps.weight is None or steps.weight.matrix() == steps.g
    back = steps.output.matrix()
    assert tuple(tuple(row[a] for a in steps.sums) for row in back) == steps.at
    assert steps.shared * steps.accumulators == len(steps.sums)


# ------------------------------------------------------------------------------------------------ ordinary data


@pytest.mark.parametrize("name", DESIGN)
def test_the_design_table(name: str) -> None:
    scheme, kernel = DESIGN[name]
    x, w = ordinary(32, 4, 96, kernel)
    observed = np.abs(forward(scheme, x, w) - exact_forward(x, w)).max() * 3**0.5
    predicted = predicted_error(scheme, 32 * kernel[0] * kernel[1])
    assert predicted / 5 < observed < predicted
    assert (predicted <= 1e-4) == (name != "5x9 F(6,5) x F(6,3)")


@pytest.mark.parametrize("block", [None, 8])
@pytest.mark.parametrize("channels", [3, 24, 96])
@pytest.mark.parametrize("name", [name for name in DESIGN if "direct" not in name])
def test_the_rms_is_predicted_within_a_fifth(name: str, channels: int, block: int | None) -> None:
    """Before any margin, the analysis itself is right, for transforms (few channels) and sums (many)."""
    scheme, kernel = DESIGN[name]
    assert scheme is not None
    x, w = ordinary(channels, 4, 48, kernel)
    errors = (forward(scheme, x, w, block=block) - exact_forward(x, w)) * 3**0.5
    down, across = scheme.h.outputs, scheme.w.outputs
    places = [errors[:, i::down, j::across] for i in range(down) for j in range(across)]
    observed = max(uneven_data.rms(place) for place in places)
    blocks = (block,) if block else ()
    assert 0.8 < observed / expected_rms(scheme, channels * kernel[0] * kernel[1], blocks=blocks) < 1.25


@pytest.mark.parametrize(
    "scheme",
    [square(cut(4, 3)), square(cut(2, 3)), Scheme2d(cut(4, 5), NESTED), Scheme2d(direct(3), cut(4, 9, 4, 5))],
    ids=str,
)
def test_the_rms_of_the_weight_gradient(scheme: Scheme2d) -> None:
    g = np.random.default_rng(0)
    outputs = (4 * scheme.h.outputs, 4 * scheme.w.outputs)
    x = g.standard_normal((3, 16, outputs[0] + scheme.h.r - 1, outputs[1] + scheme.w.r - 1)).astype(np.float32)
    dy = g.standard_normal((3, 24, *outputs)).astype(np.float32)
    reduction = 3 * outputs[0] * outputs[1]
    errors = (float32.weight_gradient(scheme, x, dy) - exact_weight_gradient(x, dy)) / reduction**0.5
    observed = max(uneven_data.rms(errors[:, :, i, j]) for i in range(scheme.h.r) for j in range(scheme.w.r))
    assert 0.7 < observed / expected_rms(scheme, reduction, form="weight gradient") < 1.3
    assert np.abs(errors).max() < predicted_error(scheme, reduction, form="weight gradient")


def workload_layers() -> list[tuple[int, tuple[int, int]]]:
    """(summed channels, kernel) of every layer with a possible fast form, forward and input gradient."""
    found = set()
    for load in find("all"):
        if load.kernel != (1, 1) and load.stride == (1, 1):
            found |= {(c // load.groups, load.kernel) for c in (load.input[1], load.out_channels)}
    return sorted(found)


def fastest(channels: int, kernel: tuple[int, int], block: int) -> Scheme2d | None:
    pairs = [Scheme2d(h, w) for h in schemes(kernel[0]) for w in schemes(kernel[1])]
    reduction = channels * kernel[0] * kernel[1]
    fast = [s for s in pairs if s.reduction > 1 and predicted_error(s, reduction, blocks=(block,)) <= 1e-4]
    return max(fast, key=lambda s: s.reduction, default=None)


@pytest.mark.parametrize(("channels", "kernel"), workload_layers(), ids=str)
def test_the_workloads(channels: int, kernel: tuple[int, int]) -> None:
    """Each with the fastest scheme at the default tolerance: the observed error is just below the prediction."""
    block = 32
    scheme = fastest(channels, kernel, block)
    x, w = ordinary(channels, 4 if channels < 16 else 2, min(256, max(24, 4096 // channels)), kernel)
    observed = np.abs(forward(scheme, x, w, block=block) - exact_forward(x, w)).max() * 3**0.5
    predicted = predicted_error(scheme, channels * kernel[0] * kernel[1], blocks=(block,))
    assert predicted / 10 < observed < predicted
    assert scheme is None or predicted <= 1e-4


# ------------------------------------------------------------------------------------------------- any data


@dataclass(frozen=True)
class Trial:
    """One random problem: observed error and bound."""

    about: str
    observed: float
    predicted: float
    bound: float


Which = Literal["forward", "weight gradient", "direct"]
POOL = {r: schemes(r) for r in range(1, 10)}


def trial(which: Which, seed: int, kinds: dict[str, uneven_data.Make] | None = None) -> Trial:
    g = np.random.default_rng([seed, len(which)])
    names = list(kinds or uneven_data.KINDS)
    kind_x, kind_w = (names[g.integers(len(names))] for _ in range(2))
    rh, rw = (int(r) for r in g.integers(1, 10, 2))
    scheme: Scheme2d | None = Scheme2d(POOL[rh][g.integers(len(POOL[rh]))], POOL[rw][g.integers(len(POOL[rw]))])
    height, width = rh + int(g.integers(0, 32)), rw + int(g.integers(0, 32))
    block = None if g.random() < 0.5 else int(g.integers(1, 17))
    h_first = bool(g.integers(2))
    filters, channels = int(g.integers(1, 5)), int(2 ** g.uniform(0, 7))
    form: Form = "forward"
    tiles = None
    if which == "weight gradient":
        form = "weight gradient"
        images, channels = int(g.integers(1, 4)), int(g.integers(1, 5))
        x = uneven_data.draw(kind_x, g, (images, channels, height, width))
        w = uneven_data.draw(kind_w, g, (images, filters, height - rh + 1, width - rw + 1))
        exact = exact_weight_gradient(x, w)
        assert scheme is not None
        ours = float32.weight_gradient(scheme, x, w, block=block, h_first=h_first)
        reduction = images * w.shape[2] * w.shape[3]
        tiles = images * -(-w.shape[2] // scheme.h.outputs) * -(-w.shape[3] // scheme.w.outputs)
    else:
        x = uneven_data.draw(kind_x, g, (channels, height, width))
        w = uneven_data.draw(kind_w, g, (filters, channels, rh, rw))
        exact = exact_forward(x, w)
        scheme = None if which == "direct" else scheme
        ours = forward(scheme, x, w, block=block, h_first=h_first)
        reduction = channels * rh * rw
    magnitudes = uneven_data.measure(x, w, exact)
    blocks = (block,) if block else ()
    return Trial(
        f"{which} {scheme}, x {x.shape} {kind_x}, w {w.shape} {kind_w}, block {block}",
        float(np.abs(ours - exact).max()) / (magnitudes.scale(reduction) or 1.0),
        predicted_error(scheme, reduction, form=form, blocks=blocks, outputs=exact.size, magnitudes=magnitudes),
        error_bound(scheme, reduction, form=form, blocks=blocks, count=tiles, magnitudes=magnitudes),
    )


seeds = st.integers(0, 2**32 - 1)


@given(seeds)
def test_forward_is_never_above_the_prediction(seed: int) -> None:
    found = trial("forward", seed)
    assert found.observed <= found.predicted, found
    assert found.observed <= found.bound, found


@given(seeds)
def test_the_weight_gradient_is_never_above_the_prediction(seed: int) -> None:
    found = trial("weight gradient", seed)
    assert found.observed <= found.predicted, found
    assert found.observed <= found.bound, found


@given(seeds)
def test_direct_summation_is_never_above_the_prediction(seed: int) -> None:
    found = trial("direct", seed)
    assert found.observed <= found.predicted, found
    assert found.observed <= found.bound, found


@given(seeds, st.sampled_from(["forward", "weight gradient", "direct"]))
def test_nothing_is_above_the_bound(seed: int, which: Which) -> None:
    found = trial(which, seed, uneven_data.PATTERNS)
    assert found.observed <= found.bound, found


# --------------------------------------------------------------------------------------------- monotonicity


def test_magnitudes_scale_out() -> None:
    scheme = square(cut(4, 3))
    small = Magnitudes(x_rms=1e-6, x_max=1e-5, w_rms=1e-3, w_max=1e-2, x_local=2e-6, w_local=2e-3, y_max=1e-6)
    large = Magnitudes(x_rms=1.0, x_max=10.0, w_rms=1.0, w_max=10.0, x_local=2.0, w_local=2.0, y_max=1e3)
    assert isclose(
        predicted_error(scheme, 288, magnitudes=small), predicted_error(scheme, 288, magnitudes=large), rel_tol=1e-12
    )


def test_the_error_grows_with_channels_and_shrinks_with_blocks() -> None:
    for scheme, kernel in DESIGN.values():
        taps = kernel[0] * kernel[1]
        by_channels = [expected_rms(scheme, channels * taps) for channels in (1, 8, 64, 512)]
        assert by_channels == sorted(by_channels)
        cuts: list[tuple[int, ...]] = [(), (256,), (256, 8), (32, 8, 8)]
        by_cuts = [expected_rms(scheme, 512 * taps, blocks=blocks) for blocks in cuts]
        assert by_cuts == sorted(by_cuts, reverse=True)
        assert by_cuts[0] > 1.5 * by_cuts[-1]
        assert expected_rms(scheme, 512 * taps, blocks=(10**9,)) == by_cuts[0]


def test_uneven_data_is_predicted_to_be_worse() -> None:
    scheme = square(cut(4, 3))
    even = predicted_error(scheme, 288)
    for uneven in (
        Magnitudes(x_max=100.0),
        Magnitudes(w_max=100.0),
        Magnitudes(x_local=10.0),
        Magnitudes(w_local=10.0),
        Magnitudes(y_max=1000.0),
    ):
        assert predicted_error(scheme, 288, magnitudes=uneven) > 2 * even
    assert predicted_error(scheme, 288, magnitudes=Magnitudes(w_mean=1.0)) > 1.2 * even


def test_a_tolerance_of_zero_leaves_direct_summation() -> None:
    assert predicted_error(square(cut(2, 3)), 288) > 0.0


def test_data_of_zeros_has_no_error() -> None:
    nothing = Magnitudes(x_rms=0.0, x_max=0.0, w_rms=1.0, w_max=1.0)
    assert 0 < predicted_error(square(cut(4, 3)), 288, magnitudes=nothing) < 1e-4


def test_a_bound_needs_the_largest_magnitudes() -> None:
    with pytest.raises(ValueError, match="x_max and w_max"):
        error_bound(None, 9, magnitudes=Magnitudes(x_max=1.0))
    # A long enough sum may lose every digit, in theory.
    assert error_bound(None, 2**25, magnitudes=Magnitudes(x_max=1.0, w_max=1.0)) == inf
    assert error_bound(None, 2**25, blocks=(2**12,), magnitudes=Magnitudes(x_max=1.0, w_max=1.0)) < inf


def test_the_largest_of_many() -> None:
    assert 5.5 < largest_over_rms(1e6) < 5.9
    assert largest_over_rms(1.0) > largest_over_rms(3.0) > largest_over_rms(30.0)


def test_it_can_be_printed_and_is_quick() -> None:
    scheme = Scheme2d(cut(4, 5), NESTED)
    assert str(growth(scheme)) == "growth 42.8 per rounding of the sum, 101.9 in the transforms"
    assert "x_max=None" in repr(Magnitudes())
    start = time.perf_counter()
    for channels in range(1, 1001):
        predicted_error(scheme, channels * 45)
    assert time.perf_counter() - start < 1.0
