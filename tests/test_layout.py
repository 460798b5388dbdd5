"""Parameter structs: the division that kernels rely on, and sizes that the device headers agree with."""

from __future__ import annotations

import ctypes

from hypothesis import given
from hypothesis import strategies as st

from polyconv.plan import layout


def quotient(dividend: int, by: layout.FastDivisor) -> int:
    return dividend if by.divisor == 1 else (dividend * by.multiplier >> 32) >> by.shift


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**31 - 1))
def test_fast_divisor_is_exact_below_2_to_31(dividend: int, divisor: int) -> None:
    by = layout.FastDivisor.of(divisor)
    assert quotient(dividend, by) == dividend // divisor


@given(st.integers(1, 2**31 - 1))
def test_fast_divisor_at_its_edges(divisor: int) -> None:
    by = layout.FastDivisor.of(divisor)
    last = (2**31 - 1) // divisor * divisor
    for dividend in (0, divisor - 1, divisor, last - 1, last, 2**31 - 1):
        assert quotient(dividend, by) == dividend // divisor


def test_structs_fit_the_driver_limit_for_kernel_parameters() -> None:
    structs = [v for v in vars(layout).values() if isinstance(v, type) and issubclass(v, ctypes.Structure)]
    assert structs
    assert all(ctypes.sizeof(struct) <= 4096 for struct in structs)


def test_slots_point_at_the_pointer_fields() -> None:
    (slot,) = layout.slots(layout.GatherParams, written=("y", 16))
    assert (slot.offset, slot.buffer, slot.byte_offset) == (32, "y", 16)
