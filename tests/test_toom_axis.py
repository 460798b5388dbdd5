"""The numbers and the text of a fast axis against the exact algebra."""

from __future__ import annotations

import pytest

from polyconv.plan.toom import ToomAxis

AXES = [
    ToomAxis(1, (3,)),
    ToomAxis(2, (3,)),
    ToomAxis(2, (2, 3)),
    ToomAxis(4, (3,)),
    ToomAxis(4, (5,)),
    ToomAxis(4, (4, 5)),
    ToomAxis(4, (4, 5), 2),
    ToomAxis(4, (4, 4, 3)),
]


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_the_numbers_are_the_schemes(axis: ToomAxis) -> None:
    scheme = axis.scheme()
    assert axis.taps == scheme.r
    assert axis.points == scheme.inner.products == scheme.inner.inputs
    assert axis.passes == scheme.outer.products
    assert axis.offsets == scheme.tile_offsets
    assert axis.span == scheme.span
    assert axis.outputs == scheme.outputs


def test_the_text_says_what_it_is() -> None:
    text = ToomAxis(4, (4, 5), 2).text()
    assert "// F(4,5) taps 4+5 nested F(2,2)" in text
    assert "struct Toom4_4_5_2 {" in text
    assert text.count("static POLYCONV_INLINE void") == 10
