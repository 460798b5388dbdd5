"""Predicted errors of whole problems, from the error model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import log, prod, sqrt

from ..activation import Activation
from ..algebra.segments import Scheme2d
from ..algebra.steps import Form
from ..problem import TORCH_TOLERANCE, Pass, Problem
from ..util.intmath import ceil_div
from .aliasing import repetition_of
from .error_model import (
    FLOAT32,
    OUTPUTS,
    UNIT_ROUNDOFF,
    USUAL_SPREAD,
    Arithmetic,
    Growth,
    Magnitudes,
    Repetition,
    fourier_growth,
    predicted_error,
)
from .tensor_core import SplitProducts, TensorCore

HALF_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of the result dtypes; products are summed in float32."""

LARGEST_TO_SCALE = 5
"""Largest of many results over their scale; its rounding is the largest."""

PRODUCTS_OF_A_CUT = 4
"""Smallest number of products that a tensor core adds (V100) before it truncates the sum toward zero."""


def reduction_of(problem: Problem) -> int:
    """Largest number of products of direct summation per output element."""
    c, k = problem.channels_per_group
    if problem.kind is Pass.WGRAD:
        return problem.batch * prod(problem.out_size)
    return (k if problem.kind is Pass.DGRAD else c) * prod(problem.kernel)


def error_of(
    problem: Problem,
    scheme: Scheme2d | None,
    count: int,
    blocks: tuple[int, ...],
    arithmetic: Arithmetic = FLOAT32,
) -> float:
    """Error of a scheme that sums over ``count`` channels (tiles, products), cut into ``blocks``. A problem that does
    not fill the scheme (4 taps in F(4, 5), a tile beyond the border) has a smaller scale but all of its roundings."""
    roundings = problem.activation, problem.residual
    return _error_of(
        problem.kind, repetition_of(problem), reduction_of(problem), *roundings, scheme, count, blocks, arithmetic
    )


@lru_cache(maxsize=8192)
def _error_of(
    kind: Pass,
    repetition: Repetition,
    reduction: int,
    activation: Activation,
    residual: bool,
    scheme: Scheme2d | None,
    count: int,
    blocks: tuple[int, ...],
    arithmetic: Arithmetic,
) -> float:
    """Cached :func:`error_of`; the key is independent of the image size, except in the weight gradient."""
    form: Form = "weight gradient" if kind is Pass.WGRAD else "forward"
    if scheme is None:
        # No decision needs a tight value here, and not every order of summation is known: all outputs count.
        every = repetition if repetition.outputs is None else replace(repetition, outputs=None)
        error = predicted_error(None, max(1, count), form=form, blocks=blocks, repetition=every, arithmetic=arithmetic)
        return _through_epilogue(error, activation, residual, repetition.products)
    h, w = scheme.h, scheme.w
    taps = h.outputs * w.outputs if kind is Pass.WGRAD else h.r * w.r
    whole = max(1, count) * taps
    scale = sqrt(max(1.0, whole / reduction))
    error = predicted_error(scheme, whole, form=form, blocks=blocks, repetition=repetition, arithmetic=arithmetic)
    return _through_epilogue(scale * error, activation, residual, repetition.products)


@dataclass(frozen=True, slots=True)
class Way:
    """Parameters of a fast algorithm that determine its predicted error for an output map, apart from the weights."""

    scheme: Scheme2d
    count: int
    """Channels summed: input channels times the classes or pieces that the taps are cut into."""
    blocks: tuple[int, ...]
    taps: tuple[int, int]
    """Taps of the kernel, or of one phase of a strided convolution."""
    arithmetic: Arithmetic = FLOAT32

    def error(self, problem: Problem) -> float:
        return error_of(problem, self.scheme, self.count, self.blocks, self.arithmetic)

    def known_error(self, problem: Problem, known: Growth, spread: float, share: float) -> float:
        """Predicted error for one filter of a given growth; ``spread`` is its largest magnitude over its rms, ``share``
        the fraction of all outputs that belongs to similar filters."""
        repetition = repetition_of(problem)
        error = predicted_error(
            self.scheme,
            max(1, self.count) * known.taps,
            blocks=self.blocks,
            outputs=OUTPUTS * share,
            magnitudes=Magnitudes(w_tensor_max=max(USUAL_SPREAD, spread)),
            repetition=replace(repetition, flat=False),
            arithmetic=self.arithmetic,
            known=known,
        )
        return _through_epilogue(error, problem.activation, problem.residual, repetition.products)


def direct_error(problem: Problem, sums: tuple[int, ...], arithmetic: Arithmetic = FLOAT32) -> float:
    """Error of direct summation; ``sums`` are the lengths of nested sequential sums, products first."""
    sums = tuple(max(1, length) for length in sums)  # a phase without taps sums nothing
    return error_of(problem, None, prod(sums), sums, arithmetic)


TF32_PRODUCTS = SplitProducts(TensorCore(block=4, extra_bits=1), parts=1)
"""Products of operands rounded to TF32, which keeps 11 significant bits as FP16 does, in tensor cores since sm_80."""
SLACK = 1.01
"""Factor on TF32's error: kernels cut sums in different places, and pad them, which changes the third digit at most."""
LONGEST_OF_TORCH = 16384
"""Products in one sequence that PyTorch's weight gradient in float32 is assumed to add."""


def torch_error(problem: Problem, tf32: bool) -> float:
    """Error of PyTorch's direct summation in float32, or in TF32."""
    length = reduction_of(problem)
    bias = int(problem.bias)
    if not tf32:
        pieces = max(1, ceil_div(length, LONGEST_OF_TORCH))
        return direct_error(problem, (ceil_div(length, pieces) + bias, pieces))
    # Where a stride separates the taps, an element has fewer products, which average out less.
    fewest = ceil_div(length, prod(problem.stride)) if problem.kind is Pass.DGRAD else length
    return SLACK * max(direct_error(problem, (products + bias,), TF32_PRODUCTS) for products in (length, fewest))


def with_numeric_tolerance(problem: Problem, has_tf32: bool) -> Problem:
    """The problem with a tolerance of PyTorch's error as a number, for a device with or without TF32."""
    if problem.tolerance >= 0:
        return problem
    tf32 = has_tf32 and problem.tolerance == TORCH_TOLERANCE
    return replace(problem, tolerance=torch_error(problem, tf32))


def rounding_error(problem: Problem) -> float:
    """Error of rounding a float32 result to the problem's dtype; 0 if that is none of half precision."""
    largest = LARGEST_TO_SCALE * problem.activation.slope
    return HALF_ROUNDING.get(problem.dtype, 0.0) * largest


def fourier_error(problem: Problem, points: int, taps: int) -> float:
    """Error of fast convolution by FFTs of ``points`` pixels; ``taps`` as in :class:`~.error_model.Growth`. It depends
    on the energy of a filter, not on its distribution over the taps: of all repetition, only equal products matter."""
    repetition = replace(repetition_of(problem), flat=False, outputs=None)
    known = fourier_growth(points, taps)
    error = predicted_error(None, reduction_of(problem), known=known, repetition=repetition)
    return _through_epilogue(error, problem.activation, problem.residual, repetition.products)


def half_error(problem: Problem, sums: tuple[int, ...]) -> float:
    """Error of direct summation on tensor cores with one rounding of the result to half precision. Tensor cores
    truncate sums: half a last place is lost each time, always toward zero."""
    largest = LARGEST_TO_SCALE * problem.activation.slope
    cut = max(1, sums[0]) / PRODUCTS_OF_A_CUT * UNIT_ROUNDOFF * largest
    return direct_error(problem, sums) + cut + rounding_error(problem)


def _through_epilogue(error: float, activation: Activation, residual: bool, products: float) -> float:
    """Error after the epilogue: the slope of the activation scales it, and later operations add roundings. These are
    proportional to the output, at most about six times its scale (residual included), more if products repeat."""
    roundings = int(residual) + activation.roundings
    return activation.slope * error + roundings * _largest_rounding(products)


def error_of_additions(problem: Problem, count: int) -> float:
    """Error of ``count`` sequential float32 additions to a sum: independent roundings as in the epilogue."""
    return sqrt(count) * _largest_rounding(repetition_of(problem).products)


def _largest_rounding(products: float) -> float:
    """Rounding error of the largest output over the scale; ``products`` as in :class:`Repetition`."""
    return UNIT_ROUNDOFF * sqrt(2 * log(OUTPUTS) * products)
