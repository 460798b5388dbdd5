"""What single values that stick out do to a fast algorithm: ``python benchmarks/cpu/extreme_values.py``.

Two tables, by scheme of the forward pass. The first is exact: by how much each stage can exceed its operands, and so
from which magnitude on float32 may overflow in it. The second is measured, on polyconv's own kernels against float64:
one pixel of 1e8 among normal ones, and what becomes of the outputs that do not see it; then inputs that grow by factors
of ten, until an output is infinite that should not be.
"""

from __future__ import annotations

from itertools import product
from math import prod, sqrt

import torch
from torch import Tensor

from polyconv import dispatch
from polyconv.algebra.steps import axis_steps
from polyconv.arguments import Geometry
from polyconv.autotune import preferences
from polyconv.cpu.engines.schemes import KernelScheme
from polyconv.numerics import reference
from polyconv.problem import Pass, Problem
from polyconv.tuning_key import problem_key

LARGEST = 3.4028234e38
CHANNELS = 32
SIZE = 40
SPIKE = 1e8
PLACES = range(16, 24)
"""Rows and columns of the pixel: every place in a tile."""
ANY = 1e30
"""A tolerance that accepts every candidate."""
SHOWN = {
    KernelScheme(2, 3, 2, 3): (3, 3),
    KernelScheme(4, 3, 4, 3): (3, 3),
    KernelScheme(6, 3, 6, 3): (3, 3),
    KernelScheme(4, 5, 4, 5): (5, 5),
    KernelScheme(4, 5, 4, 5, nested=True): (5, 9),
    KernelScheme(1, 1, 1, 1): (3, 3),
}


def row_sum(matrix: object) -> float:
    """The largest sum of magnitudes along a row: the growth of values of magnitude 1."""
    return float(max(sum(abs(c) for c in row) for row in matrix))  # type: ignore[attr-defined]


def stages(scheme: KernelScheme) -> tuple[float, float, float]:
    """Growth of a transformed input, a product and an output's terms relative to the operands, for one channel."""
    if scheme.exact is None:
        return 1.0, 1.0, float(prod(SHOWN[scheme]))
    axes = [axis_steps(axis) for axis in (scheme.exact.h, scheme.exact.w)]
    inputs = prod(row_sum(axis.bt) for axis in axes)
    products = prod(
        max(sum(map(abs, g)) * sum(map(abs, b)) for g, b in zip(axis.g, axis.bt, strict=True)) for axis in axes
    )
    outputs = prod(
        max(
            sum(abs(a) * sum(map(abs, g)) * sum(map(abs, b)) for a, g, b in zip(row, axis.g, axis.bt, strict=True))
            for row in axis.at
        )
        for axis in axes
    )
    return inputs, float(products), float(outputs)


def convolve(scheme: KernelScheme, x: Tensor, w: Tensor) -> Tensor:
    """A forward pass by this scheme, whatever its error."""
    geometry = Geometry(tolerance=ANY)
    shapes = tuple(x.shape), tuple(w.shape)
    problem = Problem.make(Pass.FPROP, *shapes, tolerance=ANY)  # type: ignore[arg-type]
    name = f"{scheme}, tile lanes"  # takes every kernel size
    keys = [problem_key(problem, kept_weights=kept) for kept in (False, True)]
    with preferences.Forced(dict.fromkeys(keys, name)), torch.no_grad():
        return dispatch.fprop(x, w, None, *geometry)


def operands(kernel: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Normal input, and weights as ``nn.Conv2d`` initialises them."""
    bound = (CHANNELS * prod(kernel)) ** -0.5
    x = torch.randn(1, CHANNELS, SIZE + kernel[0] - 1, SIZE + kernel[1] - 1)
    return x, (torch.rand(8, CHANNELS, *kernel) * 2 - 1) * bound


def lone_pixel(scheme: KernelScheme, kernel: tuple[int, int]) -> tuple[float, tuple[int, int]]:
    """The largest error of outputs that do not see the pixel, in units of the pixel times rms(w); and their distance in
    rows and columns from those that do."""
    x, w = operands(kernel)
    unit = SPIKE * float(w.double().square().mean().sqrt())
    largest, reach = 0.0, (0, 0)
    for row, column in product(PLACES, PLACES):
        spiked = x.clone()
        spiked[0, 3, row, column] = SPIKE
        off = (convolve(scheme, spiked, w).double() - reference.fprop(Geometry(), spiked, w, None)).abs()[0].amax(0)
        top, left = row - kernel[0] + 1, column - kernel[1] + 1
        off[top : row + 1, left : column + 1] = 0
        largest = max(largest, float(off.max()) / unit)
        rows, columns = (off > 1e-10 * unit).nonzero(as_tuple=True)  # all other deviations in the image are below 1e-13
        if len(rows):
            beyond = (
                int(torch.maximum(top - rows, rows - row).max()),
                int(torch.maximum(left - columns, columns - column).max()),
            )
            reach = (max(reach[0], beyond[0]), max(reach[1], beyond[1]))
    return largest, reach


def overflows_from(scheme: KernelScheme, kernel: tuple[int, int]) -> str:
    """The smallest power of ten as the input's rms at which a finite output becomes non-finite."""
    x, w = operands(kernel)
    for exponent in range(30, 38):
        grown = x * 10.0**exponent
        assert float(reference.fprop(Geometry(), grown, w, None).abs().max()) < LARGEST
        if not bool(torch.isfinite(convolve(scheme, grown, w)).all()):
            return f"1e{exponent}"
    return "with the result"


def main() -> None:
    torch.manual_seed(0)
    print("how many times its operands' magnitudes a value can be (exact), and |x| from which the input may overflow")
    print(f"{'scheme':42} {'input':>8} {'product':>9} {'output':>9}  {'|x|':>7}")
    for scheme in SHOWN:
        inputs, products, outputs = stages(scheme)
        print(f"{scheme!s:42} {inputs:8.0f} {products:9.0f} {outputs:9.0f}  {LARGEST / inputs:7.1e}")
    print()
    print(
        f"{CHANNELS} channels: a pixel of {SPIKE:.0e} among normal ones, outputs that do not see it; rms that overflows"
    )
    print(f"{'scheme':42} {'of pixel x rms(w)':>18} {'of the scale':>13} {'of their own':>13} {'reach':>6}  {'rms':>6}")
    for scheme, kernel in SHOWN.items():
        error, (rows, columns) = lone_pixel(scheme, kernel)
        # The scale includes the pixel; that of outputs which do not see it is the root of the reduction.
        own = error * SPIKE / sqrt(CHANNELS * prod(kernel))
        rms = SPIKE / sqrt(CHANNELS * prod(SIZE + taps - 1 for taps in kernel))
        print(
            f"{scheme!s:42} {error:18.1e} {own / rms:13.1e} {own:13.1e} {rows:>4}x{columns}  "
            f"{overflows_from(scheme, kernel):>6}"
        )


if __name__ == "__main__":
    main()
