"""Repetition in a problem's data that follows from the strides of its tensors.

An expanded tensor (stride 0) or one with overlapping windows (``unfold``, ``as_strided``) holds fewer values than
elements, while the error model assumes independent data. If all channels of an image alias, an outlier occurs in each
of them; if the weights repeat in the same direction, products are equal and their roundings add up. The most common
case is the gradient of ``sum()``, a single value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import inf, prod

from ..problem import Pass, Problem
from .error_model import INDEPENDENT, Repetition

FEW = 5e3
"""Minimum number of outputs if one operand is a single value and few outputs differ: predictions are for the worst of
many calls."""


@lru_cache(maxsize=4096)
def repetition_of(problem: Problem) -> Repetition:
    """Repetition among the products that one output sums."""
    if problem.kind is Pass.WGRAD:
        return _of_weight_gradient(problem)
    forward = problem.kind is Pass.FPROP
    strides, shape = (problem.x_strides, problem.x_shape) if forward else (problem.y_strides, problem.y_shape)
    if all_apart(shape, strides) and all_apart(problem.w_shape, problem.w_strides):
        return INDEPENDENT
    c, k = problem.channels_per_group
    k_stride, c_stride, *w_taps = problem.w_strides
    # In an input gradient, pixels advance against the taps.
    sign = 1 if forward else -1
    x_taps = [sign * step * stride for step, stride in zip(problem.dilation, strides[2:], strict=True)]
    extents = (c if forward else k, *problem.kernel)
    x, w = (strides[1], *x_taps), (c_stride if forward else k_stride, *w_taps)
    one_number = _one_number(shape[1:], strides[1:])
    return Repetition(
        products=times(extents, x, w),
        x_channels=0 if one_number else extents[0] / (times(extents, x) / times(problem.kernel, x_taps)),
        w_channels=0 if _one_number(extents, w) else extents[0] / (times(extents, w) / times(problem.kernel, w_taps)),
        flat=times(problem.kernel, w_taps) > 1,
        outputs=_few(problem, problem.out_channels if forward else problem.in_channels) if one_number else None,
    )


def _of_weight_gradient(problem: Problem) -> Repetition:
    x_strides, y_strides = problem.x_strides, problem.y_strides
    if all_apart(problem.x_shape, x_strides) and all_apart(problem.y_shape, y_strides):
        return INDEPENDENT
    extents = (problem.batch, *problem.out_size)
    x = (x_strides[0], *(step * stride for step, stride in zip(problem.stride, x_strides[2:], strict=True)))
    dy = (y_strides[0], *y_strides[2:])
    x_one, dy_one = _one_number((problem.batch, *problem.in_size), x), _one_number(extents, dy)
    channels = problem.out_channels if x_one else problem.in_channels
    return Repetition(
        products=times(extents, x, dy),
        x_channels=0 if x_one else _different(extents, x),
        w_channels=0 if dy_one else _different(extents, dy),
        flat=times(problem.out_size, dy[1:]) > 1,
        outputs=_few(problem, channels) if x_one or dy_one else None,
    )


def _different(extents: Sequence[int], strides: Sequence[int]) -> float:
    """Distinct pixels summed by one weight's gradient, which bounds the distinct tiles; infinite if all differ."""
    repeats = times(extents, strides)
    return prod(extents) / repeats if repeats > 1 else inf


def _few(problem: Problem, channels: int) -> float:
    """Outputs that differ by more than a factor: one per channel of the other operand and per overlap with borders."""
    return max(FEW, channels * prod(problem.kernel))


def _one_number(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements are a single value in memory."""
    return all(stride == 0 or extent == 1 for extent, stride in zip(shape, strides, strict=True))


def all_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if all elements provably have distinct addresses: each stride exceeds the reach of the smaller ones."""
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return False
        reach += stride * (extent - 1)
    return True


def times(extents: Sequence[int], *operands: Sequence[int]) -> float:
    """Mean number of elements of a box that share an element's address in all operands at once (exact): the vector
    between them has offset 0 in every operand. n - |v| pairs of an axis of n elements are v apart."""
    if any(all_apart(extents, strides) for strides in operands):
        return 1.0
    axes = sorted((n, *steps) for n, *steps in zip(extents, *operands, strict=True) if n > 1)
    free = prod(n for n, *steps in axes if not any(steps))
    bound = [axis for axis in axes if any(axis[1:])]
    if not bound:
        return float(free)
    *others, (last, *last_steps) = bound
    pairs = 0
    # Enumerate the vectors along all axes but the longest, and solve for the step along that one.
    for vector in product(*(range(1 - n, n) for n, *_ in others)):
        ends = [sum(v * axis[1 + i] for v, axis in zip(vector, others, strict=True)) for i in range(len(operands))]
        back = _back(ends, last_steps)
        if back is not None and back < last:
            pairs += prod(n - abs(v) for v, (n, *_) in zip(vector, others, strict=True)) * (last - back)
    return float(free * pairs / prod(n for n, *_ in bound))


def _back(ends: Sequence[int], steps: Sequence[int]) -> int | None:
    """Number of steps, of either sign, that return every operand from its offset to 0; None if there is none."""
    counts = set()
    for end, step in zip(ends, steps, strict=True):
        if step == 0 and end != 0:
            return None
        if step:
            if end % step:
                return None
            counts.add(-end // step)
    return abs(counts.pop()) if len(counts) == 1 else None
