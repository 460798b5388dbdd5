"""The scale of every output map, one by one, as docs/accuracy.md defines it, in all passes."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor

from polyconv.numerics import reference, scale
from polyconv.problem import Pass, Problem

X, W, GROUPS = (3, 8, 9, 11), (12, 2, 3, 5), 4
C, K = 2, 3
"""Channels per group, of input and output."""


def problem_of(kind: Pass) -> Problem:
    return Problem.make(kind, X, W, groups=GROUPS, padding=(1, 1, 2, 2), stride=(2, 1))


def tensors_of(problem: Problem) -> dict[str, Tensor]:
    """Every channel and every image has its own magnitude."""
    torch.manual_seed(0)
    shapes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape, "residual": problem.y_shape}
    found = {name: torch.randn(shape) * 10 ** (4 * torch.rand(*shape[:2], 1, 1)) for name, shape in shapes.items()}
    return {**found, "bias": torch.randn(problem.out_channels) * 100}


def mean_square(tensor: Tensor) -> float:
    return float(tensor.double().square().mean())


def of_one_map(problem: Problem, tensors: dict[str, Tensor], place: tuple[int, int]) -> float:
    """The definition for the map of an image and a channel, or of a filter and a channel in a weight gradient."""
    x, w, dy, (first, second) = tensors["x"], tensors["w"], tensors["y"], place
    if problem.kind is Pass.FPROP:
        group = second // K
        sums = 15 * C * mean_square(x[first, group * C : (group + 1) * C]) * mean_square(w[second])
        return (sums + mean_square(tensors["bias"][second]) + mean_square(tensors["residual"][first, second])) ** 0.5
    if problem.kind is Pass.DGRAD:
        filters = slice(second // C * K, (second // C + 1) * K)
        return (15 * K * mean_square(dy[first, filters]) * mean_square(w[filters, second % C])) ** 0.5
    pixels = dy[:, 0].numel()
    return (pixels * mean_square(x[:, first // K * C + second]) * mean_square(dy[:, first])) ** 0.5


@pytest.mark.parametrize("copied", [1, scale.COPIED], ids=["in parts", "at once"])
@pytest.mark.parametrize("kind", Pass, ids=str)
def test_every_map_has_the_scale_of_what_it_is_made_of(
    kind: Pass, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "COPIED", copied)
    problem = problem_of(kind)
    tensors = tensors_of(problem)
    output, shape = {
        Pass.FPROP: ("y", problem.y_shape),
        Pass.DGRAD: ("x", problem.x_shape),
        Pass.WGRAD: ("dw", problem.w_shape),
    }[kind]
    found = scale.scales(problem, tensors)
    assert found[output].shape == (*shape[:2], 1, 1)
    for place in torch.cartesian_prod(torch.arange(shape[0]), torch.arange(shape[1])).tolist():
        expected = of_one_map(problem, tensors, tuple(place))
        assert float(found[output][tuple(place)]) == pytest.approx(expected, rel=1e-12)
    if kind is Pass.WGRAD:
        per_filter = tensors["y"].double().square().sum((0, 2, 3)).sqrt()
        torch.testing.assert_close(found["db"], per_filter, rtol=1e-12, atol=0)


def test_a_map_of_zeros_has_to_be_exact() -> None:
    problem = problem_of(Pass.FPROP)
    tensors = {name: tensor for name, tensor in tensors_of(problem).items() if name in ("x", "w")}
    tensors["w"][5], tensors["x"][1, :C] = 0, 0
    exact, unit = reference.fprop(problem, tensors["x"], tensors["w"]), scale.scales(problem, tensors)["y"]
    zeros = (unit == 0)[:, :, 0, 0]
    assert zeros.sum() == 3 + K  # filter 5 over all images; one image of the first group
    assert not exact[zeros].any()
    deviation = torch.zeros_like(exact)
    assert scale.largest(deviation, unit) == 0
    deviation[0, 0, 0, 0] = float(unit[0, 0]) / 8
    assert scale.largest(deviation, unit) == 0.125
    deviation[0, 5, 0, 0] = 1e-30
    assert scale.largest(deviation, unit) == inf


@pytest.mark.parametrize(("deviation", "unit"), [(torch.nan, 1.0), (inf, 1.0), (1.0, inf), (1.0, torch.nan)])
def test_what_is_not_a_number_is_infinitely_wrong(deviation: float, unit: float) -> None:
    assert scale.largest(torch.tensor([0.0, deviation]), torch.tensor(unit)) == inf
    assert scale.largest(torch.tensor([0.0, 0.0]), torch.tensor(unit)) == 0
