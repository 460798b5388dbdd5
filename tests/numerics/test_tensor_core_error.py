"""The error model of split products on tensor cores, against numpy that rounds like the hardware."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_error_model import NESTED, exact_forward, ordinary

import float32_toom as float32
import uneven_data
from polyconv.algebra.segments import AxisScheme, Scheme2d
from polyconv.numerics.error_model import Magnitudes, expected_rms, predicted_error
from polyconv.numerics.prediction import direct_error, error_of
from polyconv.numerics.tensor_core import AMPERE, HOPPER, VOLTA, SplitProducts, TensorCore, tensor_core
from polyconv.problem import Problem
from tensor_core_sums import SplitSums, block_sum
from uneven_data import Array

cut, direct = AxisScheme.cut, AxisScheme.direct

CORES = {"Volta": VOLTA, "Ampere": AMPERE, "Hopper": HOPPER}
SCHEMES: dict[str, tuple[Scheme2d | None, tuple[int, int]]] = {
    "direct": (None, (5, 9)),
    "direct x F(2,3)": (Scheme2d(direct(3), cut(2, 3)), (3, 3)),
    "direct x F(4,5)": (Scheme2d(direct(5), cut(4, 9, 4, 5)), (5, 9)),
    "direct x F(4,5) nested": (Scheme2d(direct(5), NESTED), (5, 9)),
    "F(4,5) x F(4,5) nested": (Scheme2d(cut(4, 5), NESTED), (5, 9)),
}
FLUSHED = 4
"""Channels summed by a tensor core before the accumulator is flushed."""


def one_hot(g: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """One pixel of each channel, else zeros."""
    x = np.zeros(shape)
    flat = x.reshape(*shape[:-2], -1)
    place = g.integers(0, flat.shape[-1], (*shape[:-2], 1))
    np.put_along_axis(flat, place, g.standard_normal((*shape[:-2], 1)), -1)
    return x


KINDS = uneven_data.KINDS | {"one-hot": one_hot}


def in_blocks(scheme: Scheme2d | None, kernel: tuple[int, int], channels: int | None) -> int | None:
    """The channel count in a scheme's terms: direct summation counts products."""
    return channels if scheme is not None or channels is None else channels * kernel[0] * kernel[1]


def forward(scheme: Scheme2d | None, x: Array, w: Array, block: int | None, products: SplitProducts) -> Array:
    if scheme is None:
        return float32.direct(x, w, block=block, products=products)
    return float32.forward(scheme, x, w, block=block, products=products)


# ---- The simulation


@pytest.mark.parametrize(
    ("core", "exponent", "ulps"),
    [(VOLTA, -23, 4), (VOLTA, -24, 0), (AMPERE, -24, 2), (AMPERE, -25, 0), (HOPPER, -25, 1), (HOPPER, -26, 0)],
)
def test_what_lies_below_the_bits_that_are_kept_is_cut(core: TensorCore, exponent: int, ulps: int) -> None:
    """1, and 4 times powers of two: all of them survive, or none."""
    four = [(np.array([2.0**exponent]), np.array([1.0]))] * 4
    assert block_sum(core, four, np.ones(1, np.float32))[0] == 1 + ulps * 2.0**-23


def test_a_split_operand_has_22_bits_and_more() -> None:
    g = np.random.default_rng(0)
    x = g.standard_normal(10000).astype(np.float32)
    sums = SplitSums(SplitProducts(VOLTA), x, x)
    hi, lo = sums.split(x, sums.exponents[1])
    left = np.ldexp(hi + np.ldexp(lo, -11), -sums.exponents[1]) - x
    assert np.abs(left / x).max() < 2.0**-22


# ---- Ordinary data


@pytest.mark.parametrize("shift", [11, 0])
@pytest.mark.parametrize("core", CORES.values(), ids=CORES)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_rms_and_the_largest_error(name: str, core: TensorCore, shift: int) -> None:
    """For one long sum and a flushed one: the rms before any margin, at the worst place of a tile."""
    scheme, kernel = SCHEMES[name]
    products = SplitProducts(core, shift=shift)
    x, w = ordinary(32, 2, 24, kernel)
    down, across = (1, 1) if scheme is None else (scheme.h.outputs, scheme.w.outputs)
    for channels in (None, FLUSHED):
        block = in_blocks(scheme, kernel, channels)
        blocks = (block,) if block else ()
        errors = (forward(scheme, x, w, block, products) - exact_forward(x, w)) * 3**0.5
        rms = max(uneven_data.rms(errors[:, i::down, j::across]) for i in range(down) for j in range(across))
        reduction = 32 * kernel[0] * kernel[1]
        assert 0.8 < expected_rms(scheme, reduction, blocks=blocks, arithmetic=products) / rms < 1.8
        predicted = predicted_error(scheme, reduction, blocks=blocks, arithmetic=products)
        assert predicted / 8 < np.abs(errors).max() < predicted


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "direct"])
def test_flushed_sums_keep_the_error_of_float32(name: str) -> None:
    """At most 1.5 times the float32 error of the same scheme, on every generation."""
    scheme, kernel = SCHEMES[name]
    reduction = 32 * kernel[0] * kernel[1]
    plain = predicted_error(scheme, reduction)
    for core in CORES.values():
        flushed = predicted_error(scheme, reduction, blocks=(FLUSHED,), arithmetic=SplitProducts(core))
        assert flushed < 1.5 * plain


# ---- Any data


@given(st.integers(0, 2**32 - 1))
def test_nothing_is_above_the_prediction(seed: int) -> None:
    g = np.random.default_rng(seed)
    names = list(KINDS)
    kind_x, kind_w = (names[g.integers(len(names))] for _ in range(2))
    scheme, kernel = list(SCHEMES.values())[g.integers(len(SCHEMES))]
    core = list(CORES.values())[g.integers(len(CORES))]
    products = SplitProducts(core, shift=int(g.choice([0, 11])))
    channels, size = int(2 ** g.uniform(0, 6)), int(g.integers(1, 16))
    x = KINDS[kind_x](g, (channels, size + kernel[0] - 1, size + kernel[1] - 1)).astype(np.float32)
    w = KINDS[kind_w](g, (2, channels, *kernel)).astype(np.float32)
    block = in_blocks(scheme, kernel, None if g.random() < 0.3 else int(g.integers(1, 9)))
    exact = exact_forward(x, w)
    magnitudes = uneven_data.measure(x, w, exact)
    reduction = channels * kernel[0] * kernel[1]
    observed = np.abs(forward(scheme, x, w, block, products) - exact).max() / (magnitudes.scale(reduction) or 1.0)
    predicted = predicted_error(
        scheme,
        reduction,
        blocks=(block,) if block else (),
        outputs=exact.size,
        magnitudes=magnitudes,
        arithmetic=products,
    )
    assert observed <= predicted, f"x {x.shape} {kind_x}, w {w.shape} {kind_w}, {scheme}, {products}, block {block}"


# ---- Range


def dot(products: SplitProducts, x: Array, w: Array, largest: float) -> Array:
    """Sums over the first axis of tensors that contain values as large as ``largest`` elsewhere."""
    sums = SplitSums(products, w, np.append(x.ravel(), np.float32(largest)))
    return sums.chain(list(zip(w, x, strict=True)), np.zeros(x.shape[1:], np.float32))


@pytest.mark.parametrize("shift", [11, 0])
@pytest.mark.parametrize("orders", [0, 8, 14, 20, 26, 32, 38, 60])
def test_values_far_below_the_largest_lose_bits_as_predicted(orders: int, shift: int) -> None:
    """An image of normal values next to one that is 2^orders as large."""
    g = np.random.default_rng(orders)
    x, w = g.standard_normal((2, 64, 4096)).astype(np.float32)
    products = SplitProducts(AMPERE, shift=shift)
    exact = (x.astype(np.float64) * w).sum(0)
    observed = np.abs(dot(products, x, w, 2.0 ** (orders + 2)) - exact).max() / 8
    known = Magnitudes(x_max=5.0, w_max=5.0, x_tensor_max=2.0 ** (orders + 2))
    predicted = predicted_error(None, 64, magnitudes=known, arithmetic=products)
    lost = orders > 50  # nothing of such an image survives: the prediction must say so
    assert predicted > 1e-2 if lost else predicted / 20 < observed < predicted


def test_full_precision_spans_many_orders() -> None:
    """Binary orders below the largest value: 29 with scaled-up small parts, 17 without."""
    for shift, orders in ((11, 24), (0, 12)):
        products = SplitProducts(VOLTA, shift=shift)
        near, far = (predicted_error(None, 64, magnitudes=wide(n), arithmetic=products) for n in (0, orders))
        assert far < 1.2 * near
        assert predicted_error(None, 64, magnitudes=wide(orders + 10), arithmetic=products) > 10 * near


def wide(orders: int) -> Magnitudes:
    return Magnitudes(x_tensor_max=2.0**orders, w_tensor_max=8.0)


# ---- Queries of the planner


def test_half_precision_tensors_have_one_part() -> None:
    """Direct sums of FP16 tensors are as exact as their operands; transformed ones are rounded to FP16."""
    one = predicted_error(None, 288, arithmetic=SplitProducts(AMPERE, parts=1))
    assert 1e-3 < one < 2e-2
    assert 4 < predicted_error(None, 288, arithmetic=SplitProducts(AMPERE, parts=1, bits=8)) / one < 12


def test_generations() -> None:
    assert [tensor_core(f"sm_{n}") for n in ("70", "75", "80", "86", "89", "90a", "100", "120")] == (
        [VOLTA] * 2 + [AMPERE] * 3 + [HOPPER] * 3
    )


def test_whole_problems() -> None:
    problem = Problem.make("fprop", (8, 32, 128, 128), (64, 32, 5, 9))
    products = SplitProducts(VOLTA)
    scheme, _ = SCHEMES["direct x F(4,5) nested"]
    assert error_of(problem, scheme, 32, (FLUSHED,), products) == pytest.approx(
        predicted_error(scheme, 32 * 45, blocks=(FLUSHED,), arithmetic=products)
    )
    assert direct_error(problem, (180, 8), products) > direct_error(problem, (180, 8))
