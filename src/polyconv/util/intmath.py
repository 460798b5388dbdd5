"""Integer rounding."""

from __future__ import annotations


def ceil_div(value: int, by: int) -> int:
    """Quotient rounded up."""
    return -(-value // by)


def round_up(value: int, multiple: int) -> int:
    """Least multiple of ``multiple`` that is not below ``value``."""
    return ceil_div(value, multiple) * multiple
