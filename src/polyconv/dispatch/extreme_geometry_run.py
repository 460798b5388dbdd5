"""Passes of extreme geometry on tensors: slice the inputs, run the ordinary pass, write its result into place.

The rest needs no computation: an output that sees no pixel is bias plus epilogue; a tap that overlaps no pixel, or a
pixel that no tap overlaps, has a zero gradient. See :mod:`polyconv.lowering.extreme_geometry`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import Geometry, suggests_channels_last
from ..lowering.epilogue import apply_epilogue, summed_per_channel, with_bias
from ..lowering.extreme_geometry import AxisReduction, Reduction, reduce_geometry
from ..problem import Activation, PaddingMode, Pass, Problem, Strides
from .operands import Shape, described, dgrad_problem, fprop_problem, wgrad_problem


def reduced_fprop(
    reduction: Reduction,
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    allocate: Callable[[], Tensor],
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: Activation,
) -> Tensor:
    """Forward pass. ``run`` takes input, weight and residual; ``allocate`` returns an uninitialised output."""
    y = None
    if not reduction.all_outputs:
        y = with_bias(allocate(), bias)
        apply_epilogue(y, residual, activation)
        if reduction.nothing:
            return y
    part = run(read(reduction, x), taps(reduction, w), None if residual is None else seen(reduction, residual))
    return part if y is None else _put(y, part, [axis.outputs for axis in reduction.axes])


def reduced_dgrad(
    reduction: Reduction, run: Callable[[Tensor, Tensor, Shape], Tensor], grad: Tensor, w: Tensor, x_size: Shape
) -> Tensor:
    """Input gradient. ``run`` takes the output gradient, the weight and the input size."""
    if reduction.nothing:
        return grad.new_zeros(x_size)
    dx = run(seen(reduction, grad), taps(reduction, w), read_size(reduction, x_size))
    for dim, axis in enumerate(reduction.axes, start=2):
        if axis.gathered:
            dx = _scattered(dx, dim, axis)
    return dx


def reduced_wgrad(
    reduction: Reduction,
    run: Callable[[Tensor, Tensor, Shape, bool], tuple[Tensor, Tensor]],
    grad: Tensor,
    x: Tensor,
    dw: Tensor,
    db: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weight gradient, in ``dw``, and bias gradient, not computed if ``db`` is empty.

    ``run`` takes the output gradient, the input, the weight size and whether to compute the bias gradient.
    """
    bias = db.numel() > 0
    dw.zero_()
    if bias and not reduction.all_outputs:  # outputs that see no pixel depend on the bias, too
        bias, db = False, summed_per_channel(grad)
    if reduction.nothing:
        return dw, db
    part, sums = run(seen(reduction, grad), read(reduction, x), taps_size(reduction, dw.shape), bias)
    return _put(dw, part, [axis.taps for axis in reduction.axes]), sums if bias else db


def runs_as(problem: Problem) -> Problem | None:
    """Problem of ordinary geometry, 2-D for a signal, that a backend runs for ``problem``; None if it runs nothing."""
    reduced = _reduced(problem)
    return None if reduced is None else reduced.as_2d()


def _reduced(problem: Problem) -> Problem | None:
    """Problem of ordinary geometry: ``problem`` itself if it is ordinary, None if nothing is computed."""
    geometry = Geometry(
        problem.stride, problem.padding, problem.dilation, problem.groups, problem.padding_mode.value, problem.tolerance
    )
    reduction = reduce_geometry(problem.kind, problem.in_size, problem.kernel, geometry)
    if reduction is None:
        return problem
    if reduction.nothing:
        return None
    dtype: torch.dtype = getattr(torch, problem.dtype)

    def like(shape: Strides, strides: Strides) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    x, w = like(problem.x_shape, problem.x_strides), like(problem.w_shape, problem.w_strides)
    y = described(seen(reduction, like(problem.y_shape, problem.y_strides)))
    aligned, geometry = problem.vector_aligned, reduction.geometry
    if problem.kind is Pass.DGRAD:
        layout = (tuple(read_size(reduction, x.shape)), suggests_channels_last(*described(x)))
        return dgrad_problem(y, described(taps(reduction, w)), layout, None, dtype, aligned, geometry)[0]
    if problem.kind is Pass.WGRAD:
        layout = (tuple(taps_size(reduction, w.shape)), suggests_channels_last(*described(w)))
        bias = problem.bias and reduction.all_outputs
        return wgrad_problem(y, described(read(reduction, x)), layout, bias, dtype, aligned, geometry)[0]
    parts = described(read(reduction, x)), described(taps(reduction, w))
    channels = (problem.out_channels,) if problem.bias else None
    return fprop_problem(
        *parts, channels, problem.residual, problem.activation, problem.frozen, dtype, aligned, geometry
    )[0]


# ---- parts of tensors


def _part(tensor: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """Select indices of each spatial axis. A view if all are ranges, else a copy."""
    for dim, wanted in enumerate(places, start=2):
        if isinstance(wanted, range):
            tensor = tensor.narrow(dim, wanted.start, len(wanted))
        else:
            tensor = tensor.index_select(dim, _numbers(wanted).to(tensor.device))
    return tensor


def _numbers(places: Sequence[int]) -> Tensor:
    return torch.tensor(list(places), device="cpu")  # not on torch's default device


def taps(reduction: Reduction, w: Tensor) -> Tensor:
    """Part of the weight with the taps that are multiplied."""
    return _part(w, [axis.taps for axis in reduction.axes])


def taps_size(reduction: Reduction, w_size: Shape) -> Shape:
    return [*w_size[:2], *(len(axis.taps) for axis in reduction.axes)]


def seen(reduction: Reduction, y: Tensor) -> Tensor:
    """Part of an output, output gradient or residual that sees pixels."""
    return _part(y, [axis.outputs for axis in reduction.axes])


def read_size(reduction: Reduction, x_size: Shape) -> Shape:
    return [*x_size[:2], *(axis.axis.extent for axis in reduction.axes)]


def _put(whole: Tensor, part: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """Overwrite the given indices of each spatial axis of ``whole`` with ``part``. Returns ``whole``."""
    if all(isinstance(wanted, range) for wanted in places):
        _part(whole, places).copy_(part)
    else:
        grid = torch.meshgrid(*map(_numbers, places), indexing="ij")
        everything: tuple[Any, ...] = (slice(None), slice(None))
        whole[everything + tuple(numbers.to(whole.device) for numbers in grid)] = part
    return whole


def read(reduction: Reduction, x: Tensor) -> Tensor:
    """Input with the pixels of its gathered axes copied into place; other axes are unchanged."""
    for dim, axis in enumerate(reduction.axes, start=2):
        if axis.gathered:
            pixels = _pixels(axis)
            x = x.index_select(dim, pixels.clamp(min=0).to(x.device))
            if (pixels < 0).any():
                shape = [-1 if other == dim else 1 for other in range(x.dim())]
                x.masked_fill_((pixels < 0).to(x.device).view(shape), 0)
    return x


def _pixels(axis: AxisReduction) -> Tensor:
    """Pixel index at each position of a gathered axis; -1 in the zero padding."""
    whole, last = axis.whole, axis.whole.extent - 1
    by_tap = _numbers(axis.taps)[:, None] * whole.dilation - whole.before
    place = (by_tap + _numbers(axis.outputs) * whole.stride).flatten()
    if whole.mode is PaddingMode.REPLICATE:
        return place.clamp(0, last)
    if whole.mode is PaddingMode.CIRCULAR:
        return place % whole.extent
    if whole.mode is PaddingMode.REFLECT:
        folded = place % max(2 * last, 1)
        return torch.minimum(folded, 2 * last - folded)
    return place.masked_fill((place < 0) | (place > last), -1)


def _scattered(gathered: Tensor, dim: int, axis: AxisReduction) -> Tensor:
    """Transpose of the gather: sums the positions of each pixel in a fixed order, unlike ``index_add`` on a GPU."""
    pixels = _pixels(axis)
    order = pixels.argsort(stable=True)
    pixel, counts = pixels[order].unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    size = [*gathered.shape]
    size[dim] = axis.whole.extent
    result = gathered.new_zeros(size)
    for count in counts.unique().tolist():  # pixels with equally many positions are summed together
        chosen = ((counts == count) & (pixel >= 0)).nonzero().flatten()
        places = order[starts[chosen, None] + torch.arange(count, device="cpu")].flatten().to(gathered.device)
        sums = gathered.index_select(dim, places).unflatten(dim, (len(chosen), count)).sum(dim + 1)
        result.index_copy_(dim, pixel[chosen].to(gathered.device), sums)
    return result
