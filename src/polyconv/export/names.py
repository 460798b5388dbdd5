"""The names that an exported file has for the planner's things."""

from __future__ import annotations

from ..plan.toom import ToomAxis


def axis_name(axis: ToomAxis) -> str:
    """F(4,5) is ``F45``; with its taps in several segments ``F45x2``, or nested ``F45Nested``."""
    if axis.is_direct:
        return "Direct"
    several = "Nested" if axis.tiles > 1 else f"x{len(axis.segments)}" if len(axis.segments) > 1 else ""
    return f"F{axis.m}{axis.longest}{several}"
