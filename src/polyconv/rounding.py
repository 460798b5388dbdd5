"""Whole numbers of tiles."""

from __future__ import annotations


def ceil_div(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def round_up(value: int, multiple: int) -> int:
    """The next multiple."""
    return ceil_div(value, multiple) * multiple
