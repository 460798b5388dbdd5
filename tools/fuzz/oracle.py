"""How far a result may be from the exact one: what docs/accuracy.md promises, and no more.

==========================  ==================================================================================
a direct sum                every element within (n + 2) roundings of the sum of its terms' magnitudes: always
even and uneven data        the plan's prediction, times what the error model says of the data's magnitudes
patterns                    the bound: the estimate does not cover what is the same in every tile or channel
denormal numbers            the bound, and what transforms lose below the smallest exponent, times what it meets
NaN, infinity               not beyond the tile that they are in
==========================  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from polyconv.algebra.segments import Scheme2d
from polyconv.arguments import Geometry
from polyconv.cpu import native
from polyconv.cpu.engines import aten
from polyconv.cpu.engines.schemes import KernelScheme, compiled
from polyconv.cpu.planner import CpuPlan
from polyconv.numerics import reference
from polyconv.numerics.error_model import TYPICAL, Magnitudes, error_bound, predicted_error
from polyconv.problem import Pass
from uneven_data import measure

SMALLEST = 2.0**-126
"""Below this an operation may lose everything."""
GROWTH = 256.0
"""Amplification of a loss inside a fast algorithm on its way to an output."""


def scheme_named(name: str) -> KernelScheme:
    """The native kernels' scheme of this name; direct summation for any other."""
    known = compiled("tile") if native.is_available() else ()
    return next((scheme for scheme in known if str(scheme) == name), KernelScheme(1, 1, 1, 1))


def positions(extent: int, out: int, stride: int, before: int, tap: int, dilation: int, mode: str) -> list[int]:
    """Positions that one tap reads along an axis, for every output; -1 outside the image. In Python's integers."""
    found = []
    for i in range(out):
        at = i * stride - before + tap * dilation
        if not 0 <= at < extent:
            if mode == "zeros":
                at = -1
            elif mode == "replicate":
                at = min(max(at, 0), extent - 1)
            elif mode == "circular":
                at %= extent
            else:
                at %= max(1, 2 * (extent - 1))
                at = min(at, 2 * (extent - 1) - at)
        found.append(at)
    return found


def _read(x: Tensor, dim: int, where: Sequence[int]) -> Tensor:
    index = torch.tensor([max(at, 0) for at in where])
    outside = torch.tensor([at < 0 for at in where]).reshape([-1 if d == dim else 1 for d in range(x.dim())])
    return x.index_select(dim, index).masked_fill(outside, 0.0)


def convolve(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """The definition, tap by tap: for any geometry, however wide."""
    top, bottom, left, right = geometry.padding
    if geometry.padding_mode != "zeros":
        x = x[..., max(-top, 0) : x.shape[2] - max(-bottom, 0), max(-left, 0) : x.shape[3] - max(-right, 0)]
        top, bottom, left, right = (max(side, 0) for side in geometry.padding)
    cropped = geometry._replace(padding=(top, bottom, left, right))
    height, width = cropped.out_size(x.shape[2:], w.shape[2:])
    n, (k, per_group) = x.shape[0], w.shape[:2]
    y = x.new_zeros(n, geometry.groups, k // geometry.groups, height, width)
    w = w.reshape(geometry.groups, k // geometry.groups, *w.shape[1:])
    for r in range(w.shape[3]):
        rows = positions(x.shape[2], height, geometry.stride[0], top, r, geometry.dilation[0], geometry.padding_mode)
        if max(rows, default=-1) < 0:
            continue
        read = _read(x, 2, rows)
        for s in range(w.shape[4]):
            at = positions(x.shape[3], width, geometry.stride[1], left, s, geometry.dilation[1], geometry.padding_mode)
            if max(at, default=-1) >= 0:
                pixels = _read(read, 3, at).reshape(n, geometry.groups, per_group, height, width)
                y = y + torch.einsum("ngchw,gkc->ngkhw", pixels, w[..., r, s])
    return y.reshape(n, k, height, width)


def exact(x: Tensor, w: Tensor, geometry: Geometry) -> Tensor:
    """Likewise, by torch if that needs no padded image too large for the memory."""
    reach = [max(geometry.padding), *geometry.stride, *geometry.dilation]
    if max(map(abs, reach)) > 64 or not x.numel() or not w.numel():
        return convolve(x, w, geometry)
    return reference.fprop(geometry, x, w)


@dataclass(frozen=True)
class FrozenMark:
    """Error limits of one pass that a plan computes from two operands."""

    plan: CpuPlan
    one: Tensor
    """The operand that is cut into tiles: input, or gradient in the input gradient. Both are float64."""
    other: Tensor
    reduction: int
    """Products per element by definition. The plan may count fewer: taps without overlap are dropped."""
    patterned: bool
    """True if an operand is of a kind that the estimate does not cover."""

    def allowed(self, expected: Tensor, magnitudes: Tensor) -> Tensor:
        """Allowed error of each element. ``magnitudes``: the same pass on absolute values."""
        problem, chosen = self.plan.problem, self.plan.chosen
        reduction = self.reduction
        unit = 2.0**-53 if problem.dtype == "float64" else 2.0**-24
        if chosen.engine == aten.NAME and aten.adds_in_float16(problem.dtype):
            unit = 2.0**-11
        longest = min(reduction, 2**20)
        # Below the smallest exponent errors are absolute.
        floor = 4 * SMALLEST * (longest + 2) if problem.dtype != "float64" else 0.0
        rigorous = 2 * (longest + 4) * unit * magnitudes + floor
        if problem.dtype == "float64":
            return rigorous  # the model describes float32
        scheme = scheme_named(chosen.form).exact
        found = measure(self.one.numpy(), self.other.numpy(), expected.numpy())
        scale = found.scale(reduction)
        # The transform's loss of one operand is multiplied by the other, however large.
        lost = floor if scheme is None else GROWTH * floor * max(1.0, found.x_max or 0.0, found.w_max or 0.0)
        if self.patterned:
            return rigorous if chosen.direct else torch.full_like(rigorous, self._bound(scheme, found) * scale + lost)
        form = "weight gradient" if problem.kind is Pass.WGRAD else "forward"
        uneven = predicted_error(scheme, reduction, form=form, magnitudes=found)  # type: ignore[arg-type]
        even = predicted_error(scheme, reduction, form=form, magnitudes=TYPICAL)  # type: ignore[arg-type]
        estimate = chosen.error * scale * max(1.0, uneven / even) + lost
        return rigorous.clamp(max=estimate) if chosen.direct else torch.full_like(rigorous, estimate)

    def _bound(self, scheme: Scheme2d | None, found: Magnitudes) -> float:
        """At most the possible number of tiles or channels: cuts by a stride or a border add to them."""
        problem, reduction = self.plan.problem, self.reduction
        if problem.kind is Pass.WGRAD or scheme is None:
            count = reduction
        else:
            (c, k), taps = problem.channels_per_group, (scheme.h.r, scheme.w.r)
            channels = k if problem.kind is Pass.DGRAD else c
            count = channels * prod(
                ceil(problem.kernel[i] / taps[i]) * min(problem.kernel[i], problem.stride[i]) for i in (0, 1)
            )
        form = "weight gradient" if problem.kind is Pass.WGRAD else "forward"
        return error_bound(scheme, reduction, form=form, count=count, magnitudes=found)  # type: ignore[arg-type]


def tile_reach(plan: CpuPlan | None, geometry: Geometry, kernel: Sequence[int]) -> tuple[int, int]:
    """Largest distance of an output with a pixel in its tile from an output that sees it, in outputs, along each axis.

    A tile reads for all of its outputs, and for all taps of whole segments.
    """
    scheme = scheme_named("" if plan is None else plan.chosen.form)
    if scheme.direct:
        return 0, 0
    segments = [ceil(ceil(kernel[i] / geometry.stride[i]) / scheme.taps[i]) for i in (0, 1)]
    reach = [scheme.outputs[i] + segments[i] * scheme.taps[i] if scheme.points[i] > 1 else 0 for i in (0, 1)]
    return reach[0], reach[1]


def reached(spoilt: Tensor, geometry: Geometry, w_shape: Sequence[int], reach: tuple[int, int]) -> Tensor:
    """Outputs that a non-finite pixel may affect: those that see it, and those with it in their tiles.

    The last tile extends past the output, where it reads the continued border.
    """
    size = geometry.out_size(spoilt.shape[2:], w_shape[2:])
    steps = [min(step, extent) for step, extent in zip(geometry.dilation, size, strict=True)]
    further = [reach[i] * steps[i] * geometry.stride[i] for i in (0, 1)]
    top, bottom, left, right = geometry.padding
    wider = geometry._replace(padding=(top, bottom + further[0], left, right + further[1]))
    spread = (convolve(spoilt.double(), torch.ones(tuple(w_shape), dtype=torch.float64), wider) != 0).double()
    for axis in (0, 1):
        # A tile of a dilated convolution has every d-th output; if its other taps overlap nothing, each output.
        spread = torch.maximum(*(_widened(spread, axis, reach[axis], step) for step in (steps[axis], 1)))
    return spread[..., : size[0], : size[1]] != 0


def _widened(marked: Tensor, axis: int, reach: int, step: int) -> Tensor:
    """The marked elements, dilated by ``reach`` steps."""
    window, around, apart = [1, 1], [0, 0], [1, 1]
    window[axis], around[axis], apart[axis] = 2 * reach + 1, reach * step, step
    padded = F.pad(marked, (around[1], around[1], around[0], around[0]))
    return F.max_pool2d(padded, window, 1, 0, apart)
