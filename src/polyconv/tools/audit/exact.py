"""Exact result of a pass in float64, and the magnitude of each element's terms, in bands of output rows.

PyTorch's float64 convolution lays out all products of a call in memory (im2col). Cutting an image into bands limits the
float64 memory to one image and the products of one band.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ...arguments import Geometry
from ...lowering.aten import convolution_backward
from ...lowering.border import fold, padded_size
from ...lowering.epilogue import summed_per_channel
from ...numerics import reference
from ...problem import Pass, Problem

PRODUCTS = 2**25
"""Products laid out at once: 256 MiB in float64."""

Tensors = Mapping[str, Tensor]
"""By the names of :class:`~polyconv.backend.Backend`."""
Place = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of one output of a pass."""

    output: str
    """``y``, ``x``, ``dw`` or ``db``."""
    place: Place
    exact: Tensor
    own: Tensor
    """Per element, the root of the sum of squares of its terms: products, bias, residual."""


def slabs(problem: Problem, tensors: Tensors) -> Iterator[Slab]:
    """All outputs of a pass, in parts."""
    yield from {Pass.FPROP: _outputs, Pass.DGRAD: _input_gradients, Pass.WGRAD: _weight_gradients}[problem.kind](
        problem, tensors
    )


def _outputs(problem: Problem, tensors: Tensors) -> Iterator[Slab]:
    w, bias, residual = tensors["w"].double(), _double(tensors.get("bias")), tensors.get("residual")
    inner = Geometry(problem.stride, (0, 0) * problem.rank, problem.dilation, problem.groups)
    for image in range(problem.batch):
        x = reference.pad(problem, tensors["x"][image : image + 1].double())
        for rows in _bands(problem):
            place = (slice(image, image + 1), slice(None), rows)
            read = x[:, :, _read_by(problem, rows)]
            added = None if residual is None else residual[place].double()
            exact = reference.with_epilogue(inner, read, w, bias, added, str(problem.activation))
            own = reference.with_epilogue(inner, read.square(), w.square(), _square(bias), _square(added))
            yield Slab("y", place, exact, own.sqrt())


def _input_gradients(problem: Problem, tensors: Tensors) -> Iterator[Slab]:
    """Gradients per image, computed for the padded image; its border is then folded back onto its source pixels."""
    w = tensors["w"].double()
    for image in range(problem.batch):
        dy = tensors["y"][image : image + 1]
        exact, own = (_input_gradient(problem, dy, w, power) for power in (1, 2))
        yield Slab("x", (slice(image, image + 1),), exact, own.sqrt())


def _input_gradient(problem: Problem, dy: Tensor, w: Tensor, power: int) -> Tensor:
    """Gradient of one image, with the operands raised to ``power``."""
    padded = w.new_zeros(1, problem.in_channels, *padded_size(problem))
    one = replace(problem, batch=1)
    for rows in _bands(problem):
        part = padded[:, :, _read_by(problem, rows)]
        like = part.new_empty(()).expand(part.shape)  # only its shape is read
        given = dy[:, :, rows].double().pow(power)
        part += convolution_backward(one, given, like, w.pow(power), (True, False, False), padded=True)[0]
    return fold(problem, padded, padded.new_empty(1, problem.in_channels, *problem.in_size))


def _weight_gradients(problem: Problem, tensors: Tensors) -> Iterator[Slab]:
    """Gradients summed over all images and bands; the bias's only if ``tensors`` has ``db``."""
    like = tensors["dw"].new_empty((), dtype=torch.float64).expand(problem.w_shape)  # only its shape is read
    exact = torch.zeros(problem.w_shape, dtype=torch.float64, device=like.device)
    own = torch.zeros_like(exact)
    bias_exact = exact.new_zeros(problem.out_channels)
    bias_own = torch.zeros_like(bias_exact)
    one = replace(problem, batch=1)
    for image in range(problem.batch):
        x = reference.pad(problem, tensors["x"][image : image + 1].double())
        for rows in _bands(problem):
            read, dy = x[:, :, _read_by(problem, rows)], tensors["y"][image : image + 1, :, rows].double()
            for total, bias_total, power in ((exact, bias_exact, 1), (own, bias_own, 2)):
                given = dy.pow(power)
                wanted = (False, True, False)
                total += convolution_backward(one, given, read.pow(power), like, wanted, padded=True)[1]
                bias_total += summed_per_channel(given)
    yield Slab("dw", (slice(None),), exact, own.sqrt())
    if "db" in tensors:
        yield Slab("db", (slice(None),), bias_exact, bias_own.sqrt())


def _bands(problem: Problem) -> Iterator[slice]:
    """Ranges of output rows (slices of a volume) with at most :data:`PRODUCTS` products, but at least one row."""
    rows, *others = problem.out_size
    step = max(1, PRODUCTS // (problem.in_channels * prod(problem.kernel) * prod(others)))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _read_by(problem: Problem, rows: slice) -> slice:
    """Rows of the padded image that output rows read."""
    stride, reach = problem.stride[0], problem.dilation[0] * (problem.kernel[0] - 1)
    return slice(rows.start * stride, (rows.stop - 1) * stride + reach + 1)


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()


def _square(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.square()
