"""Pointwise engine (``csrc/cpu/pointwise``): convolutions on channels_last tensors as a matrix product.

Rows of the product are pixels, read and written in place; its columns are output channels. It sums over all taps, of
which a 1x1 convolution has one. The input gradient is such a product, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

from ...backend import Run
from ...numerics.prediction import error_of, reduction_of
from ...problem import Pass, Problem
from ...util.intmath import ceil_div
from .. import native
from ..device import CpuDevice
from ..operators import common_operators
from ..plan import CpuCandidate
from ..weight_cache import TransformedWeights
from .channel_lanes import READ_AGAIN

NAME = "pointwise"

MOST_TAPS = 1024
"""Largest number of taps: the kernels list an address of every pixel for each."""


def refusal(problem: Problem) -> str | None:
    if problem.kind is Pass.WGRAD:
        return "computes outputs, not weights"
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    if prod(problem.kernel) > MOST_TAPS:
        return f"of at most {MOST_TAPS} taps, not {problem.kernel[0]}x{problem.kernel[1]}"
    if problem.x_strides[1] != 1 or problem.y_strides[1] != 1:
        return "of channels_last tensors"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate."""
    why_not = refusal(problem)
    if why_not is not None:
        yield CpuCandidate(NAME, "direct", direct=True, refusal=why_not)
        return
    weight_cycles, cycles = (problem.groups * count for count in _cycles(problem, device.lanes))
    yield CpuCandidate(
        NAME,
        "direct",
        direct=True,
        cycles=weight_cycles + cycles,
        weight_cycles=weight_cycles,
        error=partial(_error, problem),
    )


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    return common_operators(chosen, problem, weights)


def _error(problem: Problem) -> float:
    count = reduction_of(problem)
    return error_of(problem, None, count, (native.longest_sum(NAME, 0, count),))


def _cycles(problem: Problem, lanes: int) -> tuple[float, float]:
    """Estimated cycles on one core for one group: to pack the weights, and for the rest. Fitted on a machine with
    AVX-512."""
    c, k = problem.channels_per_group if problem.kind is Pass.FPROP else problem.channels_per_group[::-1]
    terms, vectors, pixels = c * prod(problem.kernel), ceil_div(k, lanes), problem.batch * prod(problem.out_size)
    return 12.0 * terms * vectors, (0.6 * terms + 6.0) * vectors * pixels + READ_AGAIN * terms * vectors
