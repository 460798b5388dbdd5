"""Scheme of one axis: a Cook-Toom algorithm, a cut of the taps into segments, and a nesting of the segments.

F(m, r) of a long kernel needs many points, and its error grows with each. The taps are therefore cut into segments that
suit an accurate F(m, taps), and the segments are summed before the single output transform:

    y = A^T sum_s (G w_s) * (B^T x_s),      x_s = the input tile, shifted by the first tap of segment s.

If every first tap is a multiple of m, the shifted tile of one segment is the unshifted tile of a neighbour, and one
input transform per tile serves all segments (9 taps as 4 + 5 with m = 4, not as 5 + 4).

The segments are then the taps of a correlation over tiles. With V_t the transformed tile t and U_s the transformed
segment s, the products of tile t sum to ``sum_s U_s V_(t + s)``, to which F(tiles, segments) applies: two segments over
two neighbouring tiles need 3 products per point instead of 4,

    y_0 = U_0 (V_0 - V_1) + P,   y_1 = P + U_1 (V_2 - V_1),   P = (U_0 + U_1) V_1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from ..util.intmath import ceil_div
from .cook_toom import Bilinear, Point, cook_toom
from .matrices import Matrix, Number, Vector, apply, kron, transpose


class Segment(NamedTuple):
    """Consecutive taps of a kernel."""

    first_tap: int
    taps: int


@dataclass(frozen=True, slots=True)
class AxisScheme:
    """F(m, longest segment) per segment, F(tiles, segments) across segments.

    Empty ``points`` mean the default of the inner algorithm. ``tiles = 1`` sums the segments; more tiles nest them,
    which requires segment s to start at tap ``s * m``.
    """

    m: int
    r: int
    segments: tuple[Segment, ...]
    tiles: int = 1
    points: tuple[Point, ...] = ()

    def __post_init__(self) -> None:
        covered = 0
        for first, taps in self.segments:
            if first != covered or taps < 1:
                raise ValueError(f"the segments {self.segments} do not cut {self.r} taps")
            covered += taps
        if covered != self.r:
            raise ValueError(f"the segments {self.segments} do not cut {self.r} taps")
        if self.nested and any(first != s * self.m for s, (first, _) in enumerate(self.segments)):
            raise ValueError(f"segments nest only where they begin at multiples of m = {self.m}: {self.segments}")
        needed = self.m + self.longest - 1
        if self.points and len(self.points) != needed:
            raise ValueError(f"F({self.m},{self.longest}) needs {needed} points, not {len(self.points)}")

    @classmethod
    def direct(cls, r: int) -> AxisScheme:
        """Direct summation: r multiplications per output, no transform."""
        return cls(1, r, (Segment(0, r),))

    @classmethod
    def cut(cls, m: int, r: int, *taps: int, tiles: int = 1, points: tuple[Point, ...] = ()) -> AxisScheme:
        """Scheme with segments of the given lengths, by default one of length r."""
        lengths = taps or (r,)
        firsts = [sum(lengths[:s]) for s in range(len(lengths))]
        return cls(m, r, tuple(map(Segment, firsts, lengths)), tiles, points)

    @property
    def longest(self) -> int:
        return max(taps for _, taps in self.segments)

    @property
    def nested(self) -> bool:
        return self.tiles > 1

    @property
    def is_direct(self) -> bool:
        return self.m == 1 and len(self.segments) == 1 and not self.points

    @property
    def inner(self) -> Bilinear:
        """Algorithm of one segment on one tile. A shorter segment uses the first columns of its G."""
        return cook_toom(self.m, self.longest, self.points or None)

    @property
    def outer(self) -> Bilinear:
        """Algorithm across segments (its "taps") and tiles (its "inputs"); F(1, segments) without nesting."""
        return cook_toom(self.tiles, len(self.segments))

    @property
    def outputs(self) -> int:
        """Outputs of one application of the scheme."""
        return self.m * self.tiles

    @property
    def products(self) -> int:
        """Multiplications for :attr:`outputs`."""
        return self.inner.products * self.outer.products

    @property
    def multiplications(self) -> Fraction:
        """Multiplications per output; direct summation has r."""
        return Fraction(self.products, self.outputs)

    @property
    def reduction(self) -> Fraction:
        """Multiplications of direct summation over those of the scheme."""
        return self.r / self.multiplications

    @property
    def shared(self) -> bool:
        """True if all segments read tiles of one grid, so that each tile is transformed once."""
        return all(first % self.m == 0 for first, _ in self.segments)

    @property
    def transforms(self) -> int:
        """Input transforms per tile of m outputs, with neighbours' transforms reused where possible."""
        return len({first % self.m for first, _ in self.segments})

    @property
    def tile_offsets(self) -> tuple[int, ...]:
        """Start of each input tile of ``outer`` relative to the first [elements]."""
        if self.nested:
            return tuple(t * self.m for t in range(self.outer.inputs))
        return tuple(first for first, _ in self.segments)

    @property
    def span(self) -> int:
        """Number of inputs read. It exceeds ``outputs + r - 1`` if the last segment is short. The extra inputs cancel
        exactly, so they may be any finite value, but not NaN or infinity; zero adds no rounding error."""
        return self.tile_offsets[-1] + self.inner.inputs

    @property
    def weight_transform(self) -> Matrix:
        """(products x r): rows by pass of ``outer``, then by point of ``inner``."""
        segments: list[Vector] = []
        zero = Fraction(0)
        for row_outer in self.outer.g:
            for row_inner in self.inner.g:
                parts = zip(row_outer, self.segments, strict=True)
                segments.append(tuple(c * row_inner[j] if c else zero for c, (_, taps) in parts for j in range(taps)))
        return tuple(segments)

    @property
    def input_transform(self) -> Matrix:
        """(products x span), rows as in :attr:`weight_transform`."""
        rows: list[Vector] = []
        for row_outer in self.outer.bt:
            for row_inner in self.inner.bt:
                row = [Fraction(0)] * self.span
                for c, offset in zip(row_outer, self.tile_offsets, strict=True):
                    for column, entry in enumerate(row_inner):
                        row[offset + column] += c * entry
                rows.append(tuple(row))
        return tuple(rows)

    @property
    def output_transform(self) -> Matrix:
        """(outputs x products). Kernels sum the passes first and apply the inner A^T once per tile."""
        return kron(self.outer.at, self.inner.at)

    def bilinear(self) -> Bilinear:
        """The scheme as one algorithm, whose ``error()`` proves segments and nesting."""
        return Bilinear(
            self.outputs, self.r, (), at=self.output_transform, g=self.weight_transform, bt=self.input_transform
        )

    def apply(self, x: Sequence[Number], w: Sequence[Number]) -> Vector:
        """Compute the outputs for ``span`` inputs and r taps exactly, in a kernel's order of operations."""
        inner, outer = self.inner, self.outer
        tiles = [apply(inner.bt, x[at : at + inner.inputs]) for at in self.tile_offsets]
        segments = []
        for first, taps in self.segments:
            segments.append(apply(inner.g, [*w[first : first + taps], *[Fraction(0)] * (self.longest - taps)]))
        points = [outer(v, u) for v, u in zip(transpose(tuple(tiles)), transpose(tuple(segments)), strict=True)]
        return tuple(y for tile in transpose(tuple(points)) for y in apply(inner.at, tile))

    def __str__(self) -> str:
        if self.is_direct:
            return f"direct({self.r})"
        text = f"F({self.m},{self.longest})"
        if len(self.segments) > 1:
            text += f" taps {'+'.join(str(taps) for _, taps in self.segments)}"
        if self.nested:
            text += f" nested F({self.tiles},{len(self.segments)})"
        return text


@dataclass(frozen=True, slots=True)
class Scheme2d:
    """Outer product of the schemes of two axes. Reductions multiply, and so do errors."""

    h: AxisScheme
    w: AxisScheme

    @property
    def multiplications(self) -> Fraction:
        """Multiplications per output and (input, output) channel pair."""
        return self.h.multiplications * self.w.multiplications

    @property
    def reduction(self) -> Fraction:
        return self.h.reduction * self.w.reduction

    @property
    def points(self) -> int:
        """Products of one pass, each an independent GEMM in a kernel."""
        return self.h.inner.products * self.w.inner.products

    def apply(self, x: Sequence[Sequence[Number]], w: Sequence[Sequence[Number]]) -> Matrix:
        """Compute the output tile for ``h.span`` rows of ``w.span`` inputs exactly."""
        rows, columns = self.h.bilinear(), self.w.bilinear()
        inputs = _both(rows.bt, columns.bt, x)
        weights = _both(rows.g, columns.g, w)
        products = [[p * q for p, q in zip(a, b, strict=True)] for a, b in zip(inputs, weights, strict=True)]
        return _both(rows.at, columns.at, products)

    def __str__(self) -> str:
        return f"{self.h} x {self.w}"


def _both(left: Matrix, right: Matrix, x: Sequence[Sequence[Number]]) -> Matrix:
    """``left @ x @ right^T``."""
    along_rows = tuple(apply(right, row) for row in x)
    return transpose(tuple(apply(left, column) for column in transpose(along_rows)))


@cache
def schemes(r: int, max_points: int = 8, max_segments: int = 4) -> tuple[AxisScheme, ...]:
    """Pareto front of the schemes that save multiplications, fewest multiplications first, direct summation last."""
    found = {s: _burdens(s) for s in _candidates(r, max_points, max_segments) if s.reduction > 1}

    def dominated(burdens: tuple[Number, ...]) -> bool:
        return any(
            other != burdens and all(a <= b for a, b in zip(other, burdens, strict=True)) for other in found.values()
        )

    kept = [scheme for scheme, burdens in found.items() if not dominated(burdens)]
    return (*sorted(kept, key=lambda s: (_burdens(s), s.m)), AxisScheme.direct(r))


def _burdens(scheme: AxisScheme) -> tuple[Number, ...]:
    """Costs of a scheme: arithmetic, error (points, nesting), input transforms, granularity, weight memory."""
    return (
        scheme.multiplications,
        scheme.inner.products,
        scheme.tiles,
        scheme.transforms,
        scheme.outputs,
        scheme.outer.products,
    )


def _candidates(r: int, max_points: int, max_segments: int) -> Iterator[AxisScheme]:
    for m in range(2, max_points):
        for longest in range(2, max_points - m + 2):
            if longest >= r:
                if longest == r:
                    yield AxisScheme.cut(m, r)
                break
            # Segments that advance by a multiple of m share tiles; others have lengths as equal as possible.
            if longest >= m:
                step = longest - longest % m
                count = ceil_div(r - longest, step) + 1
                lengths = [step] * (count - 1) + [r - (count - 1) * step]
            else:
                count = ceil_div(r, longest)
                lengths = [r // count + (s < r % count) for s in range(count)]
            if count > max_segments or max(lengths) != longest:
                continue
            yield AxisScheme.cut(m, r, *lengths)
            if longest >= m == lengths[0] and count <= 3:
                yield AxisScheme.cut(m, r, *lengths, tiles=2)
