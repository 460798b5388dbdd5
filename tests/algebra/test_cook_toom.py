"""Cook-Toom algorithms against the definition, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyconv.algebra.cook_toom import INFINITY, Bilinear, Place, Point, Scale, cook_toom, default_points
from polyconv.algebra.matrices import is_dyadic, matrix, power_of_two_below, transpose

numbers = st.fractions(-9, 9, max_denominator=8)
sizes = st.integers(1, 5)
places: st.SearchStrategy[Place] = st.sampled_from(["g", "at", "bt"])
scales: st.SearchStrategy[Scale] = st.sampled_from(["unit", "monic"])


def correlation(x: list[Fraction], w: list[Fraction], m: int) -> tuple[Fraction, ...]:
    return tuple(sum((w[j] * x[i + j] for j in range(len(w))), Fraction(0)) for i in range(m))


@st.composite
def algorithms(draw: st.DrawFn) -> Bilinear:
    """A random F(m, r) with scaling and points: the default ones, or distinct ones with or without infinity."""
    m, r = draw(sizes), draw(sizes)
    points: tuple[Point, ...] | None = None
    if draw(st.booleans()):
        chosen: st.SearchStrategy[Point] = st.one_of(st.fractions(-5, 5, max_denominator=4), st.just(INFINITY))
        points = tuple(draw(st.lists(chosen, min_size=m + r - 1, max_size=m + r - 1, unique=True)))
    return cook_toom(m, r, points, denominators=draw(places), scale=draw(scales))


def values(data: st.DataObject, count: int) -> list[Fraction]:
    return data.draw(st.lists(numbers, min_size=count, max_size=count))


@given(algorithms(), st.data())
def test_forward(f: Bilinear, data: st.DataObject) -> None:
    x, w = values(data, f.m + f.r - 1), values(data, f.r)
    assert f(x, w) == correlation(x, w, f.m)
    assert f.error() is None
    assert f.products == f.inputs == f.m + f.r - 1


@given(algorithms(), st.data())
def test_weight_gradient(f: Bilinear, data: st.DataObject) -> None:
    x, dy = values(data, f.m + f.r - 1), values(data, f.m)
    gradient = f.weight_gradient()
    assert gradient(x, dy) == correlation(x, dy, f.r)
    assert gradient.error() is None
    assert gradient.bt == f.bt  # the transformed input of the forward pass
    assert gradient.weight_gradient() == f


@given(algorithms(), st.data())
def test_input_gradient(f: Bilinear, data: st.DataObject) -> None:
    w, dy = values(data, f.r), values(data, f.m)
    expected = [Fraction(0)] * (f.m + f.r - 1)
    for i in range(f.m):
        for j in range(f.r):
            expected[i + j] += w[j] * dy[i]
    gradient = f.input_gradient()
    assert gradient(dy, w) == tuple(expected)
    assert gradient.error() is None


@given(algorithms(), st.data())
def test_input_gradient_is_also_the_forward_pass_with_reversed_taps(f: Bilinear, data: st.DataObject) -> None:
    """Input gradient with tiles that must not overlap: dx[k] = sum_j w[j] dy[k - j], r - 1 zeros before dy."""
    w, dy = values(data, f.r), values(data, f.m + f.r - 1)
    expected = tuple(sum(w[j] * dy[k + f.r - 1 - j] for j in range(f.r)) for k in range(f.m))
    assert f(dy, w[::-1]) == expected


@given(st.integers(2, 6), st.integers(2, 6))
def test_the_weight_gradient_is_f_of_r_and_m(m: int, r: int) -> None:
    assert cook_toom(m, r).weight_gradient() == cook_toom(r, m, denominators="at")


@given(st.integers(1, 7), st.integers(1, 7))
def test_default_transforms_of_data_are_exact_in_float32(m: int, r: int) -> None:
    """Only G may need rounding; every row of B^T has a unit entry, which costs no multiplication."""
    f = cook_toom(m, r)
    entries = [c for row in f.at + f.bt for c in row]
    assert all(is_dyadic(c) for c in entries)
    assert all(abs(c.numerator).bit_length() <= 24 for c in entries)
    assert all(1 <= min(abs(c) for c in row if c) < 2 for row in f.bt)


@pytest.mark.parametrize("n", range(1, 15))
def test_default_points(n: int) -> None:
    points = default_points(n)
    assert len(set(points)) == len(points) == n
    assert points[-1] is INFINITY
    assert points[:-1] == tuple(map(Fraction, ["0", "1", "-1", "2", "-2", "1/2", "-1/2"]))[: n - 1] + points[7:-1]


def test_the_classic_f_2_3() -> None:
    f = cook_toom(2, 3)
    half = Fraction(1, 2)
    assert f.at == matrix([[1, 1, 1, 0], [0, 1, -1, 1]])
    assert f.g == matrix([[1, 0, 0], [half, half, half], [half, -half, half], [0, 0, 1]])
    assert f.bt == matrix([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]])


def test_f_2_2_is_the_nesting_by_three_products() -> None:
    f = cook_toom(2, 2)
    assert f.g == matrix([[1, 0], [1, 1], [0, 1]])  # U0, U0 + U1, U1
    assert f.bt == matrix([[1, -1, 0], [0, 1, 0], [0, -1, 1]])  # V0 - V1, V1, V2 - V1
    assert f.at == matrix([[1, 1, 0], [0, 1, 1]])


def test_f_4_5_is_the_interpolation_at_seven_points_and_infinity() -> None:
    f = cook_toom(4, 5, scale="monic")
    quarter = Fraction(1, 4)
    assert f.bt[0] == matrix([[-1, 0, 21 * quarter, 0, -21 * quarter, 0, 1, 0]])[0]
    assert f.bt[1] == matrix([[0, 1, 1, -17 * quarter, -17 * quarter, 1, 1, 0]])[0]
    assert f.bt[7] == matrix([[0, -1, 0, 21 * quarter, 0, -21 * quarter, 0, 1]])[0]
    assert f.at == transpose(matrix([[p**i for i in range(4)] for p in f.points[:-1]] + [[0, 0, 0, 1]]))  # type: ignore[operator]


@pytest.mark.parametrize(("m", "r"), [(1, 1), (1, 5), (4, 1)])
def test_one_output_or_one_tap_is_direct(m: int, r: int) -> None:
    f = cook_toom(m, r)
    assert f.is_direct
    assert f.products == m * r
    assert not cook_toom(2, 2).is_direct


def test_a_wrong_algorithm_is_found_out() -> None:
    f = cook_toom(2, 3)
    wrong = Bilinear(f.m, f.r, f.points, f.at, f.g, tuple(reversed(f.bt)))
    assert wrong.error() is not None
    assert "enters y[0]" in str(wrong.error())


@pytest.mark.parametrize(
    ("m", "r", "points", "words"),
    [
        (2, 3, default_points(3), "needs 4 points"),
        (2, 2, (Fraction(1), Fraction(1), INFINITY), "not distinct"),
        (0, 3, None, "at least 1"),
        (9, 9, None, "default points for 1 to 14"),
    ],
)
def test_refusals(m: int, r: int, points: tuple[Point, ...] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cook_toom(m, r, points)


@given(st.fractions(max_denominator=10**6).filter(bool))
def test_power_of_two_below(x: Fraction) -> None:
    power = power_of_two_below(x)
    assert power <= abs(x) < 2 * power
    assert power.numerator == 1 or power.denominator == 1
