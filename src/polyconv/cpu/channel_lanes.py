"""The weight gradient, with channels in the lanes of vectors (``csrc/cpu/channel_gradient-inl.h``).

The fast form has the taps as outputs: a tile of dy plays the part of the taps, and the sum is over all tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

import torch

from ..problem import Pass, Problem
from . import native
from .candidates import Candidate, Engine, error_of, reduction_of
from .device import CpuDevice
from .schemes import DIRECT, FAST, KernelScheme, ceil_div

SCHEMES = (DIRECT, *FAST)
"""In the order of ``polyconv::GradientAlgorithm``."""


def refusal(problem: Problem, scheme: KernelScheme) -> str | None:
    """Why a scheme cannot run this problem, or None."""
    if problem.kind is not Pass.WGRAD:
        return "computes weights, not outputs"
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    if problem.stride != (1, 1) and not scheme.direct:
        return f"of unit stride, not {problem.stride[0]}x{problem.stride[1]}"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[Candidate]:
    """Every scheme."""
    for index, scheme in enumerate(SCHEMES):
        why_not = refusal(problem, scheme)
        if why_not is not None:
            yield Candidate(Engine.CHANNEL_LANES, str(scheme), index, scheme.direct, refusal=why_not)
            continue
        yield Candidate(
            Engine.CHANNEL_LANES,
            str(scheme),
            index,
            scheme.direct,
            cycles=problem.groups * gradient_cycles(problem, scheme, device),
            error=_error(problem, index),
        )


@lru_cache(maxsize=4096)
def _error(problem: Problem, index: int) -> float:
    sizes = [*problem.x_shape, *problem.w_shape, *problem.out_size]
    geometry = native.geometry_numbers(problem)
    blocks = torch.ops.polyconv_cpu.weight_gradient_blocks(sizes, geometry, [index])
    scheme = SCHEMES[index]
    count = reduction_of(problem) if scheme.direct else tile_count(problem, scheme)
    return error_of(problem, scheme.exact, count, tuple(blocks))


def tile_count(problem: Problem, scheme: KernelScheme) -> int:
    """Tiles of dy that are summed over."""
    tiles = [
        ceil_div(ceil_div(problem.out_size[axis], problem.dilation[axis]), scheme.outputs[axis])
        * problem.dilation[axis]
        for axis in range(2)
    ]
    return problem.batch * prod(tiles)


def gradient_cycles(problem: Problem, scheme: KernelScheme, device: CpuDevice) -> float:
    """Estimated cycles on one core, of one group. The factors were fitted on a machine with AVX-512."""
    c, k = problem.channels_per_group
    x_vectors, y_vectors = ceil_div(c, device.lanes), ceil_div(k, device.lanes)
    padded = min(
        x_vectors * ceil_div(k, device.tile_channels) * device.tile_channels,
        y_vectors * ceil_div(c, device.tile_channels) * device.tile_channels,
    )
    pixels = problem.batch * (prod(problem.in_size) * x_vectors + prod(problem.out_size) * y_vectors)
    pack = pixels * 10.0
    if scheme.direct:
        outputs = problem.batch * prod(problem.out_size)
        return pack + outputs * prod(problem.kernel) * padded * 0.6
    tiles, points = tile_count(problem, scheme), prod(scheme.points) * scheme.slots
    segments = scheme.segments(problem.kernel)
    products = tiles * segments * points * padded * 0.6
    transforms = tiles * points * (segments * x_vectors + y_vectors) * 3.0
    back = prod(scheme.points) * segments * c * y_vectors * 30.0
    return pack + products + transforms + back
