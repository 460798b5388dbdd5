"""The error that a way of computing a problem is expected to make: the error model, asked about whole problems."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import log, prod, sqrt

from .algebra.error import (
    FLOAT32,
    OUTPUTS,
    UNIT_ROUNDOFF,
    USUAL_SPREAD,
    Arithmetic,
    Growth,
    Magnitudes,
    Repetition,
    predicted_error,
)
from .algebra.segments import Scheme2d
from .algebra.steps import Form
from .problem import Activation, Pass, Problem
from .repetition import repetition_of

HALF_ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of the dtypes that results are rounded to; products are summed in float32."""

LARGEST_TO_SCALE = 5
"""The largest of many results, in units of their scale: it is rounded the most."""

PRODUCTS_OF_A_CUT = 4
"""Products that a tensor core adds to a sum at once, at least (V100): then it cuts the sum, toward zero."""

STEEPEST_SILU = 1.1
"""The slope of SiLU is largest at 2.4: 1.0998."""

SILU_ROUNDINGS = 6
"""Half ulps that a kernel's SiLU strays by, at most: on a GPU 5.3 of its argument (kernels/epilogue.cuh)."""


def reduction_of(problem: Problem) -> int:
    """Products of the definition that one output element sums, at most."""
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
    """The error of a scheme that sums over ``count`` channels (tiles, products), cut into ``blocks``.

    A kernel that does not fill the scheme (4 taps in F(4, 5), a tile that juts out) has a smaller output, but the
    scheme's roundings: so those of the whole scheme count, against the scale of what is there.
    """
    roundings = problem.activation is Activation.SILU, problem.residual
    return _error_of(
        problem.kind, repetition_of(problem), reduction_of(problem), *roundings, scheme, count, blocks, arithmetic
    )


@lru_cache(maxsize=8192)
def _error_of(
    kind: Pass,
    repetition: Repetition,
    reduction: int,
    silu: bool,
    residual: bool,
    scheme: Scheme2d | None,
    count: int,
    blocks: tuple[int, ...],
    arithmetic: Arithmetic,
) -> float:
    """The same by all that it depends on: of a forward pass and an input gradient, not on the size of the image."""
    form: Form = "weight gradient" if kind is Pass.WGRAD else "forward"
    if scheme is None:
        # Nothing depends on how sharp this one is, and not every order of summation is known: all outputs count.
        every = repetition if repetition.outputs is None else replace(repetition, outputs=None)
        error = predicted_error(None, max(1, count), form=form, blocks=blocks, repetition=every, arithmetic=arithmetic)
        return _through_epilogue(error, silu, residual, repetition.products)
    h, w = scheme.h, scheme.w
    taps = h.outputs * w.outputs if kind is Pass.WGRAD else h.r * w.r
    whole = max(1, count) * taps
    scale = sqrt(max(1.0, whole / reduction))
    error = predicted_error(scheme, whole, form=form, blocks=blocks, repetition=repetition, arithmetic=arithmetic)
    return _through_epilogue(scale * error, silu, residual, repetition.products)


@dataclass(frozen=True, slots=True)
class Way:
    """How a fast algorithm sums an output map: what its predicted error follows from, whatever the weights are."""

    scheme: Scheme2d
    count: int
    """Channels that are summed: those of the image, times the classes or pieces that the taps are cut into."""
    blocks: tuple[int, ...]
    taps: tuple[int, int]
    """Of the correlation that the map is: those of the kernel, or of one phase of a stride."""
    arithmetic: Arithmetic = FLOAT32

    def error(self, problem: Problem) -> float:
        """For weights that nothing is known of."""
        return error_of(problem, self.scheme, self.count, self.blocks, self.arithmetic)

    def known_error(self, problem: Problem, known: Growth, spread: float, share: float) -> float:
        """For one filter: its growth, its largest magnitude over its rms, and the share that filters like it have in
        all outputs."""
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
        return _through_epilogue(error, problem.activation is Activation.SILU, problem.residual, repetition.products)


def direct_error(problem: Problem, sums: tuple[int, ...], arithmetic: Arithmetic = FLOAT32) -> float:
    """The error of direct summation: so many products in sequence, so many of these sums in sequence, and so on."""
    sums = tuple(max(1, length) for length in sums)  # a phase without taps sums nothing
    return error_of(problem, None, prod(sums), sums, arithmetic)


def half_error(problem: Problem, sums: tuple[int, ...]) -> float:
    """The error of direct summation by tensor cores, of a result that is rounded to half precision once.

    They do not round their sums, but cut them: half a last place is lost each time, always toward zero.
    """
    largest = LARGEST_TO_SCALE * (STEEPEST_SILU if problem.activation is Activation.SILU else 1.0)
    cut = max(1, sums[0]) / PRODUCTS_OF_A_CUT * UNIT_ROUNDOFF * largest
    return direct_error(problem, sums) + cut + HALF_ROUNDING[problem.dtype] * largest


def _through_epilogue(error: float, silu: bool, residual: bool, products: float) -> float:
    """What becomes of an error of the sums: a slope stretches it, and what is computed after the sums rounds anew.

    These roundings are proportional to the output, the largest of which is some six times the output's scale, the
    residual's included, and more where products repeat.
    """
    roundings = int(residual) + (SILU_ROUNDINGS if silu else 0)
    return (STEEPEST_SILU if silu else 1.0) * error + roundings * _largest_rounding(products)


def error_of_additions(problem: Problem, count: int) -> float:
    """What it adds to the error of sums that so many others are added to them, one after the other, in float32.

    The roundings are those of the epilogue, and have nothing to do with one another.
    """
    return sqrt(count) * _largest_rounding(repetition_of(problem).products)


def _largest_rounding(products: float) -> float:
    """Of the largest output, of whose products so many are the same (:class:`Repetition`)."""
    return UNIT_ROUNDOFF * sqrt(2 * log(OUTPUTS) * products)
