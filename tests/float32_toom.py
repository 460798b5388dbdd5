"""The fast algorithms in float32, as kernels compute them: the reference for the error model.

Transforms run the emitted programs operation by operation; a multiply-add rounds once. Weights are transformed in
double and rounded once, as in the backends; in the weight gradient ``dy`` is data, transformed in float32 like the
input. Products are added to float32 accumulators in sequence, or by a tensor core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from polyconv.algebra.emit import compile_matrix
from polyconv.algebra.matrices import Matrix, matrix
from polyconv.algebra.program import Program
from polyconv.algebra.segments import AxisScheme, Scheme2d
from polyconv.algebra.steps import axis_steps
from polyconv.numerics.tensor_core import SplitProducts
from tensor_core_sums import SplitSums

Array = npt.NDArray[Any]


@st.composite
def axis_schemes(draw: st.DrawFn) -> AxisScheme:
    """Any cut of any kernel, nested where the cut allows it."""
    m = draw(st.integers(1, 4))
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        return AxisScheme.cut(m, sum(lengths), *lengths)
    lengths = [m] * draw(st.integers(0, 2)) + [draw(st.integers(1, 5))]
    return AxisScheme.cut(m, sum(lengths), *lengths, tiles=draw(st.integers(1, 3)))


def run(program: Program, x: Array, axis: int) -> Array:
    """A program along one axis, every operation rounded to float32 (a product of two is exact in double)."""
    values = list(np.moveaxis(x, axis, 0))
    for op in program.ops:
        a, c = values[op.a].astype(np.float64), float(np.float32(float(op.c)))
        b = 0.0 if op.kind == "mul" else values[op.b].astype(np.float64)
        values.append((a * c + (-b if op.kind in ("sub", "fms") else b)).astype(np.float32))
    zero = np.zeros_like(values[0])
    return np.moveaxis(np.stack([zero if o is None else values[o] for o in program.outputs]), 0, axis)


def both(h: Program, w: Program, x: Array, *, h_first: bool) -> Array:
    """A program along each of the first two axes."""
    return run(w, run(h, x, 0), 1) if h_first else run(h, run(w, x, 1), 0)


def fma(u: Array, v: Array, total: Array) -> Array:
    return (u.astype(np.float64) * v + total).astype(np.float32)


def chain(terms: Iterable[tuple[Array, Array]], total: Array) -> Array:
    """The products u v, summed in sequence."""
    for u, v in terms:
        total = fma(u, v, total)
    return total


Chain = Callable[[Iterable[tuple[Array, Array]], Array], Array]


def chain_of(products: SplitProducts | None, u: Array, v: Array) -> Chain:
    """A way to sum products of two tensors."""
    return chain if products is None else SplitSums(products, u, v).chain


def in_blocks(
    terms: list[tuple[Array, Array]], shape: tuple[int, ...], block: int | None, chain: Chain = chain
) -> Array:
    """Sums of ``block`` products each, added in sequence."""
    size = block or len(terms)
    total = np.zeros(shape, np.float32)
    for first in range(0, len(terms), size):
        total = total + chain(terms[first : first + size], np.zeros(shape, np.float32))
    return total


def _tiles(x: Array, h: AxisScheme, w: AxisScheme, tiles: tuple[int, int]) -> Array:
    """(..., H, W) -> (span of h, span of w, ..., tiles down, tiles across), zeros beyond the image."""
    need = [(count - 1) * s.outputs + s.span for count, s in zip(tiles, (h, w), strict=True)]
    more = [max(0, n - size) for n, size in zip(need, x.shape[-2:], strict=True)]
    x = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more[0]), (0, more[1])])
    down = np.arange(tiles[0])[:, None] * h.outputs + np.arange(h.span)
    across = np.arange(tiles[1])[:, None] * w.outputs + np.arange(w.span)
    found = x[..., down[:, None, :, None], across[None, :, None, :]]
    return np.moveaxis(found, (-2, -1), (0, 1))


def _count(outputs: tuple[int, int], scheme: Scheme2d) -> tuple[int, int]:
    return -(-outputs[0] // scheme.h.outputs), -(-outputs[1] // scheme.w.outputs)


def _double(exact: Matrix) -> Array:
    return np.array([[float(c) for c in row] for row in exact])


def forward(
    scheme: Scheme2d,
    x: Array,
    w: Array,
    *,
    block: int | None = None,
    h_first: bool = False,
    products: SplitProducts | None = None,
) -> Array:
    """(C, H, W) and (K, C, taps, taps) -> (K, H', W'), a valid correlation of stride 1.

    ``block`` counts channels. Two segments nested over two tiles of a row are summed as in the kernels: first the pass
    that both tiles share, then each tile's own on top of it.
    """
    h_steps, w_steps = axis_steps(scheme.h), axis_steps(scheme.w)
    size = (x.shape[1] - w.shape[2] + 1, x.shape[2] - w.shape[3] + 1)
    tiles = _count(size, scheme)
    v = both(h_steps.input, w_steps.input, _tiles(x, scheme.h, scheme.w, tiles), h_first=h_first)
    u = np.einsum("ah,kchw,bw->abkc", _double(h_steps.g), w.astype(np.float64), _double(w_steps.g)).astype(np.float32)

    chain = chain_of(products, u, v)

    # Order of products of an accumulator: channel by channel, and per channel the passes that share it.
    def passes(sums: tuple[int, ...]) -> list[list[int]]:
        members = [[p for p, s in enumerate(sums) if s == a] for a in range(max(sums) + 1)]
        return [list(column) for column in zip(*members, strict=True)]

    def summed(at_h: list[list[int]], at_w: list[list[int]], start: Array | float, channels: range) -> Array:
        pairs = [np.ix_(a, b) for a in at_h for b in at_w]
        shape = (len(at_h[0]), len(at_w[0]), len(w), *tiles)
        terms = ((u[at][:, :, :, c, None, None], v[at][:, :, None, c]) for c in channels for at in pairs)
        return chain(terms, np.broadcast_to(np.float32(start), shape))

    def block_of(channels: range) -> Array:
        at_h, at_w = passes(h_steps.sums), passes(w_steps.sums)
        if not scheme.w.nested or scheme.w.outer.at != matrix([[1, 1, 0], [0, 1, 1]]):
            return summed(at_h, at_w, 0.0, channels)
        first, common, second = np.split(np.array(at_w), 3, axis=1)
        total = summed(at_h, common.tolist(), 0.0, channels)
        return np.concatenate([summed(at_h, own.tolist(), total, channels) for own in (first, second)], axis=1)

    blocks = [range(c, min(c + (block or len(x)), len(x))) for c in range(0, len(x), block or len(x))]
    total = block_of(blocks[0])
    for channels in blocks[1:]:
        total = total + block_of(channels)
    if total.shape[1] == max(w_steps.sums) + 1:
        y = both(h_steps.output, w_steps.output, total, h_first=not h_first)
    else:
        inverse = compile_matrix(scheme.w.inner.at)
        halves = np.split(total, 2, axis=1)
        y = np.concatenate([both(h_steps.output, inverse, half, h_first=not h_first) for half in halves], axis=1)
    y = y.transpose(2, 3, 0, 4, 1).reshape(len(w), tiles[0] * scheme.h.outputs, tiles[1] * scheme.w.outputs)
    cropped: Array = y[:, : size[0], : size[1]]
    return cropped


def weight_gradient(scheme: Scheme2d, x: Array, dy: Array, *, block: int | None = None, h_first: bool = False) -> Array:
    """(N, C, H, W) and (N, K, H', W') -> (K, C, taps, taps), all tiles in one sequence (or in blocks)."""
    h_steps, w_steps = axis_steps(scheme.h, "weight gradient"), axis_steps(scheme.w, "weight gradient")
    tiles = _count((dy.shape[2], dy.shape[3]), scheme)
    v = both(h_steps.input, w_steps.input, _tiles(x, scheme.h, scheme.w, tiles), h_first=h_first)
    outputs = (tiles[0] * scheme.h.outputs, tiles[1] * scheme.w.outputs)
    dy = np.pad(dy, [(0, 0), (0, 0), (0, outputs[0] - dy.shape[2]), (0, outputs[1] - dy.shape[3])])
    dy = dy.reshape(*dy.shape[:2], tiles[0], scheme.h.outputs, tiles[1], scheme.w.outputs).transpose(3, 5, 0, 1, 2, 4)
    assert h_steps.weight is not None
    assert w_steps.weight is not None
    u = both(h_steps.weight, w_steps.weight, dy, h_first=h_first)
    where = [(n, i, j) for n in range(len(x)) for i in range(tiles[0]) for j in range(tiles[1])]
    terms = [(u[:, :, n, :, None, i, j], v[:, :, n, None, :, i, j]) for n, i, j in where]
    shape = (*v.shape[:2], dy.shape[3], x.shape[1])
    dw = both(h_steps.output, w_steps.output, in_blocks(terms, shape, block), h_first=not h_first)
    gradient: Array = dw.transpose(2, 3, 0, 1)
    return gradient


def direct(x: Array, w: Array, *, block: int | None = None, products: SplitProducts | None = None) -> Array:
    """(C, H, W) and (K, C, taps, taps) -> (K, H', W'), as a sequence of multiply-adds."""
    taps = w.shape[2:]
    size = (x.shape[1] - taps[0] + 1, x.shape[2] - taps[1] + 1)
    terms = [
        (w[:, c, i, j, None, None], x[None, c, i : i + size[0], j : j + size[1]])
        for c in range(len(x))
        for i in range(taps[0])
        for j in range(taps[1])
    ]
    return in_blocks(terms, (len(w), *size), block, chain_of(products, w, x))
