"""Forward pass and input gradient with tiles in the lanes of vectors (``csrc/cpu/fast_convolution-inl.h``).

A scheme computes tiles of outputs by one Cook-Toom algorithm per direction. Its cost is a sum over the stages that the
kernels have: gather the input, transform it, multiply, transform back, write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from ..algebra.segments import AxisScheme, Scheme2d
from ..problem import Pass, Problem
from .candidates import Candidate, Engine, error_of
from .correlations import Correlation, correlations
from .device import CpuDevice


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class TileScheme:
    """F(m, r) along H and along W; ``nested``: two segments of taps along W, combined by F(2, 2)."""

    index: int
    """The value of ``polyconv::Algorithm`` in C++."""
    m_h: int
    r_h: int
    m_w: int
    r_w: int
    nested: bool = False

    @property
    def taps(self) -> tuple[int, int]:
        return self.r_h, self.r_w + (self.m_w if self.nested else 0)

    @property
    def outputs(self) -> tuple[int, int]:
        return self.m_h, self.m_w * (2 if self.nested else 1)

    @property
    def points(self) -> tuple[int, int]:
        return self.m_h + self.r_h - 1, self.m_w + self.r_w - 1

    @property
    def direct(self) -> bool:
        return self.points == (1, 1)

    def segments(self, taps: tuple[int, int]) -> int:
        """Pieces that a kernel is cut into; each counts as an input channel of its own."""
        return _ceil_div(taps[0], self.taps[0]) * _ceil_div(taps[1], self.taps[1])

    @cached_property
    def exact(self) -> Scheme2d | None:
        """The same in exact arithmetic, which the error model follows; None for direct summation."""
        if self.direct:
            return None
        h = AxisScheme.direct(1) if self.r_h == 1 else AxisScheme.cut(self.m_h, self.r_h)
        if self.nested:
            w = AxisScheme.cut(self.m_w, self.taps[1], self.m_w, self.r_w, tiles=2)
        else:
            w = AxisScheme.direct(1) if self.r_w == 1 else AxisScheme.cut(self.m_w, self.r_w)
        return Scheme2d(h, w)

    def __str__(self) -> str:
        if self.direct:
            return "direct"
        nested = " in two nested segments" if self.nested else ""
        return f"F({self.m_h},{self.r_h}) x F({self.m_w},{self.r_w}){nested}"


SCHEMES = (
    TileScheme(0, 4, 5, 4, 5, nested=True),
    TileScheme(1, 4, 5, 4, 5),
    TileScheme(2, 4, 3, 4, 3),
    TileScheme(3, 6, 3, 6, 3),
    TileScheme(4, 2, 3, 2, 3),
    TileScheme(5, 1, 1, 4, 5, nested=True),
    TileScheme(6, 1, 1, 4, 5),
    TileScheme(7, 4, 5, 1, 1),
    TileScheme(8, 4, 3, 4, 5),
    TileScheme(9, 4, 3, 4, 5, nested=True),
    TileScheme(10, 1, 1, 6, 3),
    TileScheme(11, 6, 3, 1, 1),
)

CHANNELS_AT_A_TIME = 128
"""Products that are added in sequence before the sum is added to the sums before it."""


def refusal(problem: Problem) -> str | None:
    """Why no scheme can run this problem, or None."""
    if problem.kind is Pass.WGRAD:
        return "computes outputs, not weights"
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[Candidate]:
    """Every scheme."""
    why_not = refusal(problem)
    for scheme in SCHEMES:
        if why_not is not None:
            yield Candidate(Engine.TILE_LANES, str(scheme), scheme.index, scheme.direct, refusal=why_not)
            continue
        parts = correlations(problem)
        weight_cycles = problem.groups * sum(transform_cycles(part, scheme, device) for part in parts)
        cycles = problem.groups * sum(scheme_cycles(part, scheme, device) for part in parts)
        yield Candidate(
            Engine.TILE_LANES,
            str(scheme),
            scheme.index,
            scheme.direct,
            cycles=cycles + weight_cycles,
            weight_cycles=weight_cycles,
            error=max((_error(problem, part, scheme) for part in parts), default=0.0),
        )


@lru_cache(maxsize=4096)
def _error(problem: Problem, part: Correlation, scheme: TileScheme) -> float:
    count = part.channels * scheme.segments(part.taps)
    return error_of(problem, scheme.exact, count, (CHANNELS_AT_A_TIME,))


def scheme_cycles(part: Correlation, scheme: TileScheme, device: CpuDevice) -> float:
    """Estimated cycles on one core, but for the weights. The factors were fitted on a machine with AVX-512."""
    c, k, (height, width) = part.channels * scheme.segments(part.taps), part.outputs, part.size
    (d_h, d_w), (m_h, m_w), (n_h, n_w) = part.dilation, scheme.outputs, scheme.points
    bands = part.batch * d_h * _ceil_div(_ceil_div(height, d_h), m_h)
    units = _ceil_div(_ceil_div(width, d_w), m_w) * d_w
    vectors = bands * units / device.lanes
    # Transforms work on whole vectors of each band's units, products on units of many bands side by side.
    ragged = bands * _ceil_div(units, device.lanes)
    points, slots, blocks = n_h * n_w, 3 if scheme.nested else 1, 2 if scheme.nested else 1
    padded_k = _ceil_div(k, device.tile_channels) * device.tile_channels
    products = vectors * points * slots * c * padded_k * 0.45
    gather = ragged * n_h * m_w * c * 12
    expand = ragged * points * slots * c * 4
    invert = vectors * points * blocks * k * 5
    write = ragged * m_h * m_w * k * 6
    calls = bands * (100 * c + 60 * k)
    return products + gather + expand + invert + write + calls


def transform_cycles(part: Correlation, scheme: TileScheme, device: CpuDevice) -> float:
    """Estimated cycles to transform the weights of one group."""
    slots = 3 if scheme.nested else 1
    weights = prod(scheme.points) * slots * part.channels * scheme.segments(part.taps) * part.outputs
    return weights / device.lanes * 25
