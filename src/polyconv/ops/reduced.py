"""Passes of extreme geometry on tensors: parts of the inputs, the ordinary pass on these, its result put in its place.

What is left out is known without computing: outputs that see no pixel are the bias and the epilogue, taps that meet
none have no gradient, and neither have pixels that no tap meets. See :mod:`polyconv.reduction`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..arguments import Geometry, suggests_channels_last
from ..epilogue import apply_epilogue, summed_per_channel, with_bias
from ..problem import Activation, PaddingMode, Pass, Problem, Strides
from ..reduction import AxisReduction, Reduction, reduce_geometry
from .layouts import Shape
from .problems import described, dgrad_problem, fprop_problem, wgrad_problem


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
    """The output. ``run`` takes input, weight and residual; ``allocate`` gives an output to fill."""
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
    """The gradient of the input. ``run`` takes the gradient of the output, the weight and the input's size."""
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
    """The gradients of weight and bias, in tensors for them; that of the bias is empty if it is not wanted.

    ``run`` takes the gradient, the input, the weight's size and whether a bias has a gradient.
    """
    bias = db.numel() > 0
    dw.zero_()
    if bias and not reduction.all_outputs:  # outputs that see no pixel have the bias
        bias, db = False, summed_per_channel(grad)
    if reduction.nothing:
        return dw, db
    part, sums = run(seen(reduction, grad), read(reduction, x), taps_size(reduction, dw.shape), bias)
    return _put(dw, part, [axis.taps for axis in reduction.axes]), sums if bias else db


def runs_as(problem: Problem) -> Problem | None:
    """What a backend is asked for in the place of a problem: pictures, of ordinary geometry; None if nothing is."""
    reduced = _reduced(problem)
    return None if reduced is None else reduced.as_picture()


def _reduced(problem: Problem) -> Problem | None:
    """The problem itself where it is ordinary, None if nothing is to be computed."""
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
        """A tensor without memory, to take parts of."""
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
    """Certain places of each axis: a view where they follow one another."""
    for dim, wanted in enumerate(places, start=2):
        if isinstance(wanted, range):
            tensor = tensor.narrow(dim, wanted.start, len(wanted))
        else:
            tensor = tensor.index_select(dim, _numbers(wanted).to(tensor.device))
    return tensor


def _numbers(places: Sequence[int]) -> Tensor:
    return torch.tensor(list(places), device="cpu")  # whatever torch's default device is


def taps(reduction: Reduction, w: Tensor) -> Tensor:
    """The part of the weight that takes part."""
    return _part(w, [axis.taps for axis in reduction.axes])


def taps_size(reduction: Reduction, w_size: Shape) -> Shape:
    return [*w_size[:2], *(len(axis.taps) for axis in reduction.axes)]


def seen(reduction: Reduction, y: Tensor) -> Tensor:
    """The part of an output, of its gradient or of a residual that sees pixels."""
    return _part(y, [axis.outputs for axis in reduction.axes])


def read_size(reduction: Reduction, x_size: Shape) -> Shape:
    return [*x_size[:2], *(axis.axis.extent for axis in reduction.axes)]


def _put(whole: Tensor, part: Tensor, places: Sequence[Sequence[int]]) -> Tensor:
    """``whole`` with a part of it, at certain places of each axis, replaced."""
    if all(isinstance(wanted, range) for wanted in places):
        _part(whole, places).copy_(part)
    else:
        grid = torch.meshgrid(*map(_numbers, places), indexing="ij")
        everything: tuple[Any, ...] = (slice(None), slice(None))
        whole[everything + tuple(numbers.to(whole.device) for numbers in grid)] = part
    return whole


def read(reduction: Reduction, x: Tensor) -> Tensor:
    """The input, with the pixels of gathered axes brought together."""
    for dim, axis in enumerate(reduction.axes, start=2):
        if axis.gathered:
            pixels = _pixels(axis)
            x = x.index_select(dim, pixels.clamp(min=0).to(x.device))
            if (pixels < 0).any():
                shape = [-1 if other == dim else 1 for other in range(x.dim())]
                x.masked_fill_((pixels < 0).to(x.device).view(shape), 0)
    return x


def _pixels(axis: AxisReduction) -> Tensor:
    """The pixel at each place of a gathered axis; -1 where a zero stands."""
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
    """The transpose of gathering: each pixel the sum of its places, always in the same order.

    ``index_add`` would sum in an order that a GPU chooses. Pixels that are seen equally often are summed at once.
    """
    pixels = _pixels(axis)
    order = pixels.argsort(stable=True)
    pixel, counts = pixels[order].unique_consecutive(return_counts=True)
    starts = counts.cumsum(0) - counts
    size = [*gathered.shape]
    size[dim] = axis.whole.extent
    result = gathered.new_zeros(size)
    for count in counts.unique().tolist():
        chosen = ((counts == count) & (pixel >= 0)).nonzero().flatten()
        places = order[starts[chosen, None] + torch.arange(count, device="cpu")].flatten().to(gathered.device)
        sums = gathered.index_select(dim, places).unflatten(dim, (len(chosen), count)).sum(dim + 1)
        result.index_copy_(dim, pixel[chosen].to(gathered.device), sums)
    return result
