"""How tensor cores add, in exact integers: what the emulator's results are compared with."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


def tensor_sum(a: Array, b: Array, c: float, *, block: int, extra_bits: int) -> float:
    """Products and c, a block of them after the other: 4 and 0 on a V100; on an A100 8 (TF32: 4) and 1."""
    for k in range(0, len(a), block):
        c = _block_sum(a[k : k + block], b[k : k + block], float(c), extra_bits)
    return c


def _block_sum(a: Array, b: Array, c: float, extra_bits: int) -> float:
    """Aligned to the largest exponent, truncated behind 24 bits and the extra ones, the sum rounded toward zero."""
    pairs = [(float(x), float(y)) for x, y in zip(a, b, strict=True)]
    exponents = [_exponent(x) + _exponent(y) for x, y in pairs if x and y] + ([_exponent(c)] if c else [])
    if not exponents:
        return 0.0
    last = max(exponents) - 23 - extra_bits
    unit = Fraction(2) ** last
    total = sum(int(Fraction(x) * Fraction(y) / unit) for x, y in pairs) + int(Fraction(c) / unit)
    longer = max(abs(total).bit_length() - 24, -149 - last, 0)
    cut = abs(total) >> longer << longer
    return float((cut if total > 0 else -cut) * unit)


def _exponent(x: float) -> int:
    return math.frexp(x)[1] - 1
