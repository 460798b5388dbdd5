"""C++ names of an exported file for objects of the planner."""

from __future__ import annotations

from ...cuda.planner.winograd.axis import ToomAxis


def axis_name(axis: ToomAxis) -> str:
    """Struct name of an axis: ``F45`` for F(4,5), ``F45x2`` for two summed segments, ``F45Nested`` if nested."""
    if axis.is_direct:
        return "Direct"
    several = "Nested" if axis.tiles > 1 else f"x{len(axis.segments)}" if len(axis.segments) > 1 else ""
    return f"F{axis.m}{axis.longest}{several}"
