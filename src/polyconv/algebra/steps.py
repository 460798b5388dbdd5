"""Operations of a kernel along one axis, in order: operand transforms, sums of products, output transform.

:func:`axis_steps` lowers an :class:`~polyconv.algebra.segments.AxisScheme`: inner transforms tile by tile, then the
nesting across tiles, and the reverse for the output. The error model propagates every rounding through these steps,
and the float32 simulation of the tests executes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from .emit import compile_matrix
from .matrices import Matrix, transpose
from .program import Builder, Op, Program
from .segments import AxisScheme

Form: TypeAlias = Literal["forward", "weight gradient"]
"""``forward`` includes the input gradient, which is the forward algorithm on ``dy`` with reversed taps."""


@dataclass(frozen=True, slots=True)
class AxisSteps:
    """Steps of one axis: transform both operands, multiply and accumulate, transform the accumulators."""

    at: Matrix
    g: Matrix
    bt: Matrix
    input: Program
    """``bt``: from the ``span`` inputs to the factors of the products."""
    weight: Program | None
    """``g``, for the other operand; None if it is transformed in double and rounded once, as weights are."""
    sums: tuple[int, ...]
    """Accumulator index of each product."""
    output: Program
    """``at`` with equal columns merged: from the accumulators to the outputs."""
    passes: int = 1
    """Accumulators summed in one sequence: with nested segments, kernels continue the sum of one pass in the next."""

    @property
    def taps(self) -> int:
        """Products per output of direct summation."""
        return len(self.g[0])

    @property
    def accumulators(self) -> int:
        return max(self.sums) + 1

    @property
    def shared(self) -> int:
        """Products per accumulator and channel (forward) or tile (weight gradient)."""
        return len(self.sums) // self.accumulators


@lru_cache(maxsize=1024)
def axis_steps(scheme: AxisScheme, form: Form = "forward") -> AxisSteps:
    builder = Builder(scheme.span)
    inner = scheme.inner
    tiles = [_append(builder, inner.bt, range(offset, offset + inner.inputs)) for offset in scheme.tile_offsets]
    to_products = builder.program(_across(builder, scheme.outer.bt, tiles))
    return _forward(scheme, to_products) if form == "forward" else _weight_gradient(scheme, to_products)


def _forward(scheme: AxisScheme, to_products: Program) -> AxisSteps:
    inner, outer, points, passes = scheme.inner, scheme.outer, scheme.inner.products, scheme.outer.products
    # The products of F(1, r) share one accumulator, and so do segments that are not nested.
    plain = inner.m == 1 and not inner.points
    kept = 1 if plain else points
    sums = [(q * kept if scheme.nested else 0) + (0 if plain else p) for q in range(passes) for p in range(points)]

    builder = Builder(max(sums) + 1)
    results: list[int | None] = list(range(kept))
    if scheme.nested:
        results = _across(builder, outer.at, [range(q * kept, (q + 1) * kept) for q in range(passes)])
    outputs: list[int | None] = []
    for first in range(0, len(results), kept):
        tile = results[first : first + kept]
        outputs += tile if plain else _append(builder, inner.at, tile)
    whole = scheme.bilinear()
    return AxisSteps(
        at=whole.at,
        g=whole.g,
        bt=whole.bt,
        input=to_products,
        weight=None,
        sums=tuple(sums),
        output=builder.program(outputs),
        passes=max(sum(map(bool, row)) for row in outer.at) if scheme.nested else 1,
    )


def _weight_gradient(scheme: AxisScheme, to_products: Program) -> AxisSteps:
    """Transposed matrices of the forward pass: A transforms dy to the products, G^T transforms the sums to taps."""
    inner, outer, points = scheme.inner, scheme.outer, scheme.inner.products
    builder = Builder(scheme.outputs)
    tiles = [
        _append(builder, transpose(inner.at), range(t * scheme.m, (t + 1) * scheme.m)) for t in range(scheme.tiles)
    ]
    from_dy = builder.program(_across(builder, transpose(outer.at), tiles))

    builder = Builder(scheme.products)
    segments = _across(
        builder, transpose(outer.g), [range(q * points, (q + 1) * points) for q in range(outer.products)]
    )
    taps: list[int | None] = []
    for s, (_, count) in enumerate(scheme.segments):
        taps += _append(builder, transpose(inner.g)[:count], segments[s * points : (s + 1) * points])
    whole = scheme.bilinear().weight_gradient()
    return AxisSteps(
        at=whole.at,
        g=whole.g,
        bt=whole.bt,
        input=to_products,
        weight=from_dy,
        sums=tuple(range(scheme.products)),
        output=builder.program(taps),
    )


def _append(builder: Builder, matrix: Matrix, values: Sequence[int | None]) -> list[int | None]:
    """Append the cheapest program for the matrix, applied to existing values of the builder."""
    program = compile_matrix(matrix)
    known = list(values)
    for op in program.ops:
        a, b = known[op.a], None if op.kind == "mul" else known[op.b]
        if a is None or (b is None and op.kind != "mul"):
            raise ValueError("a transform of a transform reads a value that is always zero")
        known.append(builder.op(Op(op.kind, a, -1 if b is None else b, op.c)))
    return [None if o is None else known[o] for o in program.outputs]


def _across(builder: Builder, matrix: Matrix, parts: Sequence[Sequence[int | None]]) -> list[int | None]:
    """Apply the matrix across parts (tiles, segments, passes), element by element. Returns the parts concatenated."""
    columns = [_append(builder, matrix, column) for column in zip(*parts, strict=True)]
    return [value for part in zip(*columns, strict=True) for value in part]
