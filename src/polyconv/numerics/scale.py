"""Scale of an output map, its rms for independent data: the unit of predicted and measured errors (docs/accuracy.md).

    scale^2 = reduction * mean(x^2) * mean(w^2) + bias^2 + mean(residual^2)

x and w are the operands of the map: forward, one filter and the channels of its group in one image; in the input
gradient, the weights of one input channel and ``dy`` likewise; in the weight gradient, one channel of the input and one
of ``dy``, over all images. Bias and residual count in the forward pass only.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from ..problem import Pass, Problem
from .prediction import reduction_of

COPIED = 2**24
"""Elements of a tensor copied to float64 at a time."""


def scales(problem: Problem, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scales of the output maps of a pass: float64 tensors by output name, broadcastable against the output.
    ``tensors`` are its operands by the names of :class:`~polyconv.backend.Backend`; others are ignored."""
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
    """Largest deviation of an element over its scale. Infinite for a NaN, and for a deviation where the scale is 0."""
    unit = scale.nan_to_num(nan=0.0, posinf=0.0)
    return float((deviation.nan_to_num(nan=inf, posinf=inf) / unit).nan_to_num(nan=0.0, posinf=inf).max())


def _mean_squares(tensor: Tensor) -> Tensor:
    """Mean squares over the spatial axes, in float64, which holds every square; in parts, to limit memory."""
    axes = tuple(range(2, tensor.dim()))
    parts = tensor.detach().split(max(1, COPIED * len(tensor) // max(1, tensor.numel())))
    return torch.cat([part.double().square().mean(axes) for part in parts])


def _of_maps(squares: Tensor, rank: int) -> Tensor:
    return squares.sqrt().reshape(*squares.shape, *(1 for _ in range(rank)))
