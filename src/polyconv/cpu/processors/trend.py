"""A plane through measured errors, near one place.

How wrong a cost model is changes with the sizes: what it forgets about caches grows with the channels, what it forgets
about borders with smaller maps. A mean over the neighbourhood of a problem takes such a trend for scatter, and lies
beside it where all neighbours are on one side. So a plane is fitted by weighted least squares, its slopes held to zero
unless there is evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

STIFFNESS = 0.3
"""What keeps a slope at zero: as much as so many problems at distance one that show none."""

Moments = Sequence[Sequence[float]]
"""Of neighbours, each a vector (1, steps along each axis of the plane from here, error): the weighed sum of its
products with itself. The lower triangle, so that the first is the sum of all weights."""


def plane_through(moments: Moments, expected: float, belief: float) -> tuple[float, float]:
    """The height of the plane here, and the weighed sum of squared errors beside it.

    ``expected`` is what to expect where there is nobody, and ``belief`` its weight.
    """
    *matrix, errors = moments
    count = matrix[0][0]
    mean = (belief * expected + errors[0]) / (belief + count)
    # Of what lies beside the mean: products with 1 and the steps, and the squares.
    beside = [product - mean * row[0] for product, row in zip(errors, matrix, strict=False)]
    squares = errors[-1] - mean * (errors[0] + beside[0])
    held = [[*row[:-1], row[-1] + (STIFFNESS if i else belief)] for i, row in enumerate(matrix)]
    plane = _solved(held, beside)
    for i, row in enumerate(matrix):
        squares += plane[i] * (plane[i] * row[i] - 2.0 * beside[i])
        for j in range(i):
            squares += 2.0 * plane[i] * plane[j] * row[j]
    return mean + plane[0], max(0.0, squares)


def _solved(matrix: Moments, vector: Sequence[float]) -> list[float]:
    """The solution of a symmetric, positive definite system, of which the lower triangle is given: by Cholesky."""
    lower: list[list[float]] = []
    found: list[float] = []
    for row, right in zip(matrix, vector, strict=True):
        made: list[float] = []
        for entry, above in zip(row, lower, strict=False):
            for a, b in zip(made, above, strict=False):
                entry -= a * b
            made.append(entry / above[-1])
        last = row[-1]
        for a, forward in zip(made, found, strict=True):
            last -= a * a
            right -= a * forward
        last **= 0.5
        made.append(last)
        lower.append(made)
        found.append(right / last)
    for i in range(len(found) - 1, -1, -1):
        known = found[i] = found[i] / lower[i][i]
        for j in range(i):
            found[j] -= lower[i][j] * known
    return found
