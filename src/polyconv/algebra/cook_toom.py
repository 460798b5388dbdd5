"""Cook-Toom (Winograd) algorithms for one-dimensional correlation, exact over fractions.

F(m, r) computes m outputs of a correlation with r taps,

    y[i] = sum_j w[j] * x[i + j],      i < m, j < r,

as ``y = A^T [(G w) * (B^T x)]`` with n = m + r - 1 multiplications instead of m * r. Derivation: the product of two
polynomials with m and r coefficients is evaluation of both at n points, pointwise multiplication and interpolation.
Correlation is the transpose of that product with respect to one factor, so interpolation (a dense matrix) moves to the
input, and evaluation (powers of the points) moves to the output.

Both gradients come from the trilinear form ``sum w[j] x[i + j] dy[i]``: differentiating it by ``w`` or ``x`` instead of
``dy`` permutes and transposes the three matrices (transposition principle). One set of points therefore serves all
three passes, and the weight gradient uses the transformed input of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from typing import Literal, TypeAlias

from .matrices import Matrix, Number, Vector, apply, identity, matrix, power_of_two_below, transpose


class Infinity(Enum):
    """The point at infinity: evaluation there is the leading coefficient and costs no operation."""

    INFINITY = "inf"

    def __repr__(self) -> str:
        return "INFINITY"

    __str__ = __repr__


INFINITY = Infinity.INFINITY
Point: TypeAlias = Fraction | Infinity

Scale: TypeAlias = Literal["unit", "monic"]
Place: TypeAlias = Literal["g", "at", "bt"]

# Dyadic, so that A^T and B^T are exact in floating point; in pairs +p and -p, which share the even and the odd part of
# a transform; p next to 1/p, which balances the powers. 3/4 follows 1/2, before 4: its powers stay small, which cuts
# the float32 error of F(4,7), F(6,5) and F(8,3) to a third.
_FINITE = tuple(map(Fraction, ("0", "1", "-1", "2", "-2", "1/2", "-1/2", "3/4", "-3/4", "3/2", "-3/2", "4", "-4")))


@dataclass(frozen=True, slots=True)
class Bilinear:
    """``y = at [(g w) * (bt x)]``: a correlation with ``m`` outputs and ``r`` taps in ``len(g)`` multiplications.

    ``points`` is empty for direct and composed algorithms. ``bt`` may have more columns than ``m + r - 1``; the inputs
    beyond cancel, which :meth:`error` proves.
    """

    m: int
    r: int
    points: tuple[Point, ...]
    at: Matrix
    g: Matrix
    bt: Matrix

    @property
    def products(self) -> int:
        return len(self.g)

    @property
    def inputs(self) -> int:
        return len(self.bt[0])

    @property
    def is_direct(self) -> bool:
        """True if neither weights nor input are transformed: each product is a weight times an input."""
        return all(sum(map(bool, row)) == 1 and sum(row) == 1 for row in self.g + self.bt)

    def __str__(self) -> str:
        points = ", ".join(map(str, self.points))
        return f"F({self.m},{self.r})" + (f" at {points}" if points else "")

    def __call__(self, x: Sequence[Number], w: Sequence[Number]) -> Vector:
        products = [u * v for u, v in zip(apply(self.g, w), apply(self.bt, x), strict=True)]
        return apply(self.at, products)

    def error(self) -> str | None:
        """First wrong coefficient of the trilinear form, None if there is none. An algorithm is correct for every input
        if ``sum_k at[i,k] g[k,j] bt[k,l]`` is 1 for ``l = i + j`` and else 0: a proof, in exact fractions, not a test.
        """
        for i in range(self.m):
            for j in range(self.r):
                scale = [a * g[j] for a, g in zip(self.at[i], self.g, strict=True)]
                for column, found in enumerate(apply(transpose(self.bt), scale)):
                    if found != (column == i + j):
                        return f"x[{column}] w[{j}] enters y[{i}] with factor {found}"
        return None

    def weight_gradient(self) -> Bilinear:
        """``dw[j] = sum_i dy[i] x[i + j]``: F(r, m) at the points of this algorithm, with the m "taps" ``dy``. Both
        passes share the transformed input; the denominators of ``g`` are applied last, once per weight."""
        return Bilinear(self.r, self.m, self.points, transpose(self.g), transpose(self.at), self.bt)

    def input_gradient(self) -> FullConvolution:
        """``dx[k] = sum_(i + j = k) w[j] dy[i]``: the contribution of one output tile to the input gradient."""
        return FullConvolution(self.m, self.r, self.points, transpose(self.bt), self.g, transpose(self.at))


@dataclass(frozen=True, slots=True)
class FullConvolution:
    """``z = b [(g w) * (a v)]``: polynomial product ``z[k] = sum_(i + j = k) w[j] v[i]``. Neighbouring tiles overlap in
    ``r - 1`` outputs, to be added; the forward algorithm on ``dy`` with reversed taps has disjoint output tiles."""

    m: int
    r: int
    points: tuple[Point, ...]
    b: Matrix
    g: Matrix
    a: Matrix

    def __call__(self, v: Sequence[Number], w: Sequence[Number]) -> Vector:
        products = [p * q for p, q in zip(apply(self.g, w), apply(self.a, v), strict=True)]
        return apply(self.b, products)

    def error(self) -> str | None:
        """:meth:`Bilinear.error` of the transposed algorithm, which has the same trilinear form."""
        return Bilinear(self.m, self.r, self.points, transpose(self.a), self.g, transpose(self.b)).error()


def default_points(n: int) -> tuple[Point, ...]:
    """The first n - 1 of 0, 1, -1, 2, -2, 1/2, -1/2, 3/4, ..., followed by infinity."""
    if not 1 <= n <= len(_FINITE) + 1:
        raise ValueError(f"there are default points for 1 to {len(_FINITE) + 1} multiplications, not {n}")
    return (*_FINITE[: n - 1], INFINITY)


def _times(a: Vector, b: Vector) -> Vector:
    product = [Fraction(0)] * (len(a) + len(b) - 1)
    for i, p in enumerate(a):
        for j, q in enumerate(b):
            product[i + j] += p * q
    return tuple(product)


def _powers(point: Point, count: int) -> Vector:
    """Row vector that evaluates a polynomial of ``count`` coefficients at the point."""
    if isinstance(point, Infinity):
        return tuple(Fraction(int(i == count - 1)) for i in range(count))
    return tuple(point**i for i in range(count))


def _interpolation(points: tuple[Point, ...]) -> list[tuple[Vector, Fraction]]:
    """For each point, the monic polynomial that vanishes at all other points, and its value at the point."""
    finite = [p for p in points if not isinstance(p, Infinity)]
    found = []
    for point in points:
        others = [p for p in finite if p != point]
        polynomial: Vector = (Fraction(1),)
        for other in others:
            polynomial = _times(polynomial, (-other, Fraction(1)))
        value = Fraction(1)
        if not isinstance(point, Infinity):
            for other in others:
                value *= point - other
        found.append((polynomial + (Fraction(0),) * (len(points) - len(polynomial)), value))
    return found


@cache
def cook_toom(
    m: int, r: int, points: tuple[Point, ...] | None = None, *, denominators: Place = "g", scale: Scale = "unit"
) -> Bilinear:
    """F(m, r) at the given points (default: :func:`default_points`); direct if m or r is 1.

    ``denominators`` names the matrix that takes the factors that are not powers of two and therefore round: ``"g"`` for
    the forward pass and the input gradient, where weights are transformed once; ``"at"`` for the weight gradient, where
    the output transform is the rarest; ``"bt"`` to keep them out of both. ``scale="unit"`` multiplies each row of B^T
    by the power of two that brings its smallest entry into [1, 2), which changes no rounding error and saves most
    multiplications; ``"monic"`` keeps the monic polynomials. At the point 0, ``"unit"`` also picks the sign for which G
    passes ``w[0]`` unchanged; at other points a sign costs a negation in B^T and nothing in G.
    """
    if m < 1 or r < 1:
        raise ValueError(f"F({m},{r}): outputs and taps are at least 1")
    if points is None:
        points = () if 1 in (m, r) else default_points(m + r - 1)
    if not points:
        if m == 1:
            return Bilinear(1, r, (), matrix([[1] * r]), identity(r), identity(r))
        if r == 1:
            return Bilinear(m, 1, (), identity(m), matrix([[1]] * m), identity(m))
    if len(points) != m + r - 1:
        raise ValueError(f"F({m},{r}) needs {m + r - 1} points, not {len(points)}")
    if len(set(points)) != len(points):
        raise ValueError(f"F({m},{r}): the points {', '.join(map(str, points))} are not distinct")

    outputs, weights, inputs = [], [], []
    for point, (polynomial, value) in zip(points, _interpolation(points), strict=True):
        factor = Fraction(1)
        if scale == "unit":
            factor = 1 / power_of_two_below(min(abs(c) for c in polynomial if c))
            factor = -factor if point == 0 and value < 0 else factor
        rest = 1 / (factor * value)
        at, g, bt = (rest if denominators == place else Fraction(1) for place in ("at", "g", "bt"))
        outputs.append(tuple(at * p for p in _powers(point, m)))
        weights.append(tuple(g * p for p in _powers(point, r)))
        inputs.append(tuple(bt * factor * c for c in polynomial))
    return Bilinear(m, r, points, transpose(tuple(outputs)), tuple(weights), tuple(inputs))
