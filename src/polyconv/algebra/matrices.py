"""Small exact matrices of fractions, immutable so that they can be cache keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import TypeAlias

Vector: TypeAlias = tuple[Fraction, ...]
Matrix: TypeAlias = tuple[Vector, ...]
Number: TypeAlias = Fraction | int


def matrix(rows: Iterable[Iterable[Number]]) -> Matrix:
    return tuple(tuple(Fraction(entry) for entry in row) for row in rows)


def identity(size: int) -> Matrix:
    return matrix([int(i == j) for j in range(size)] for i in range(size))


def transpose(a: Matrix) -> Matrix:
    return tuple(zip(*a, strict=True))


def apply(a: Matrix, x: Sequence[Number]) -> Vector:
    """Matrix-vector product."""
    return tuple(sum((c * e for c, e in zip(row, x, strict=True) if c), Fraction(0)) for row in a)


def kron(a: Matrix, b: Matrix) -> Matrix:
    """Kronecker product: ``a`` acts on the slow index, ``b`` on the fast one."""
    return tuple(tuple(p * q for p in row_a for q in row_b) for row_a in a for row_b in b)


def power_of_two_below(x: Fraction) -> Fraction:
    """Largest power of two that is at most ``|x|``, for non-zero ``x``."""
    x = abs(x)
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    power = Fraction(2) ** exponent
    return power if power <= x else power / 2


def is_dyadic(x: Fraction) -> bool:
    """True if ``x`` is an integer over a power of two, as every floating-point number is."""
    return x.denominator & (x.denominator - 1) == 0
