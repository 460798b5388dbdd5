"""What goes wrong while planning, in words for the person who asked."""

from __future__ import annotations


class PlanError(RuntimeError):
    """No kernel of polyconv can solve this problem; the message says why."""


def int32(value: int, what: str) -> int:
    """``value``, or an error that names it: the kernels hold it in 32 bits."""
    if not -(2**31) <= value < 2**31:
        raise PlanError(f"{what} is {value}; polyconv's CUDA kernels take at most {2**31 - 1}")
    return value
