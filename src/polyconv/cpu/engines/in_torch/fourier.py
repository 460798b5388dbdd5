"""Fourier engine: long kernels by overlap-save with real FFTs (``torch.fft``), in all passes over one to three axes.

Stride and dilation are removed first: taps between those of a dilated kernel are zeros, and the pixels of each residue
class of the stride are additional channels. What remains is a correlation of unit stride. Its input is cut into blocks
of ``points`` pixels that overlap by the taps less one; spectra are multiplied and summed over channels.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from math import log2, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from ....backend import Run
from ....lowering.border import fold, has_border, pad, padded_size
from ....lowering.epilogue import apply_epilogue, per_channel, summed_per_channel
from ....numerics.prediction import fourier_error
from ....problem import Extents, Pass, Problem
from ....util.intmath import ceil_div
from ... import native
from ...device import CpuDevice
from ...plan import CpuCandidate
from ...weight_cache import TransformedWeights
from ..aten import narrow_gradient_doubt

NAME = "Fourier"

FEWEST_TAPS = 64
"""Kernels of fewer taps have faster algorithms."""

MOST_SPECTRA = 512 * 2**20
"""Largest size of the weight's spectra [bytes]."""

CHUNK = 2**22
"""Points transformed at a time: bounds the workspace to some 100 MiB."""

CALL_CYCLES = 900e3
"""Cost of the calls into torch."""

DOUBT = 1.5
"""Required advantage over other estimates: no profile has measurements of this engine."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The unit-stride correlation of a problem, and how it is cut."""

    taps: Extents
    """Taps along each axis, zeros of a dilation included, for one class of the stride."""
    points: Extents
    """Length of a transform along each axis."""
    outputs: Extents
    """Outputs of the correlation; in the weight gradient, pixels of dy."""

    @property
    def steps(self) -> Extents:
        """Outputs of a block."""
        return tuple(n - r + 1 for n, r in zip(self.points, self.taps, strict=True))

    @property
    def counts(self) -> Extents:
        """Number of blocks."""
        return tuple(map(ceil_div, self.outputs, self.steps))

    @property
    def sizes(self) -> Extents:
        """Extents of the padded input."""
        return tuple(b * m + r - 1 for b, m, r in zip(self.counts, self.steps, self.taps, strict=True))

    @property
    def axes(self) -> list[int]:
        """Axes that are transformed, as dimensions counted from the end."""
        rank = len(self.points)
        return [axis - rank for axis in range(rank) if self.points[axis] > 1] or [-1]

    @property
    def bins(self) -> int:
        last = self.axes[-1]
        return prod(self.points) // self.points[last] * (self.points[last] // 2 + 1)


# ---- planning


def refusal(problem: Problem) -> str | None:
    if problem.dtype != "float32":
        return f"computes in float32, not {problem.dtype}"
    if prod(problem.kernel) < FEWEST_TAPS:
        return f"of at least {FEWEST_TAPS} taps, not {prod(problem.kernel)}"
    if not torch.backends.mkl.is_available():
        return "torch is built without MKL, whose transforms are the fast ones"
    return None


def candidates(problem: Problem, device: CpuDevice) -> Iterator[CpuCandidate]:
    """The single candidate, with the blocks of least cost."""
    why_not = refusal(problem)
    blocks = None if why_not else _best(problem)
    if blocks is None:
        why_not = why_not or f"the spectra of the weight take more than {MOST_SPECTRA // 2**20} MiB"
        yield CpuCandidate(NAME, "FFT", refusal=why_not)
        return
    (weight_cycles, cycles), doubt = _cycles(problem, blocks), DOUBT * narrow_gradient_doubt(problem)
    yield CpuCandidate(
        NAME,
        f"FFT of {'x'.join(map(str, blocks.points))}",
        cycles=CALL_CYCLES + doubt * (weight_cycles + cycles),
        weight_cycles=doubt * weight_cycles,
        error=partial(_error, problem, blocks),
    )


def _error(problem: Problem, blocks: Blocks) -> float:
    gradient = problem.kind is Pass.WGRAD
    return fourier_error(problem, prod(blocks.points), prod(blocks.steps if gradient else problem.kernel))


def _stretched(problem: Problem) -> Extents:
    """Extents of the kernel, dilation included."""
    return tuple((k - 1) * d + 1 for k, d in zip(problem.kernel, problem.dilation, strict=True))


def _written(problem: Problem) -> list[range]:
    """Pixels of a class of the stride that an input gradient writes, of those that the kernel meets."""
    border = has_border(problem)
    before = (0,) * problem.rank if border else problem.padding[::2]
    axes = zip(before, padded_size(problem) if border else problem.in_size, problem.stride, strict=True)
    return [range(first // step, ceil_div(first + size, step)) for first, size, step in axes]


@lru_cache(maxsize=256)
def _best(problem: Problem) -> Blocks | None:
    taps = tuple(map(ceil_div, _stretched(problem), problem.stride))
    outputs = tuple(map(len, _written(problem))) if problem.kind is Pass.DGRAD else problem.out_size
    every = (Blocks(taps, points, outputs) for points in product(*map(_lengths, taps, outputs)))
    able = [one for one in every if 8 * one.bins * prod(_pairs(problem)) * problem.groups <= MOST_SPECTRA]
    return min(able, key=lambda one: sum(_cycles(problem, one)), default=None)


def _lengths(taps: int, outputs: int) -> list[int]:
    """Lengths of blocks worth comparing along an axis: the whole axis, or some multiples of the taps."""
    if taps == 1:
        return [1]
    whole = _fast_length(outputs + taps - 1)
    return sorted({min(whole, _fast_length(taps * times // 2)) for times in (3, 4, 6, 8, 12, 16, 32, 64)} | {whole})


def _fast_length(least: int) -> int:
    """Smallest 2^n, 5/4 2^n or 3/2 2^n that is not less: transforms of these lengths are fast."""
    power = max(4, 1 << (least - 1).bit_length())
    return next((n for n in (power * 5 // 8, power * 3 // 4) if n >= least and power >= 8), power)


def _pairs(problem: Problem) -> tuple[int, int]:
    """Channels of a group of the correlation: of the input, with the classes of the stride, and of the output."""
    c, k = problem.channels_per_group
    return c * prod(problem.stride), k


def _by_element(problem: Problem) -> bool:
    """True if spectra are multiplied elementwise; matrix products need a transposition, which pays with channels."""
    c, k = _pairs(problem)
    return c * k <= 6 * (c + k)


def _cycles(problem: Problem, blocks: Blocks) -> tuple[float, float]:
    """Estimated cycles of one core: for the weight's spectra, and for the rest. Fitted on a machine with AVX-512."""
    c, k = _pairs(problem)
    count, points, bins = problem.batch * prod(blocks.counts), prod(blocks.points), blocks.bins
    by_point = (2.0 if len(blocks.axes) == 1 else 6.0) + 0.35 * log2(points)
    transposed = 0.0 if _by_element(problem) else 22.0 * bins
    one = by_point * points + 4.0 * points + transposed
    weights = problem.groups * c * k * one
    products = problem.groups * c * k * bins * (3.5 * count if _by_element(problem) else 0.45 * count + 2.0)
    others = problem.groups * count * (c + k) * one + products
    if problem.kind is Pass.WGRAD:  # conjugated, and pair by pair
        others = 1.5 * others + (30e3 * c * k if _by_element(problem) else 0.0)
    return weights, others


# ---- running


def prepare(chosen: CpuCandidate, problem: Problem, weights: TransformedWeights | None) -> Run:
    blocks = _best(problem)
    assert blocks is not None
    if problem.kind is Pass.FPROP:
        return partial(_forward, problem, blocks, weights)
    return partial(_input_gradient if problem.kind is Pass.DGRAD else _weight_gradient, problem, blocks)


def _forward(
    problem: Problem, blocks: Blocks, weights: TransformedWeights | None, tensors: MutableMapping[str, Tensor]
) -> None:
    x, w, y = tensors["x"], tensors["w"], tensors["y"]
    (x, x_exponent), (scaled, w_exponent) = native.normalised(x), native.normalised(w.float())

    def transform() -> Tensor:
        return _weight_spectra(problem, blocks, scaled)

    spectra = None
    if weights is not None:
        plan = [-1, *blocks.points, *problem.stride, *problem.dilation, problem.groups]
        spectra = weights.of(x, w, y, [], plan, problem.frozen, tensors.get("owner"), transform)
    y_sum = _correlated(problem, blocks, _source(problem, blocks, x), transform() if spectra is None else spectra)
    native.rescale(y_sum, -x_exponent - w_exponent)
    if "bias" in tensors:
        y_sum += per_channel(tensors["bias"], y_sum.dim())
    y.copy_(apply_epilogue(y_sum, tensors.get("residual"), problem.activation))


def _input_gradient(problem: Problem, blocks: Blocks, tensors: MutableMapping[str, Tensor]) -> None:
    dx = tensors["x"]
    (dy, dy_exponent), (w, w_exponent) = native.normalised(tensors["y"]), native.normalised(tensors["w"])
    firsts = [part.start for part in _written(problem)]
    axes = list(zip(blocks.taps, firsts, blocks.sizes, dy.shape[2:], strict=True))
    source = _padded(dy, [(r - 1 - first, size - n - r + 1 + first) for r, first, size, n in axes])
    grad = _interleaved(_correlated(problem, blocks, source, _weight_spectra(problem, blocks, w)), problem.stride)
    border = has_border(problem)
    whole, before = (padded_size(problem), firsts) if border else (problem.in_size, problem.padding[::2])
    outer = zip(before, firsts, problem.stride, whole, grad.shape[2:], strict=True)
    grad = _padded(grad, [(f * s - b, size - n + b - f * s) for b, f, s, size, n in outer])
    dx.copy_(fold(problem, grad, dx) if border else grad)
    native.rescale(dx, -dy_exponent - w_exponent)


def _weight_gradient(problem: Problem, blocks: Blocks, tensors: MutableMapping[str, Tensor]) -> None:
    dw = tensors["dw"]
    (x, x_exponent), (dy, dy_exponent) = native.normalised(tensors["x"]), native.normalised(tensors["y"])
    (c, k), groups, total = _pairs(problem), problem.groups, None
    x = _source(problem, blocks, x)
    whole = [b * m for b, m in zip(blocks.counts, blocks.steps, strict=True)]
    grad = _padded(dy, [(0, size - n) for size, n in zip(whole, dy.shape[2:], strict=True)])
    of_x, of_y = _cut(x, blocks.points, blocks.steps), _cut(grad, blocks.steps, blocks.steps)
    for part in _chunks(blocks, of_x):
        one = _spectra(blocks, of_x[part]).unflatten(1, (groups, c))
        other = _spectra(blocks, of_y[part]).unflatten(1, (groups, k)).conj()
        if _by_element(problem):
            shares = [[(other[:, :, j] * one[:, :, i]).sum(0) for i in range(c)] for j in range(k)]
            found = torch.stack([torch.stack(each, 1) for each in shares], 1)
        else:
            a, b = (spectra.permute(1, 3, 0, 2) for spectra in (one, other.resolve_conj()))
            found = torch.stack([b[g].mT @ a[g] for g in range(groups)]).permute(0, 2, 3, 1)
        total = found if total is None else total + found
    assert total is not None
    sums = _inverse(blocks, total.flatten(0, 1))
    for dim, taps in enumerate(blocks.taps, start=2):
        sums = sums.narrow(dim, 0, taps)
    sums = _interleaved(sums, problem.stride)
    for dim, size in enumerate(_stretched(problem), start=2):
        sums = sums.narrow(dim, 0, size)
    native.rescale(dw.copy_(_every(sums, problem.dilation)), -x_exponent - dy_exponent)
    if "db" in tensors:
        native.rescale(tensors["db"].copy_(summed_per_channel(dy)), -dy_exponent)


def _source(problem: Problem, blocks: Blocks, x: Tensor) -> Tensor:
    """The padded input of the correlation, by classes of the stride."""
    if has_border(problem):
        x, before = pad(problem, x), (0,) * problem.rank
    else:
        before = problem.padding[::2]
    sides = [
        (first, size * step - n - first)
        for first, size, step, n in zip(before, blocks.sizes, problem.stride, x.shape[2:], strict=True)
    ]
    return _classes(_padded(x, sides), problem.stride)


def _weight_spectra(problem: Problem, blocks: Blocks, w: Tensor) -> Tensor:
    """Spectra of the weights, [group][output][input][bin] or, for matrix products, [group][bin][input][output]. Inputs
    and outputs are those of the pass; forward kernels are reversed, since a product of spectra convolves."""
    stretched = w
    if max(problem.dilation) > 1:
        stretched = w.new_zeros(*w.shape[:2], *_stretched(problem))
        _every(stretched, problem.dilation).copy_(w)
    whole = [r * s for r, s in zip(blocks.taps, problem.stride, strict=True)]
    sides = [(0, size - n) for size, n in zip(whole, stretched.shape[2:], strict=True)]
    classes = _classes(_padded(stretched, sides), problem.stride)
    if problem.kind is Pass.FPROP:
        classes = classes.flip(list(range(2, classes.dim())))
    spectra: Tensor = _spectra(blocks, classes).unflatten(0, (problem.groups, -1))
    if problem.kind is Pass.DGRAD:
        spectra = spectra.transpose(1, 2)
    return spectra.contiguous() if _by_element(problem) else spectra.permute(0, 3, 2, 1).contiguous()


def _correlated(problem: Problem, blocks: Blocks, source: Tensor, spectra: Tensor) -> Tensor:
    """The outputs of the correlation, cropped: images x channels x extents."""
    groups, rank, elementwise = problem.groups, problem.rank, _by_element(problem)
    channels = groups * (spectra.shape[1] if elementwise else spectra.shape[3])
    blocked = _cut(source, blocks.points, blocks.steps)
    result = source.new_empty(len(source), *blocks.counts, channels, *blocks.steps)
    for part in _chunks(blocks, blocked):
        one = _spectra(blocks, blocked[part]).unflatten(1, (groups, -1))
        if elementwise:
            found = one[:, :, None, 0] * spectra[:, :, 0]
            for i in range(1, one.shape[2]):
                found += one[:, :, None, i] * spectra[:, :, i]
            found = found.flatten(1, 2)
        else:
            rows = one.permute(1, 3, 0, 2).contiguous()
            found = torch.cat([rows[g] @ spectra[g] for g in range(groups)], 2).permute(1, 2, 0)
        sums = _inverse(blocks, found)
        for dim, (taps, step) in enumerate(zip(blocks.taps, blocks.steps, strict=True), start=2):
            sums = sums.narrow(dim, taps - 1, step)
        target = result[part]
        target.copy_(sums.reshape(target.shape))
    order = [0, 1 + rank, *(dim for axis in range(rank) for dim in (1 + axis, 2 + rank + axis))]
    whole = result.permute(order)
    for axis in range(rank):
        whole = whole.flatten(2 + axis, 3 + axis).narrow(2 + axis, 0, blocks.outputs[axis])
    return whole


def _chunks(blocks: Blocks, blocked: Tensor) -> Iterator[tuple[slice, ...]]:
    """Ranges of images and blocks, in order, of at most :data:`CHUNK` points but for a single step."""
    images, counts, rank = len(blocked), blocks.counts, len(blocks.counts)
    axis = max(range(rank), key=counts.__getitem__)
    channels = blocked.shape[1 + rank]
    steps = max(1, CHUNK // (channels * prod(blocks.points) * prod(counts) // counts[axis]))
    at_once = max(1, steps // counts[axis])
    for image in range(0, images, at_once):
        for first in range(0, counts[axis], steps):
            yield (slice(image, image + at_once), *(slice(None),) * axis, slice(first, first + steps))


def _cut(source: Tensor, sizes: Extents, steps: Extents) -> Tensor:
    """View of blocks: images x blocks x channels x extents of a block."""
    rank = len(sizes)
    for axis in range(rank):
        source = source.unfold(2 + axis, sizes[axis], steps[axis])
    return source.movedim(1, 1 + rank)


def _spectra(blocks: Blocks, values: Tensor) -> Tensor:
    """Spectra of blocks or kernels: [...][channel][bin], with the dimensions before the channels flattened."""
    rank = len(blocks.points)
    values = values.flatten(0, -rank - 2)
    found: Tensor = torch.fft.rfftn(values, [blocks.points[axis] for axis in blocks.axes], blocks.axes)
    return found.flatten(-rank)


def _inverse(blocks: Blocks, spectra: Tensor) -> Tensor:
    extents = list(blocks.points)
    extents[blocks.axes[-1]] = extents[blocks.axes[-1]] // 2 + 1
    sizes = [blocks.points[axis] for axis in blocks.axes]
    values: Tensor = torch.fft.irfftn(spectra.unflatten(-1, extents), sizes, blocks.axes)
    return values


def _padded(x: Tensor, sides: Sequence[tuple[int, int]]) -> Tensor:
    """``x`` with zeros before and after each axis; negative numbers crop."""
    if all(side == (0, 0) for side in sides):
        return x
    return F.pad(x, [side for pair in reversed(sides) for side in pair])


def _every(x: Tensor, steps: Extents) -> Tensor:
    """View of every step-th element along each axis."""
    for dim, step in enumerate(steps, start=2):
        x = x.unfold(dim, 1, step).squeeze(-1)
    return x


def _classes(x: Tensor, steps: Extents) -> Tensor:
    """Residue classes of each axis as additional channels, innermost."""
    if max(steps) == 1:
        return x
    for axis, step in enumerate(steps):
        x = x.unflatten(2 + 2 * axis, (-1, step))
    rank = len(steps)
    return x.permute(0, 1, *range(3, 3 + 2 * rank, 2), *range(2, 2 + 2 * rank, 2)).flatten(1, 1 + rank)


def _interleaved(x: Tensor, steps: Extents) -> Tensor:
    """Inverse of :func:`_classes`."""
    if max(steps) == 1:
        return x
    rank = len(steps)
    x = x.unflatten(1, (-1, *steps))
    x = x.permute(0, 1, *(dim for axis in range(rank) for dim in (2 + rank + axis, 2 + axis)))
    for axis in range(rank):
        x = x.flatten(2 + axis, 3 + axis)
    return x
