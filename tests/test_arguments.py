"""Equivalent forms of arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._prims_common import suggest_memory_format

from polyconv.arguments import Geometry, normalise, same_sides, suggests_channels_last


@pytest.mark.parametrize(
    "two", [2, (2,), [2], (2, 2), [2, 2], np.int64(2), torch.tensor(2), (np.int32(2), 2), torch.Size([2])]
)
def test_every_form_of_a_pair(two: Any) -> None:
    assert normalise((3, 3), stride=two).stride == (2, 2)
    assert normalise((3, 3), dilation=two).dilation == (2, 2)
    assert normalise((3, 3), padding=two).padding == (2, 2, 2, 2)


def test_forms_of_padding() -> None:
    assert normalise((3, 3), padding=(1, 2)).padding == (1, 1, 2, 2)
    assert normalise((3, 3), padding=(1, 2, -3, 4)).padding == (1, 2, -3, 4)
    assert normalise((3, 3), padding="valid", stride=2).padding == (0, 0, 0, 0)
    assert normalise((3, 4), padding="same", dilation=(2, 1)).padding == (2, 2, 1, 2)


def test_defaults() -> None:
    assert normalise((3, 3)) == Geometry()


@pytest.mark.parametrize(("kernel", "dilation"), [(k, d) for k in (1, 2, 3, 4, 7) for d in (1, 2, 3)])
def test_same_keeps_the_size(kernel: int, dilation: int) -> None:
    geometry = Geometry(padding=same_sides((kernel, 1), (dilation, 1)), dilation=(dilation, 1))
    assert geometry.out_size((9, 9), (kernel, 1)) == (9, 9)


@pytest.mark.parametrize(
    "mixed", [(1, 2.0), (1, "2"), (True, 1), (None, 1), {1, 2}, torch.tensor(1.5), torch.tensor([1, 2])]
)
def test_what_is_not_an_integer_is_named(mixed: Any) -> None:
    with pytest.raises(TypeError, match="dilation must be made of integers; got"):
        normalise((3, 3), dilation=mixed)


@given(st.tuples(*[st.integers(1, 3)] * 4), st.permutations(range(4)), st.booleans())
def test_memory_format_is_what_torch_would_say(shape: tuple[int, ...], order: list[int], skip: bool) -> None:
    inverse = [order.index(i) for i in range(4)]
    x = torch.empty([shape[i] for i in order]).permute(inverse)
    x = x[:, :, ::2] if skip else x
    expected = suggest_memory_format(x) == torch.channels_last
    assert suggests_channels_last(x.shape, x.stride()) == expected


def test_expanded_is_not_channels_last() -> None:
    assert not suggests_channels_last((2, 3, 4, 5), (0, 0, 0, 0))
