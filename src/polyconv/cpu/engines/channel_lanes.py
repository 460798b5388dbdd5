"""Engine with channels in the vector lanes (``csrc/cpu/channel_lanes``): weight gradient, small or channels_last maps.

In the weight gradient the taps are the outputs: a tile of dy takes the place of the taps, and the sum is over all
tiles. In a forward pass a pixel is a vector of channels, so lane use does not depend on the number of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import ceil, prod

from ...backend import Run
from ...numerics.prediction import Way, error_of, reduction_of
from ...problem import Extents, PaddingMode, Pass, Problem
from ...tuning_key import layout
from ...util.intmath import ceil_div, round_up
from .. import native
from ..device import CpuDevice
from ..operators import Instead, common_operators
from ..plan import CpuCandidate
from ..weight_cache import TransformedWeights
from .correlations import Correlation, correlations
from .schemes import KernelScheme, compiled, suited

NAME = "channel lanes"


WEIGHTS_IN_CACHE = 384 * 2**10
"""Transformed weights up to this size [bytes] are made once for all tiles."""
TILE_VECTORS = 4
"""Vectors of output channels in the widest register tile, the unit in which outputs are cut among threads."""
MANY_CHUNKS = 4
"""Chunks per thread from which on work is not cut further to be equal for all threads."""
FEW_CHANNELS = 64
"""Output channels of a register tile. If there are more, these are cut among threads, otherwise tiles are."""
READ_AGAIN = 16.0
"""Cycles per vector of weights read from beyond the core's caches."""


def schemes(kind: Pass) -> tuple[KernelScheme, ...]:
    """Schemes of a pass, by their numbers."""
    return compiled(_kernels(kind))


def _kernels(kind: Pass) -> str:
    return "gradient" if kind is Pass.WGRAD else "channel"


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """One candidate per scheme of the pass."""
    gradient = problem.kind is Pass.WGRAD
    taps = (problem.kernel,) if gradient else tuple([part.taps for part in correlations(problem)])
    for index, (scheme, too_long) in enumerate(suited(_kernels(problem.kind), taps)):
        why_not = _refusal(problem, scheme, too_long)
        if why_not is not None:
            yield CpuCandidate(NAME, scheme.name, index, scheme.direct, refusal=why_not)
        elif gradient:
            yield CpuCandidate(
                NAME,
                scheme.name,
                index,
                scheme.direct,
                cycles=problem.groups * gradient_cycles(problem, scheme, device),
                error=partial(_gradient_error, problem, index),
            )
        else:
            yield _forward_candidate(problem, index, scheme, device)


def prepare(
    chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None, instead: Instead | None = None
) -> Run:
    if problem.kind is not Pass.WGRAD:
        return common_operators(chosen, problem, weights, instead)
    geometry, algorithm = native.geometry_numbers(problem), [chosen.algorithm]
    gradient = native.operator("weight_gradient")
    return lambda t: gradient(t["x"], t["y"], t["dw"], t.get("db"), geometry, algorithm)


def takes_half(problem: Problem) -> bool:
    """True if the weight gradient packs half-precision tensors, which it widens then: of contiguous channels."""
    images = (problem.x_shape, problem.x_strides), (problem.y_shape, problem.y_strides)
    return (
        problem.kind is Pass.WGRAD
        and problem.rank == 2
        and problem.groups == 1
        and (not any(problem.padding) or problem.padding_mode is PaddingMode.ZEROS)
        and all(layout(*tensor) == "nhwc" for tensor in images)
        and layout(problem.w_shape, problem.w_strides) in ("nchw", "nhwc")
    )


def ways(chosen: CpuCandidate, problem: Problem) -> Iterator[Way]:
    """How output maps are summed by a fast algorithm; empty for direct summation and the weight gradient."""
    scheme = None if problem.kind is Pass.WGRAD else schemes(problem.kind)[chosen.algorithm].exact
    if scheme is not None:
        for part in correlations(problem):
            blocks = (native.longest_sum(NAME, chosen.algorithm, part.channels),)
            yield Way(scheme, part.channels, blocks, (part.taps[0], part.taps[1]))


def _refusal(problem: Problem, scheme: KernelScheme, too_long: str | None) -> str | None:
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    if scheme.direct:
        return None
    if problem.kind is not Pass.DGRAD and problem.stride != (1, 1):
        return f"of unit stride, not {problem.stride[0]}x{problem.stride[1]}"
    if problem.kind is not Pass.WGRAD and max(problem.kernel) > 3:
        return f"of at most 3x3 taps, not {problem.kernel[0]}x{problem.kernel[1]}"
    return too_long


def _tiles(batch: int, size: Extents, dilation: Extents, scheme: KernelScheme) -> int:
    """Number of tiles of an output."""
    (height, width), (d_h, d_w), (m_h, m_w) = size, dilation, scheme.outputs
    return batch * ceil_div(ceil_div(height, d_h), m_h) * d_h * ceil_div(ceil_div(width, d_w), m_w) * d_w


# ---- forward passes and input gradients


def _forward_candidate(problem: Problem, index: int, scheme: KernelScheme, device: CpuDevice) -> CpuCandidate:
    parts = _as_they_are(problem) if scheme.direct else correlations(problem)
    weight_cycles = cycles = 0.0
    for part in parts:
        count, tiles = problem.groups * part.times, _tiles(part.batch, part.size, part.dilation, scheme)
        chunks = _chunks(part, scheme, tiles, device.cores)
        weight_cycles += count * _weight_cycles(part, scheme, device, chunks)
        cycles += count * forward_cycles(part, scheme, device, tiles, chunks)
    return CpuCandidate(
        NAME,
        scheme.name,
        index,
        scheme.direct,
        cycles=weight_cycles + cycles,
        weight_cycles=weight_cycles,
        error=partial(_forward_error, problem, parts, index),
    )


def _as_they_are(problem: Problem) -> tuple[Correlation, ...]:
    """Correlations of direct summation, which handles a forward stride without splitting taps into channels."""
    if problem.kind is Pass.DGRAD:
        return correlations(problem)
    c, k = problem.channels_per_group
    return (Correlation(problem.batch, c, k, problem.out_size, problem.kernel, problem.dilation),)


def _forward_error(problem: Problem, parts: tuple[Correlation, ...], index: int) -> float:
    scheme = schemes(problem.kind)[index]
    counts = {part.channels * (prod(part.taps) if scheme.direct else 1) for part in parts}
    sums = (error_of(problem, scheme.exact, count, (native.longest_sum(NAME, index, count),)) for count in counts)
    return max(sums, default=0.0)


def forward_cycles(part: Correlation, scheme: KernelScheme, device: CpuDevice, tiles: int, chunks: int) -> float:
    """Estimated cycles on one core for one group, without the weights. Fitted on a machine with AVX-512."""
    x_vectors, y_vectors = ceil_div(part.channels, device.lanes), ceil_div(part.outputs, device.lanes)
    size, points = prod(part.size), prod(scheme.points)
    terms = part.channels * (prod(part.taps) if scheme.direct else points)
    # In a large map each channel of a row lies in a page of its own.
    per_input, per_output = (25.0, 30.0) if size >= 512**2 else (12.0, 20.0)
    per_transform = 0.0 if scheme.direct else tiles * points * 4.0
    pixels = part.batch * size
    read = (pixels * per_input + per_transform) * x_vectors
    made = (pixels * per_output + per_transform + 0.6 * tiles * terms) * y_vectors
    crowding = 0.8 if scheme.direct else 0.92 + 0.0036 * points
    reading, computing = _shares(part, scheme, chunks, y_vectors, device.cores)
    return crowding * (reading * read + computing * made) + READ_AGAIN * terms * y_vectors


def _shares(part: Correlation, scheme: KernelScheme, chunks: int, y_vectors: int, cores: int) -> tuple[float, float]:
    """Time of all cores until the last one is done, as a multiple of the time of one core: for reading the input, and
    for computing outputs. With few chunks, and not equally many per core, output channels are cut, too, and each part
    reads the chunk."""
    if chunks < MANY_CHUNKS * cores and chunks % cores == 0:
        count = _shared(part, scheme, chunks, cores)
        uneven = ceil_div(count, cores) * cores / count
        return uneven, uneven
    parts = max(1, min(cores, ceil_div(y_vectors, TILE_VECTORS))) if chunks < MANY_CHUNKS * cores else 1
    items = ceil_div(chunks * parts, cores)
    return ceil_div(items, parts) * cores / chunks, items * cores / (chunks * parts)


def _chunks(part: Correlation, scheme: KernelScheme, tiles: int, cores: int) -> int:
    """Number of chunks of tiles, the unit of work of a thread (``csrc/cpu/channel_lanes/grid.cc``)."""
    room = 4 * prod(scheme.points) * (part.channels + 96)
    units = 128 if scheme.direct else min(96.0, max(56.0, 1.2 * 2**20 / room))
    chunks = max(1, ceil(tiles / units))
    if chunks < MANY_CHUNKS * cores and part.outputs <= FEW_CHANNELS:
        return max(chunks, min(round_up(chunks, cores), _shared(part, scheme, chunks, cores)))
    return chunks


def _shared(part: Correlation, scheme: KernelScheme, chunks: int, cores: int) -> int:
    """Number of images that threads share if none is cut, otherwise of rows of tiles, or of their parts."""
    dilation = part.dilation[0]
    images = part.batch * dilation
    if max(chunks, cores) <= images:
        return images
    return max(chunks, images * ceil_div(ceil_div(part.size[0], dilation), scheme.outputs[0]))


def _weight_cycles(part: Correlation, scheme: KernelScheme, device: CpuDevice, chunks: int) -> float:
    """Estimated cycles to reorder or transform the weights of one group. Transformed weights larger than the cache are
    recomputed for each chunk and used at once, never stored."""
    points = prod(part.taps) if scheme.direct else prod(scheme.points)
    vectors = points * part.channels * ceil_div(part.outputs, device.lanes)
    if scheme.direct or 4 * device.lanes * vectors <= WEIGHTS_IN_CACHE:
        return 12.0 * vectors
    return max(4.0, 12.0 * chunks - READ_AGAIN) * vectors


# ---- the weight gradient


def _gradient_error(problem: Problem, index: int) -> float:
    scheme = schemes(problem.kind)[index]
    tiles = _tiles(problem.batch, problem.out_size, problem.dilation, scheme)
    count = reduction_of(problem) if scheme.direct else tiles
    return error_of(problem, scheme.exact, count, native.weight_gradient_blocks(problem, index))


def gradient_cycles(problem: Problem, scheme: KernelScheme, device: CpuDevice) -> float:
    """Estimated cycles on one core for one group. Fitted on a machine with AVX-512."""
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
        written = prod(problem.kernel) * c * y_vectors * 75.0
        return pack + outputs * prod(problem.kernel) * padded * 0.6 + written
    tiles = _tiles(problem.batch, problem.out_size, problem.dilation, scheme)
    points, segments = prod(scheme.points) * scheme.slots, scheme.segments(problem.kernel)
    products = tiles * segments * points * padded * 0.6
    transforms = tiles * points * (segments * x_vectors + y_vectors) * 3.0
    back = prod(scheme.points) * segments * c * y_vectors * 50.0
    return pack + (0.92 + 0.0025 * prod(scheme.points)) * (products + transforms) + back
