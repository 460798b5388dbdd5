"""Cook-Toom (Winograd) algorithms for one-dimensional correlation, exact over fractions.

F(m, r) computes m outputs of a correlation with r taps,

    y[i] = sum_j w[j] * x[i + j],      i < m, j < r,

as ``y = A^T [(G w) * (B^T x)]`` with n = m + r - 1 multiplications instead of m * r. Where it comes from: the product
of two polynomials with m and r coefficients is found by evaluating both at n points, multiplying the values and
interpolating. Correlation is the transpose of that product with respect to one factor, so interpolation (a dense
matrix) moves to the input, and evaluation (powers of the points) moves to the output.

The same trilinear form ``sum w[j] x[i + j] dy[i]`` holds the two gradients: reading it with respect to ``w`` or ``x``
instead of ``dy`` only exchanges and transposes the three matrices (the transposition principle). So one set of points
serves all three passes, and the transformed input of the forward pass is the one that the weight gradient needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from functools import cache
from typing import Literal, TypeAlias

from polyconv.algebra.matrices import Matrix, Number, Vector, apply, identity, matrix, power_of_two_below, transpose


class Infinity(Enum):
    """The point at infinity: evaluating there means taking the leading coefficient, which costs nothing."""

    INFINITY = "inf"

    def __repr__(self) -> str:
        return "INFINITY"

    __str__ = __repr__


INFINITY = Infinity.INFINITY
Point: TypeAlias = Fraction | Infinity

Scale: TypeAlias = Literal["unit", "monic"]
Place: TypeAlias = Literal["g", "at", "bt"]

# Dyadic, so that A^T and B^T are exact in floating point; in pairs +p and -p, so that a transform computes the even and
# the odd part once for both; p beside 1/p, which keeps the powers in balance. After 1/2 comes 3/4 and not 4: in float32
# F(4,7), F(6,5) and F(8,3) then have a third of the error, the powers staying small.
_FINITE = tuple(map(Fraction, ("0", "1", "-1", "2", "-2", "1/2", "-1/2", "3/4", "-3/4", "3/2", "-3/2", "4", "-4")))


@dataclass(frozen=True, slots=True)
class Bilinear:
    """``y = at [(g w) * (bt x)]``: a correlation with ``m`` outputs and ``r`` taps in ``len(g)`` multiplications.

    ``points`` is empty for algorithms that are not an interpolation (direct ones, composed ones). ``bt`` may have more
    columns than the ``m + r - 1`` inputs that matter; :meth:`error` then proves that the others cancel.
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
        """Whether neither weights nor input need a transform: every product is one of the definition's."""
        return all(sum(map(bool, row)) == 1 and sum(row) == 1 for row in self.g + self.bt)

    def __str__(self) -> str:
        points = ", ".join(map(str, self.points))
        return f"F({self.m},{self.r})" + (f" at {points}" if points else "")

    def __call__(self, x: Sequence[Number], w: Sequence[Number]) -> Vector:
        """The m outputs, by this algorithm, exactly."""
        products = [u * v for u, v in zip(apply(self.g, w), apply(self.bt, x), strict=True)]
        return apply(self.at, products)

    def error(self) -> str | None:
        """None for a correct algorithm, else the first coefficient of the trilinear form that is wrong.

        An algorithm is right for every input when ``sum_k at[i,k] g[k,j] bt[k,l]`` is 1 for ``l = i + j`` and 0
        otherwise: finitely many identities between fractions, so this is a proof, not a test.
        """
        for i in range(self.m):
            for j in range(self.r):
                scale = [a * g[j] for a, g in zip(self.at[i], self.g, strict=True)]
                for column, found in enumerate(apply(transpose(self.bt), scale)):
                    if found != (column == i + j):
                        return f"x[{column}] w[{j}] enters y[{i}] with factor {found}"
        return None

    def weight_gradient(self) -> Bilinear:
        """``dw[j] = sum_i dy[i] x[i + j]``: a correlation with r outputs whose m "taps" are ``dy``.

        This is F(r, m) with the same points. ``bt`` is unchanged, so both passes share the transformed input, and what
        was in the denominators of ``g`` is applied last, once per weight.
        """
        return Bilinear(self.r, self.m, self.points, transpose(self.g), transpose(self.at), self.bt)

    def input_gradient(self) -> FullConvolution:
        """``dx[k] = sum_(i + j = k) w[j] dy[i]``, what this tile of outputs adds to the gradient of its inputs."""
        return FullConvolution(self.m, self.r, self.points, transpose(self.bt), self.g, transpose(self.at))


@dataclass(frozen=True, slots=True)
class FullConvolution:
    """``z = b [(g w) * (a v)]``: the product of polynomials, ``z[k] = sum_(i + j = k) w[j] v[i]``.

    Neighbouring tiles overlap in ``r - 1`` outputs and must be added. Where that is a nuisance, use the forward
    algorithm on ``dy`` with the taps in reverse order: it computes the same gradient, tile by tile.
    """

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
        """As :meth:`Bilinear.error`: it is the same trilinear form."""
        return Bilinear(self.m, self.r, self.points, transpose(self.a), self.g, transpose(self.b)).error()


def default_points(n: int) -> tuple[Point, ...]:
    """n points: 0, 1, -1, 2, -2, 1/2, -1/2, 3/4, ... and infinity, which is always the last."""
    if not 1 <= n <= len(_FINITE) + 1:
        raise ValueError(f"there are default points for 1 to {len(_FINITE) + 1} multiplications, not {n}")
    return (*_FINITE[: n - 1], INFINITY)


def _times(a: Vector, b: Vector) -> Vector:
    """The product of two polynomials, lowest power first."""
    product = [Fraction(0)] * (len(a) + len(b) - 1)
    for i, p in enumerate(a):
        for j, q in enumerate(b):
            product[i + j] += p * q
    return tuple(product)


def _powers(point: Point, count: int) -> Vector:
    """A polynomial with ``count`` coefficients is evaluated at the point by the scalar product with this."""
    if isinstance(point, Infinity):
        return tuple(Fraction(int(i == count - 1)) for i in range(count))
    return tuple(point**i for i in range(count))


def _interpolation(points: tuple[Point, ...]) -> list[tuple[Vector, Fraction]]:
    """For each point the polynomial that vanishes at all the others, monic, and its value at the point."""
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
    """F(m, r) at the given points (default: :func:`default_points`); direct where m or r is 1.

    A factor may move between the three matrices at each point. ``denominators`` says which one takes those that are not
    powers of two and so round: ``"g"`` for the forward pass and the input gradient, where weights are transformed once;
    ``"at"`` for the weight gradient, where the output transform is the rare one; ``"bt"`` to have them out of the way
    of both. ``scale="unit"`` multiplies each row of B^T by the power of two that brings its smallest entry to 1 (or
    just above), which changes no rounding error and leaves most multiplications out; ``"monic"`` keeps the
    interpolation polynomials as they are. At the point 0 ``"unit"`` also chooses the sign for which G takes ``w[0]`` as
    it is; elsewhere a sign in B^T would cost a negation and in G it costs nothing.
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
