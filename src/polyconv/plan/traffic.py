"""The memory traffic that no kernel can avoid."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from ..problem import Pass, Problem


@lru_cache(maxsize=1024)
def moved_bytes(problem: Problem) -> int:
    """Every element of x and of y once: read or written, but for the rows of x that a large stride skips."""
    return int(problem.element_bytes * (prod(problem.x_shape) * _rows_read(problem) + prod(problem.y_shape)))


def _rows_read(problem: Problem) -> float:
    """Share of the rows of x that a pass touches: not all, if the stride is larger than the kernel."""
    height, top = problem.in_size[0], problem.padding[0]
    if problem.kind is Pass.DGRAD or problem.stride[0] == 1:
        return 1.0
    taps = [tap * problem.dilation[0] - top for tap in range(problem.kernel[0])]
    rows = {out * problem.stride[0] + tap for out in range(problem.out_size[0]) for tap in taps}
    return sum(0 <= row < height for row in rows) / height
