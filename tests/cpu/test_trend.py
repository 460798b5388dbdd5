"""The plane fitted through measured errors near a place."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import exp
from typing import NamedTuple

import pytest
import torch

from polyconv.cpu.profiles import trend


class Neighbour(NamedTuple):
    """A measured error, its weight here, and its distance along each axis of the plane."""

    weight: float
    steps: Sequence[float]
    error: float


def plane_through(neighbours: Sequence[Neighbour], expected: float, belief: float) -> tuple[float, float]:
    sums: dict[str, float] = {}
    for i, one in enumerate("nckbse"):
        for j, other in enumerate("nckbse"[: i + 1]):
            vectors = ((weight, (1.0, *steps, error)) for weight, steps, error in neighbours)
            sums[(other + one).removeprefix("n") or "n"] = sum(w * v[i] * v[j] for w, v in vectors)
    return trend.plane_through(trend.Moments(**sums), expected, belief)


def neighbours(
    count: int, error: Callable[[Sequence[float]], float], side: Callable[[float], float] = float
) -> list[Neighbour]:
    """Normally distributed about the place, or on one side of it."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        steps = [side(draw.gauss(0.0, 1.0)) for _ in range(4)]
        found.append(Neighbour(exp(-sum(step**2 for step in steps) / 2.0), steps, error(steps)))
    return found


def test_a_trend_is_not_taken_for_scatter() -> None:
    sloped = neighbours(300, lambda steps: 0.3 + 0.5 * steps[0] - 0.2 * steps[3])
    height, squares = plane_through(sloped, expected=0.4, belief=0.1)
    assert height == pytest.approx(0.3, abs=0.01)
    assert squares / sum(one.weight for one in sloped) < 1e-3


def test_neighbours_on_one_side_only() -> None:
    """Their mean is biased; the plane extrapolates to the place in question."""
    above = neighbours(300, lambda steps: 0.5 * steps[0], side=abs)
    height, _ = plane_through(above, expected=0.0, belief=0.1)
    mean = sum(one.weight * one.error for one in above) / sum(one.weight for one in above)
    assert abs(height) < 0.2 * mean


def test_one_neighbour_shows_no_slope() -> None:
    height, squares = plane_through([Neighbour(0.5, [1.0, 0.0, 0.0, 0.0], 0.6)], expected=0.4, belief=0.1)
    assert 0.4 < height < 0.6
    assert squares < 0.5 * 0.2**2


def test_it_is_the_least_squares_plane() -> None:
    """The solution by elimination, and its residuals, beside those of the normal equations in torch."""
    near = neighbours(30, lambda steps: 0.2 + steps[0] - steps[1] * steps[2])
    height, squares = plane_through(near, expected=0.4, belief=0.1)
    mean = (0.1 * 0.4 + sum(one.weight * one.error for one in near)) / (0.1 + sum(one.weight for one in near))
    rows = torch.tensor([(1.0, *one.steps) for one in near], dtype=torch.float64)
    weights, errors = (torch.tensor(column, dtype=torch.float64) for column in list(zip(*near, strict=True))[::2])
    held = torch.diag(torch.tensor([0.1, *[trend.STIFFNESS] * 4], dtype=torch.float64))
    plane = torch.linalg.solve(rows.mT @ (weights[:, None] * rows) + held, rows.mT @ (weights * (errors - mean)))
    assert height == pytest.approx(mean + float(plane[0]), abs=1e-9)
    assert squares == pytest.approx(float((weights * (errors - mean - rows @ plane) ** 2).sum()), rel=1e-9)


def test_nobody_near() -> None:
    height, _ = plane_through([Neighbour(1e-6, [3.0, 3.0, 3.0, 3.0], 5.0)], expected=0.4, belief=0.1)
    assert height == pytest.approx(0.4, abs=1e-3)
