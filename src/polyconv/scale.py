"""What an error is relative to: the scale of every output map, which is the map's rms for independent data.

    scale^2 = reduction * mean(x^2) * mean(w^2) + bias^2 + mean(residual^2)

where x and w are what the map is made of: forward, one image, of that the channels of the map's group, and one filter;
in the input gradient, the same of ``dy`` and the weights of one input channel; in the weight gradient, one channel of
the input and one of ``dy``, over all images. Bias and residual are those of the map, in the forward pass.

This is the unit of every predicted error (docs/accuracy.md), so whatever measures one measures in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from .accuracy import reduction_of
from .problem import Pass, Problem

COPIED = 2**24
"""Elements of a tensor that are copied to float64 at once."""


def scales(problem: Problem, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The scales of the output maps of a pass: by output, in float64, to be broadcast against it.

    Args:
        problem: the pass.
        tensors: what it reads, by the names of :class:`~polyconv.backends.Backend`; others are not looked at.
    """
    (c, k), groups, reduction = problem.channels_per_group, problem.groups, reduction_of(problem)
    if problem.kind is Pass.FPROP:
        x, w = _mean_squares(tensors["x"]), _mean_squares(tensors["w"])
        squares = reduction * x.unflatten(1, (groups, c)).mean(2).repeat_interleave(k, 1) * w.mean(1)
        if "bias" in tensors:
            squares = squares + tensors["bias"].detach().double().square()
        if "residual" in tensors:
            squares = squares + _mean_squares(tensors["residual"])
        return {"y": _of_maps(squares, problem.rank)}
    dy = _mean_squares(tensors["y"])
    if problem.kind is Pass.DGRAD:
        w = _mean_squares(tensors["w"]).unflatten(0, (groups, k)).mean(1).flatten()
        squares = reduction * dy.unflatten(1, (groups, k)).mean(2).repeat_interleave(c, 1) * w
        return {"x": _of_maps(squares, problem.rank)}
    dy, x = reduction * dy.mean(0), _mean_squares(tensors["x"]).mean(0)
    squares = dy[:, None] * x.unflatten(0, (groups, c)).repeat_interleave(k, 0)
    return {"dw": _of_maps(squares, problem.rank), "db": dy.sqrt()}


def largest(deviation: Tensor, scale: Tensor) -> float:
    """The largest deviation of any element, each in units of the scale that it has.

    Infinite where one is not a number, and where there is one though the scale is none: a map of zeros is exact.
    """
    unit = scale.nan_to_num(nan=0.0, posinf=0.0)
    return float((deviation.nan_to_num(nan=inf, posinf=inf) / unit).nan_to_num(nan=0.0, posinf=inf).max())


def _mean_squares(tensor: Tensor) -> Tensor:
    """Over the axes: in float64, which holds every square, and in parts, for memory's sake."""
    axes = tuple(range(2, tensor.dim()))
    parts = tensor.detach().split(max(1, COPIED * len(tensor) // max(1, tensor.numel())))
    return torch.cat([part.double().square().mean(axes) for part in parts])


def _of_maps(squares: Tensor, rank: int) -> Tensor:
    return squares.sqrt().reshape(*squares.shape, *(1 for _ in range(rank)))
