"""Segments, nesting and two axes against the definition of correlation, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from float32_toom import axis_schemes
from polyconv.algebra.cook_toom import INFINITY, default_points
from polyconv.algebra.segments import AxisScheme, Scheme2d, Segment, schemes

cut, direct = AxisScheme.cut, AxisScheme.direct
numbers = st.integers(-99, 99).map(lambda n: Fraction(n, 4))


def values(data: st.DataObject, count: int) -> list[Fraction]:
    return data.draw(st.lists(numbers, min_size=count, max_size=count))


@given(axis_schemes(), st.data())
def test_a_scheme_computes_the_correlation(scheme: AxisScheme, data: st.DataObject) -> None:
    x, w = values(data, scheme.span), values(data, scheme.r)
    expected = tuple(sum(w[j] * x[i + j] for j in range(scheme.r)) for i in range(scheme.outputs))
    assert scheme.apply(x, w) == expected
    assert scheme.bilinear()(x, w) == expected


@given(axis_schemes())
def test_a_scheme_is_proved_as_one_bilinear_algorithm(scheme: AxisScheme) -> None:
    whole = scheme.bilinear()
    assert whole.error() is None
    assert whole.products == scheme.products
    assert whole.inputs == scheme.span >= scheme.outputs + scheme.r - 1


@given(axis_schemes(), st.data())
def test_gradients_of_a_scheme(scheme: AxisScheme, data: st.DataObject) -> None:
    whole = scheme.bilinear()
    x, w, dy = values(data, scheme.span), values(data, scheme.r), values(data, scheme.outputs)
    assert whole.weight_gradient()(x, dy) == tuple(
        sum(dy[i] * x[i + j] for i in range(scheme.outputs)) for j in range(scheme.r)
    )
    dx = [Fraction(0)] * scheme.span
    for i in range(scheme.outputs):
        for j in range(scheme.r):
            dx[i + j] += w[j] * dy[i]
    assert whole.input_gradient()(dy, w) == tuple(dx)


@pytest.mark.parametrize("max_points", [4, 8, 10])
@pytest.mark.parametrize("r", range(1, 14))
def test_every_enumerated_scheme_is_right_and_useful(r: int, max_points: int) -> None:
    found = schemes(r, max_points)
    assert len(set(found)) == len(found)
    assert found[-1] == direct(r)
    for scheme in found[:-1]:
        assert scheme.reduction > 1
        assert scheme.inner.products <= max_points
        if scheme.products <= 32:
            assert scheme.bilinear().error() is None
    assert [s.multiplications for s in found] == sorted(s.multiplications for s in found)


def test_what_is_enumerated() -> None:
    names = {r: [str(scheme) for scheme in schemes(r)] for r in (1, 3, 5, 9)}
    assert names[1] == ["direct(1)"]
    assert {"F(2,3)", "F(4,3)", "F(6,3)"} <= set(names[3])
    assert {"F(4,5)", "F(2,5)"} <= set(names[5])
    assert names[9][0] == "F(4,5) taps 4+5 nested F(2,2)"
    assert {"F(4,5) taps 4+5", "F(4,3) taps 3+3+3", "F(3,3) taps 3+3+3 nested F(2,3)"} <= set(names[9])
    assert "F(6,5)" in map(str, schemes(5, max_points=10))


def test_tiles_are_shared_when_segments_advance_by_m() -> None:
    assert cut(4, 9, 4, 5).shared
    assert cut(4, 9, 4, 5).transforms == 1
    assert not cut(4, 9, 5, 4).shared
    assert cut(4, 9, 5, 4).transforms == 2
    assert cut(4, 9, 4, 5).tile_offsets == (0, 4)
    assert cut(4, 9, 4, 5, tiles=2).tile_offsets == (0, 4, 8)
    assert cut(4, 9, 4, 5, tiles=2).span == 16


# (schemes of both axes, factor by which multiplications decrease): the figures that the design relies on.
TABLE = [
    (cut(4, 5, 3, 2), cut(4, 9, 3, 3, 3), Fraction(10, 3)),
    (cut(4, 5), cut(4, 9, 4, 5), Fraction(45, 8)),
    (cut(4, 5), cut(4, 9, 4, 5, tiles=2), Fraction(15, 2)),
    (direct(5), cut(4, 9, 4, 5), Fraction(9, 4)),
    (cut(6, 5), cut(6, 9, 3, 3, 3), Fraction(27, 4)),
    (cut(2, 3), cut(2, 3), Fraction(9, 4)),
    (cut(4, 3), cut(4, 3), Fraction(4)),
    (cut(6, 3), cut(6, 3), Fraction(81, 16)),
]


@pytest.mark.parametrize(("h", "w", "reduction"), TABLE, ids=str)
def test_reductions(h: AxisScheme, w: AxisScheme, reduction: Fraction) -> None:
    scheme = Scheme2d(h, w)
    assert scheme.reduction == reduction
    assert scheme.multiplications == h.r * w.r / reduction
    assert h.bilinear().error() is None
    assert w.bilinear().error() is None


@given(st.data())
def test_two_axes(data: st.DataObject) -> None:
    small = st.sampled_from([direct(2), cut(2, 3), cut(2, 3, 2, 1, tiles=2), cut(3, 3, 2, 1), cut(2, 2), cut(3, 1)])
    h, w = data.draw(small), data.draw(small)
    x = [values(data, w.span) for _ in range(h.span)]
    k = [values(data, w.r) for _ in range(h.r)]
    expected = tuple(
        tuple(sum(k[a][b] * x[i + a][j + b] for a in range(h.r) for b in range(w.r)) for j in range(w.outputs))
        for i in range(h.outputs)
    )
    assert Scheme2d(h, w).apply(x, k) == expected


def test_printing() -> None:
    assert str(Scheme2d(direct(5), cut(4, 9, 4, 5, tiles=2))) == "direct(5) x F(4,5) taps 4+5 nested F(2,2)"
    assert Scheme2d(cut(4, 5), cut(4, 9, 4, 5)).points == 64


def test_other_points() -> None:
    points = (Fraction(0), Fraction(1), Fraction(-1), Fraction(1, 2), Fraction(-2), INFINITY)
    scheme = cut(4, 9, 3, 3, 3, points=points)
    assert scheme.inner.points == points
    assert scheme.bilinear().error() is None


def test_refusals() -> None:
    with pytest.raises(ValueError, match="do not cut 9 taps"):
        cut(4, 9, 4, 4)
    with pytest.raises(ValueError, match="do not cut 3 taps"):
        AxisScheme(2, 3, (Segment(0, 2), Segment(1, 1)))
    with pytest.raises(ValueError, match="multiples of m"):
        cut(4, 9, 5, 4, tiles=2)
    with pytest.raises(ValueError, match="needs 8 points"):
        cut(4, 9, 4, 5, points=default_points(6))
