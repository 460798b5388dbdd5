"""A plane through measured errors, near one place.

How wrong a cost model is changes with the sizes: what it forgets about caches grows with the channels, what it forgets
about borders with smaller maps. A mean over the neighbourhood of a problem takes such a trend for scatter, and lies
beside it where all neighbours are on one side. So a plane is fitted by weighted least squares, its slopes held to zero
unless there is evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

STIFFNESS = 0.3
"""What keeps a slope at zero: as much as so many problems at distance one that show none."""


class Neighbour(NamedTuple):
    """An error that was seen, how much it weighs here, and how far from here it was, along each axis of the plane."""

    weight: float
    steps: Sequence[float]
    error: float


def plane_through(neighbours: Sequence[Neighbour], expected: float, belief: float) -> tuple[float, float]:
    """The height of the plane here, and the weighed sum of squared errors beside it.

    ``expected`` is what to expect where there is nobody, and ``belief`` its weight.
    """
    count = belief + sum(one.weight for one in neighbours)
    mean = (belief * expected + sum(one.weight * one.error for one in neighbours)) / count
    axes = 1 + len(neighbours[0].steps)
    matrix = [[0.0] * axes for _ in range(axes)]
    vector = [0.0] * axes
    for weight, steps, error in neighbours:
        row = (1.0, *steps)
        for i, step in enumerate(row):
            weighed = weight * step
            vector[i] += weighed * (error - mean)
            for j in range(i + 1):
                matrix[i][j] += weighed * row[j]
    for i in range(axes):
        matrix[i][i] += STIFFNESS if i else belief
    height, *slopes = _solved(matrix, vector)
    height += mean
    return height, sum(weight * (error - height - _dot(slopes, steps)) ** 2 for weight, steps, error in neighbours)


def _solved(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """The solution of a symmetric, positive definite system, of which the lower triangle is given: by Cholesky."""
    lower: list[list[float]] = []
    forward: list[float] = []
    for i, row in enumerate(matrix):
        made: list[float] = []
        for j in range(i):
            made.append((row[j] - _dot(made, lower[j])) / lower[j][j])
        made.append((row[i] - _dot(made, made)) ** 0.5)
        lower.append(made)
        forward.append((vector[i] - _dot(made, forward)) / made[i])
    found = [0.0] * len(forward)
    for i in reversed(range(len(found))):
        beyond = _dot((lower[k][i] for k in range(i + 1, len(found))), found[i + 1 :])
        found[i] = (forward[i] - beyond) / lower[i][i]
    return found


def _dot(some: Iterable[float], others: Iterable[float]) -> float:
    """Of as many as both have."""
    return sum(a * b for a, b in zip(some, others, strict=False))
