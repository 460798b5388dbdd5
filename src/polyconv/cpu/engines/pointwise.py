"""Pointwise engine (``csrc/cpu/pointwise``): convolutions on channels_last tensors as a matrix product.

Rows of the product are pixels, read and written in place; its columns are output channels. It sums over all taps, of
which a 1x1 convolution has one. The input gradient is such a product, too. Groups of 2, 4 or 8 channels are computed
together in forward passes: their outputs share vectors.

In half precision it takes 1x1 convolutions of either layout: tiles of channels_last pixels, and blocks of others, are
widened to channels_last copies that stay in a core's cache, and their sums are rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from math import prod

from torch import Tensor

from ...backend import Run
from ...numerics.prediction import error_of, reduction_of, rounding_error
from ...problem import HALF_DTYPES, Pass, Problem
from ...tuning_key import layout
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

MOST_SHARED, MOST_TERMS = 8, 512
"""Most channels of a group whose outputs share a vector with those of others, and most terms of its sums."""

CONVERTED_CYCLES = 0.4
"""Cycles per element of a block that is widened or rounded, on its way from or to memory."""

LEAST_PLANE = 8
"""Least number of pixels of a plane whose pixels are not transposed: of fewer, a vector would have many runs."""

SINGLE_VECTOR_CYCLES = 0.76
"""Cycles per term of a pixel whose outputs are one vector: each product loads its own factor. With more vectors, which
share factors, they are 0.6 per vector."""

_UNIT_GEOMETRY = [1, 1, 0, 0, 1, 1, 1, 0]


def refusal(problem: Problem) -> str | None:
    if problem.kind is Pass.WGRAD:
        return "computes outputs, not weights"
    if problem.dtype in HALF_DTYPES:
        return _half_refusal(problem)
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    if prod(problem.kernel) > MOST_TAPS:
        return f"of at most {MOST_TAPS} taps, not {problem.kernel[0]}x{problem.kernel[1]}"
    if problem.x_strides[1] != 1 or problem.y_strides[1] != 1:
        return "of channels_last tensors"
    return None


def _half_refusal(problem: Problem) -> str | None:
    if problem.rank != 2 or problem.kernel != (1, 1) or problem.groups != 1 or any(problem.padding):
        return "of 1x1 convolutions without groups and padding in half precision"
    layouts = layout(problem.x_shape, problem.x_strides), layout(problem.y_shape, problem.y_strides)
    if not {*layouts} <= {"nchw", "nhwc"} or problem.residual:
        return "of dense tensors without a residual in half precision"
    if problem.stride != (1, 1) and (problem.kind is Pass.DGRAD or problem.x_strides[1] != 1):
        return "of strides in channels_last and forward only in half precision"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate. In half precision no profile corrects it: it competes with the other float32 kernels on
    copies, of which the products of ATen's take as long."""
    why_not = refusal(problem)
    if why_not is not None:
        yield CpuCandidate(NAME, "direct", direct=True, refusal=why_not)
        return
    calls = ceil_div(problem.groups, _groups_together(problem, device.lanes))
    weight_cycles, cycles = (calls * count for count in _cycles(problem, device.lanes))
    yield CpuCandidate(
        NAME,
        "direct",
        direct=True,
        cycles=weight_cycles + cycles,
        weight_cycles=weight_cycles,
        error=partial(_error, problem),
        profiled=problem.dtype == "float32",
    )


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    if problem.dtype in HALF_DTYPES:
        return partial(_run_half, problem, weights)
    return common_operators(chosen, problem, weights)


def _run_half(problem: Problem, weights: TransformedWeights | None, tensors: MutableMapping[str, Tensor]) -> None:
    w, forward = tensors["w"], problem.kind is Pass.FPROP
    bias = tensors.get("bias") if forward else tensors.pop("bias", None)  # of a transposed convolution
    x, y = (tensors["x"], tensors["y"]) if forward else (tensors["y"], tensors["x"])
    planes, packed = _has_planes(problem), None
    if weights is not None:
        key = [] if planes else _UNIT_GEOMETRY, native.plan_numbers(NAME, 0)
        transform = partial(_widened_rows if planes else _packed, w)
        packed = weights.of(x, w, y, *key, problem.frozen, tensors.get("owner"), transform)
    if packed is None:
        w = w.contiguous() if forward else w.contiguous().transpose(0, 1)
        packed = w.flatten(1) if planes else w  # the kernels pack it, in memory of theirs
    bias, activation = None if bias is None else bias.float(), native.activation_numbers(problem.activation)
    native.operator("pixels")(x, packed, bias, y, *problem.stride, *activation)


def _has_planes(problem: Problem) -> bool:
    """True if the kernels take pixels of channels that are planes (``csrc/cpu/pointwise/planes-inl.h``)."""
    height, width = problem.out_size
    are_planes = {problem.x_strides[2:], problem.y_strides[2:]} == {(width, 1)}
    return are_planes and problem.stride == (1, 1) and height * width >= LEAST_PLANE


def _widened_rows(w: Tensor) -> Tensor:
    return w.flatten(1).float().contiguous()


def _packed(w: Tensor) -> Tensor:
    """The weight in float32, as the kernels take it for pixels whose channels are contiguous."""
    wide = w.float()
    x, y = (wide.new_empty((1, channels, 1, 1)) for channels in (w.shape[1], w.shape[0]))
    packed: Tensor = native.operator("transform_weights")(x, wide, y, _UNIT_GEOMETRY, native.plan_numbers(NAME, 0))
    return packed


def _error(problem: Problem) -> float:
    count = reduction_of(problem)
    return error_of(problem, None, count, (native.longest_sum(NAME, 0, count),)) + rounding_error(problem)


def _groups_together(problem: Problem, lanes: int) -> int:
    """Groups whose outputs share a vector (``csrc/cpu/pointwise/groups-inl.h``); 1 if none do."""
    c, k = problem.channels_per_group
    few = problem.groups > 1 and 1 < c == k <= MOST_SHARED and lanes % c == 0
    if not few or problem.kind is not Pass.FPROP or c * prod(problem.kernel) > MOST_TERMS:
        return 1
    return lanes // c


def _cycles(problem: Problem, lanes: int) -> tuple[float, float]:
    """Estimated cycles on one core for one group, or for those that share a vector: to pack the weights, and for the
    rest. Fitted on a machine with AVX-512."""
    c, k = problem.channels_per_group if problem.kind is Pass.FPROP else problem.channels_per_group[::-1]
    together = _groups_together(problem, lanes)
    terms, pixels = c * prod(problem.kernel), problem.batch * prod(problem.out_size)
    vectors = ceil_div(together * k, lanes)
    per_term = 1.0 if together > 1 else 0.6 if vectors > 1 else SINGLE_VECTOR_CYCLES
    converted = prod(problem.x_shape) + prod(problem.y_shape) if problem.dtype in HALF_DTYPES else 0
    return (
        12.0 * terms * vectors,
        (per_term * terms + 6.0) * vectors * pixels + READ_AGAIN * terms * vectors + CONVERTED_CYCLES * converted,
    )
