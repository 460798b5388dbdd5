"""Local linear regression of measured errors.

The cost model's error changes with the sizes: cache effects grow with the channels, border effects with smaller maps. A
mean over a neighbourhood takes such a trend for scatter, and is biased if all neighbours are on one side. So a plane is
fitted by weighted least squares, with slopes regularised to zero.
"""

from __future__ import annotations

from collections.abc import Sequence

STIFFNESS = 0.3
"""Regularisation of a slope: weight of problems at distance one that show none."""

Moments = Sequence[Sequence[float]]
"""Weighted sum over neighbours of the outer product of (1, steps from here along each axis of the plane, error) with
itself. Lower triangle, so its first element is the total weight."""


def plane_through(moments: Moments, expected: float, belief: float) -> tuple[float, float]:
    """Returns the plane's value here, and the weighted sum of squared residuals. ``expected`` and ``belief`` are the
    prior's value and weight."""
    *matrix, errors = moments
    count = matrix[0][0]
    mean = (belief * expected + errors[0]) / (belief + count)
    # Moments of the deviations from the mean: with 1 and the steps, and their squares.
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
    """Solve a symmetric positive definite system, given its lower triangle, by Cholesky decomposition."""
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
