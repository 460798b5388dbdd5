"""Constants and source text of a fast axis against the exact algebra."""

from __future__ import annotations

import re

import pytest

from polyconv.cuda.planner.kernel_params import KERNELS
from polyconv.cuda.planner.winograd.axis import ToomAxis

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


def test_kernels_use_all_of_the_text() -> None:
    """Every emitted table and transform is used by some kernel."""
    emitted = re.findall(r"static POLYCONV_INLINE (?:constexpr int|void) (\w+)", AXES[0].text())
    device = "".join(header.read_text() for header in KERNELS.rglob("*.cuh"))
    assert emitted
    assert [name for name in emitted if not re.search(rf"\b(?:H|W|Axis)::{name}\b", device)] == []
