"""Error model: a-priori prediction of the float32 rounding error of a convolution.

The model propagates every rounding to the output, from the size of the rounded value and its factor in the output. Both
follow from the exact matrices; only MARGIN is fitted to measurements. docs/accuracy.md has the derivation.

For ``y = A^T sum_c (G w_c) * (B^T x_c)`` with independent ``x`` and ``w`` of rms 1, let ``S_k`` be the coefficients of
a transform's inputs in the value of operation ``k``, and ``T_k`` those of that value in the transform's outputs. Along
one axis, the mean squares of the roundings in output ``i`` are

    taps     r                                         = sum over (x, w) of the factor of x w in y[i]: 1 or 0, exactly
    product  sum_p A[i,p]^2 |G_p|^2 |B_p|^2              one rounding of each product (or of each transformed weight)
    input    sum_k |S_k|^2 |(A[i] * T_k) G|^2            operations of B^T
    output   sum_k T_k[i]^2 |S_k (G . B)|^2              operations of A^T

(``*`` is elementwise, ``G . B`` the tensor of the products). Of two axes, the first to be transformed sees the other
one as exact (its ``taps``), the second sees transformed values (``product``):

    input = input_first taps_second + product_first input_second,      product = product_h product_w,

and likewise for the output; the order depends on the backend, so the worse one counts. A sequential sum of L products
rounds partial sums of 1, 2, ... L terms: (L + 1) / 2 times ``product``. With u = 2^-24, the rms error relative to the
output's scale, ``sqrt(reduction) rms(x) rms(w)``, is

    u sqrt(ROUNDING (input + weight + output + product (L + 1) / 2) / taps)

and the largest error of many outputs is that times :func:`largest_over_rms`, times :meth:`Magnitudes.excess` (uneven
data), times MARGIN. :class:`Repetition` corrects for expanded tensors and overlapping windows.

Not covered: patterns that repeat from tile to tile (or in every channel) and cancel only in the output, data without
any randomness, and values below the smallest exponent (about 1e-38). :func:`error_bound` covers the first two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, inf, log, log2, sqrt
from typing import NamedTuple, Protocol

from ..algebra.matrices import Matrix, is_dyadic
from ..algebra.program import Program
from ..algebra.segments import AxisScheme, Scheme2d
from ..algebra.steps import Form, axis_steps

UNIT_ROUNDOFF = 2.0**-24

ROUNDING = 1 / (8 * log(2))
"""Mean square of a rounding [(u |value|)^2], averaged over mantissas m with density 1 / m. A uniform error has 1/3 just
above a power of two, and less towards the next one."""

OUTPUTS = 1e8
"""Default number of output elements for the largest error. The dependence is weak: the largest of 1e6 normally
distributed errors is 4.9 times their rms, the largest of 1e8 is 5.7 times."""

FEWEST_OUTPUTS = 1e6
"""Minimum number of output elements assumed: a small output may be the worst of many calls."""

USUAL_SPREAD = 32.0
"""Default largest magnitude of a tensor over its rms."""

TRANSFORMED_SPREAD = 8.0
"""Growth of that ratio by transform rows of eight entries along both axes: the magnitudes of one row add up to at most
sqrt(8) times the root of their sum of squares."""

MARGIN = 1.1
"""Margin for differences between kernels: order of operations, other programs for a transform, a bias."""


# ------------------------------------------------------------------------------------------ propagation of roundings


class Rounding(NamedTuple):
    """A rounded value: the coefficients of the inputs in it, and its coefficients in the outputs."""

    made_of: dict[int, float]
    enters: dict[int, float]


def followed_roundings(program: Program) -> list[Rounding]:
    """Every rounding of a program. A power of two does not round; a coefficient that is not a float32 adds one."""
    forms: list[dict[int, float]] = [{i: 1.0} for i in range(program.inputs)]
    for op in program.ops:
        form = {i: float(op.c) * c for i, c in forms[op.a].items()}
        if op.kind != "mul":
            sign = -1.0 if op.kind in ("sub", "fms") else 1.0
            for i, c in forms[op.b].items():
                form[i] = form.get(i, 0.0) + sign * c
        forms.append(form)
    enters: list[dict[int, float]] = [{} for _ in forms]
    for row, value in enumerate(program.outputs):
        if value is not None:
            enters[value][row] = enters[value].get(row, 0.0) + 1.0
    for number in range(len(forms) - 1, program.inputs - 1, -1):
        op = program.ops[number - program.inputs]
        for row, c in enters[number].items():
            enters[op.a][row] = enters[op.a].get(row, 0.0) + float(op.c) * c
            if op.kind != "mul":
                sign = -1.0 if op.kind in ("sub", "fms") else 1.0
                enters[op.b][row] = enters[op.b].get(row, 0.0) + sign * c
    found = []
    for number, op in enumerate(program.ops, program.inputs):
        if op.kind != "mul" or not _is_power_of_two(op.c):
            found.append(Rounding(forms[number], enters[number]))
        if not _is_float32(op.c):
            found.append(Rounding({i: float(op.c) * c for i, c in forms[op.a].items()}, enters[number]))
    return found


def _is_power_of_two(c: Fraction) -> bool:
    return is_dyadic(c) and abs(c.numerator) & (abs(c.numerator) - 1) == 0


def _is_float32(c: Fraction) -> bool:
    """True if the coefficient is exact in float32."""
    return is_dyadic(c) and abs(c.numerator) < 2**24


def _gram(a: Matrix, flat: bool = False) -> list[list[float]]:
    """Covariances of the rows' outputs for values of rms 1 that are independent or (``flat``) equal."""
    if flat:
        totals = [float(sum(row)) for row in a]
        return [[p * q for q in totals] for p in totals]
    rows = [{j: float(c) for j, c in enumerate(row) if c} for row in a]
    return [[sum(c * q[j] for j, c in p.items() if j in q) for q in rows] for p in rows]


def _quadratic(form: dict[int, float], gram: list[list[float]]) -> float:
    return sum(a * b * gram[p][q] for p, a in form.items() for q, b in form.items())


def _squares(values: Iterable[float]) -> float:
    return sum(v * v for v in values)


@dataclass(frozen=True, slots=True)
class AxisGrowth:
    """Mean squares of the module docstring by output of one axis, and the norms of the rigorous bound."""

    taps: int
    terms: float
    """Effective number of products summed in sequence by an accumulator, per channel or tile. With q consecutive passes
    it grows by the factor 2 - 1 / q: later passes start from partial sums of the first pass's size."""
    longest: int
    """Products summed in sequence, per channel or tile, for the bound."""
    product: tuple[float, ...]
    fourth: tuple[float, ...]
    """Squared covariances, summed over all pairs of accumulators: yields :attr:`Growth.sums`."""
    input: tuple[float, ...]
    weight: tuple[float, ...] | None
    output: tuple[float, ...]
    absolute: float
    """Largest ``sum_p |A|[i,p] |G_p|_1 |B_p|_1``, with every operation on absolute values."""
    depth: int
    """Largest number of roundings between an input and an output, without those of the sum of products."""


@lru_cache(maxsize=1024)
def axis_growth(scheme: AxisScheme, form: Form = "forward", flat: bool = False) -> AxisGrowth:
    """Propagate every rounding of one axis to every output of its tile; ``flat`` assumes equal weights."""
    steps = axis_steps(scheme, form)
    at = [[float(c) for c in row] for row in steps.at]
    weights, inputs = _gram(steps.g, flat), _gram(steps.bt)
    both = [[g * b for g, b in zip(p, q, strict=True)] for p, q in zip(weights, inputs, strict=True)]

    def entering(program: Program, other: list[list[float]], flat: bool = False) -> tuple[float, ...]:
        # Roundings of one operand's transform, propagated through the products with the other operand.
        roundings = followed_roundings(program)
        sizes = [sum(k.made_of.values()) ** 2 if flat else _squares(k.made_of.values()) for k in roundings]
        found = [(size, k.enters) for size, k in zip(sizes, roundings, strict=True)]
        return tuple(
            sum(size * _quadratic({p: row[p] * c for p, c in enters.items()}, other) for size, enters in found)
            for row in at
        )

    accumulators = steps.accumulators
    sums = [[0.0] * accumulators for _ in range(accumulators)]
    for p, products in zip(steps.sums, both, strict=True):
        for q, value in zip(steps.sums, products, strict=True):
            sums[p][q] += value
    leaving = [(_quadratic(k.made_of, sums), k.enters) for k in followed_roundings(steps.output)]

    # Accumulators are correlated, and consecutive passes completely: their common part does not average out.
    back = [{steps.sums[p]: a for p, a in enumerate(row) if a} for row in at]
    points = accumulators // scheme.outer.products if steps.passes > 1 else accumulators
    fourth = []
    for factors in back:
        pairs: dict[tuple[int, int], float] = {}
        for p, a in factors.items():
            for q, b in factors.items():
                if p // points == q // points:
                    pair = (p % points, q % points)
                    pairs[pair] = pairs.get(pair, 0.0) + abs(a * b * sums[p][q])
        fourth.append(_squares(pairs.values()))

    inwards, input_depth = _absolute(steps.input)
    outwards, output_depth = _absolute(steps.output)
    if steps.weight is None:
        # Transformed in double and rounded once; a second float32 rounding exceeds all of those in double.
        other, other_depth = [sum(abs(float(c)) for c in row) for row in steps.g], 2
    else:
        rows, other_depth = _absolute(steps.weight)
        other = [sum(row) for row in rows]
    norms = [sum(row) * g for row, g in zip(inwards, other, strict=True)]
    absolute = max(sum(row[a] * n for a, n in zip(steps.sums, norms, strict=True)) for row in outwards)
    return AxisGrowth(
        taps=steps.taps,
        terms=steps.shared * (2 - 1 / steps.passes),
        longest=steps.shared * steps.passes,
        product=tuple(sum(a * a * sums[p][p] for p, a in row.items()) for row in back),
        fourth=tuple(fourth),
        input=entering(steps.input, weights),
        weight=None if steps.weight is None else entering(steps.weight, inputs, flat),
        output=tuple(sum(enters.get(i, 0.0) ** 2 * size for size, enters in leaving) for i in range(len(at))),
        absolute=absolute,
        depth=input_depth + other_depth + output_depth,
    )


def _absolute(program: Program) -> tuple[list[list[float]], int]:
    """Matrix of the program with every operation on absolute values, and the most roundings on any path."""
    forms = [[float(i == j) for j in range(program.inputs)] for i in range(program.inputs)]
    depth = [0] * program.inputs
    for op in program.ops:
        c = abs(float(op.c))
        reads = (op.a,) if op.kind == "mul" else (op.a, op.b)
        addend = forms[op.b] if op.kind != "mul" else [0.0] * program.inputs
        forms.append([c * a + b for a, b in zip(forms[op.a], addend, strict=True)])
        rounds = (op.kind != "mul" or not _is_power_of_two(op.c)) + (not _is_float32(op.c))
        depth.append(rounds + max(depth[v] for v in reads))
    zero = [0.0] * program.inputs
    return (
        [zero if o is None else forms[o] for o in program.outputs],
        max((depth[o] for o in program.outputs if o is not None), default=0),
    )


@dataclass(frozen=True, slots=True)
class Growth:
    """Mean squares of a 2-D scheme's roundings relative to the output's, for the worst output of a tile."""

    taps: int
    """Products of direct summation per channel (forward) or tile (weight gradient)."""
    terms: float
    """As :attr:`AxisGrowth.terms`."""
    transforms: float
    """Roundings of all transforms, for any number of channels."""
    product: float
    """One rounding of every product."""
    longest: int
    """As :attr:`AxisGrowth.longest`."""
    sums: float
    """Effective number of independent sums in an output's error: 1 for direct summation."""
    absolute: float
    """Largest sum of magnitudes of an output's terms, before cancellation, for data of magnitude 1."""
    depth: int
    """Largest number of roundings between an input and an output, without those of the sum of products."""

    def __str__(self) -> str:
        return f"growth {sqrt(self.product):.1f} per rounding of the sum, {sqrt(self.transforms):.1f} in the transforms"


DIRECT = Growth(taps=1, terms=1.0, transforms=0.0, product=1.0, longest=1, sums=1.0, absolute=1.0, depth=1)


FOURIER_STAGE = 2.5
"""Mean square of the roundings of one radix-2 stage of an FFT, relative to that of its values: a sum, and half of the
values times a rounded root of unity. Transforms of higher radix round less."""


def fourier_growth(points: int, taps: int) -> Growth:
    """Growth of a convolution by FFTs of ``points`` pixels. A transform keeps the mean square of its values up to a
    factor, so roundings of both operands' transforms, of the products and of the inverse transform enter the output
    alike, spread over all points: they add up to a normal distribution."""
    transforms = 3 * FOURIER_STAGE * log2(points)
    return Growth(
        taps=taps,
        terms=2.0,  # a component of a complex product has two
        transforms=transforms,
        product=1.0,
        longest=2,
        sums=float(points),
        absolute=inf,
        depth=ceil(transforms),
    )


@lru_cache(maxsize=4096)
def growth(scheme: Scheme2d | None, form: Form = "forward", flat: bool = False) -> Growth:
    """Growth of a scheme; None is direct summation. ``flat`` takes the worse of independent and equal weights."""
    if scheme is None:
        return DIRECT
    if flat:
        along = [(axis_growth(axis, form), axis_growth(axis, form, True)) for axis in (scheme.h, scheme.w)]
        pairs = [_combined(h, w) for h in along[0] for w in along[1]]
        return replace(
            pairs[0],
            transforms=max(p.transforms for p in pairs),
            product=max(p.product for p in pairs),
            sums=min(p.sums for p in pairs),
        )
    return _combined(axis_growth(scheme.h, form), axis_growth(scheme.w, form))


def _combined(h: AxisGrowth, w: AxisGrowth) -> Growth:
    taps = h.taps * w.taps
    product = transforms = sums = 0.0
    for i, along_h in enumerate(h.product):
        for j, along_w in enumerate(w.product):
            # The first axis to be transformed sees the other one as exact, the second sees transformed values.
            both = max(h.input[i] * w.taps + along_h * w.input[j], w.input[j] * h.taps + along_w * h.input[i])
            both += max(h.output[i] * along_w + h.taps * w.output[j], w.output[j] * along_h + w.taps * h.output[i])
            if h.weight is None or w.weight is None:
                both += along_h * along_w
            else:
                both += max(h.weight[i] * w.taps + along_h * w.weight[j], w.weight[j] * h.taps + along_w * h.weight[i])
            transforms = max(transforms, both / taps)
            if along_h * along_w > product * taps:
                product = along_h * along_w / taps
                sums = (along_h * along_w) ** 2 / (h.fourth[i] * w.fourth[j])
    return Growth(
        taps=taps,
        terms=h.terms * w.terms,
        transforms=transforms,
        product=product,
        longest=h.longest * w.longest,
        sums=sums,
        absolute=h.absolute * w.absolute,
        depth=h.depth + w.depth,
    )


# ------------------------------------------------------------------------------------------------ data and prediction


@dataclass(frozen=True, slots=True)
class Repetition:
    """Repetition of data in memory by expansion or overlapping windows; ``x`` and ``w`` as in :class:`Magnitudes`."""

    products: float = 1.0
    """Mean number of equal products in one output's sum, where both operands repeat together. The mean square of the
    sum grows by this factor, and roundings of equal products do not average out: adding a number again rounds the same
    way while the sum keeps its exponent."""
    x_channels: float = inf
    """Largest number of distinct channels (tiles) of x: an outlier occurs in every channel that repeats it. 0 if an
    output map reads a single value of x, which leaves no outlier."""
    w_channels: float = inf
    """Largest number of distinct channels (tiles) of w."""
    flat: bool = False
    """True if taps of w (in the weight gradient, pixels of dy) repeat: see :attr:`Magnitudes.w_mean`."""
    outputs: float | None = None
    """Number of distinct outputs if an output map reads a single value of one operand, else None."""


INDEPENDENT = Repetition()


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """Statistics of the data. The default is a typical layer: normal inputs, uniform weights.

    ``x`` is the operand that B^T transforms and ``w`` the other: ``dy`` and the weights in the input gradient, the
    input and ``dy`` in the weight gradient. Only ratios affect a relative error.
    """

    x_rms: float = 1.0
    x_max: float | None = None
    """Largest magnitude."""
    w_rms: float = 1.0
    w_max: float | None = None
    x_local: float | None = None
    """Largest rms within one channel over a window of about a tile, if scales vary in space."""
    w_local: float | None = None
    """Largest rms of the taps between two channels, if scales vary."""
    y_max: float | None = None
    """Largest magnitude of the output, if sums are of one sign and exceed those of random signs: for data and weights
    with offsets, ``reduction`` times both means. No effect up to three times the scale."""

    w_mean: float = 0.0
    """Rms over channels of the mean tap of one output's weights (of ``dy``: of its means over windows), largest of all
    outputs. Equal weights concentrate at one point of a transform and are amplified more than random ones."""

    x_tensor_max: float | None = None
    """Largest magnitude of the whole tensor, if other images (output maps) exceed the one in question: FP16 operands
    are scaled to it (:mod:`polyconv.numerics.tensor_core`)."""
    w_tensor_max: float | None = None

    @property
    def spread(self) -> float:
        """Largest magnitude of a tensor over the rms of the part in question, for the operand where it is larger;
        :data:`USUAL_SPREAD` if unknown."""
        x, w = self.x_tensor_max or self.x_max, self.w_tensor_max or self.w_max
        ratios = [largest / rms for largest, rms in ((x, self.x_rms), (w, self.w_rms)) if largest and rms]
        return max(ratios, default=USUAL_SPREAD)

    def coherence(self, reduction: int) -> float:
        """Largest output over the scale; 0 up to 3, which sums of random signs reach."""
        scale = self.scale(reduction)
        largest = (self.y_max or 0.0) / scale if scale else 0.0
        return largest if largest > 3 else 0.0

    def scale(self, reduction: int) -> float:
        """Scale of the output: its rms for independent data."""
        return sqrt(reduction) * self.x_rms * self.w_rms

    def excess(self, reduction: int, count: int, repetition: Repetition = INDEPENDENT) -> float:
        """Factor of the rms error over that for even data, where the error is largest: the window of largest rms, with
        the largest value in one of its ``count`` channels (tiles), meets the largest weights, and partial sums reach
        the largest output. Without ``w_max``, weights have outliers only if channels repeat."""
        scale = self.scale(reduction)
        if not scale:
            return 1.0
        x_count, w_count = min(count, repetition.x_channels), min(count, repetition.w_channels)
        w_usual = 3 * self.w_rms if w_count < count else 0.0
        x = (self.x_local or self.x_rms) ** 2 + _lone(self.x_max or 3 * self.x_rms, x_count)
        w = (self.w_local or self.w_rms) ** 2 + _lone(self.w_max or w_usual, w_count)
        coherent = max(0.0, ((self.y_max or 0.0) / scale) ** 2 - 9) / 2
        return sqrt(x * w / (self.x_rms * self.w_rms) ** 2 + coherent)

    @property
    def flatness(self) -> float:
        """Share of the mean tap in the mean square of the weights."""
        return min(1.0, (self.w_mean / self.w_rms) ** 2) if self.w_rms else 0.0


TYPICAL = Magnitudes()


def _lone(largest: float, channels: float) -> float:
    """Contribution of one channel with the largest value to the mean square over ``channels``."""
    return largest**2 / channels if channels else 0.0


class Arithmetic(Protocol):
    """Arithmetic of products and their sequential sum. Mean squares are in units of a float32 rounding to nearest."""

    def operands(self, spread: float) -> float:
        """Mean square of the precision lost in both operands of a product. ``spread`` is the largest magnitude of a
        whole tensor over the rms of the part that one output map reads."""

    def sums(self, length: float, equal_products: float) -> float:
        """Mean square of the roundings of ``length`` products in sequence, in groups of ``equal_products`` equal ones;
        1 is one rounding of the whole sum."""

    def shrinkage(self, length: float) -> float:
        """Systematic loss of every sum, relative to it [u]. It is the same fraction of the output."""

    def drift(self, length: float) -> float:
        """Further loss of a sum of products of one sign, relative to it [u]."""

    def __hash__(self) -> int:
        """Hash by value, since predictions are cached."""


class Float32:
    """Sequential float32 multiply-adds, rounded to nearest."""

    def operands(self, spread: float) -> float:
        return 0.0

    def sums(self, length: float, equal_products: float) -> float:
        # (L + 1) / 2 times the mean square of the whole sum; up to the square of that for equal products.
        half = (length + 1) / 2
        return half * min(half, equal_products)

    def shrinkage(self, length: float) -> float:
        return 0.0

    def drift(self, length: float) -> float:
        return 0.0


FLOAT32 = Float32()


def predicted_error(
    scheme: Scheme2d | None,
    reduction: int,
    *,
    form: Form = "forward",
    blocks: tuple[int, ...] = (),
    outputs: float = OUTPUTS,
    magnitudes: Magnitudes = TYPICAL,
    repetition: Repetition = INDEPENDENT,
    arithmetic: Arithmetic = FLOAT32,
    known: Growth | None = None,
) -> float:
    """Expected largest |ours - exact| of any output element, relative to the output's scale.

    ``scheme`` None is direct summation. ``reduction`` is the number of products of direct summation per output element:
    channels * taps (forward and input gradient), batch * output height * output width (weight gradient). ``blocks`` are
    the lengths of nested sequential sums: channels (forward), tiles (weight gradient) or products (direct) per sum,
    then such sums per sum, and so on; the remaining sums are added in sequence. ``arithmetic`` applies to the innermost
    sums; transforms and sums of sums are in float32. ``known`` is the growth for known weights
    (:mod:`~polyconv.numerics.tap_forms`); by default taps are independent and of equal energy.
    """
    found = known or growth(scheme, form, repetition.flat)
    flatness = 0.0 if known else 1.0 if repetition.flat else magnitudes.flatness
    rms = expected_rms(
        scheme,
        reduction,
        form=form,
        blocks=blocks,
        flatness=flatness,
        equal_products=repetition.products,
        arithmetic=arithmetic,
        spread=magnitudes.spread * (1.0 if scheme is None else TRANSFORMED_SPREAD),
        known=known,
    )
    count = _count(found, reduction)
    largest = largest_over_rms(found.sums, repetition.outputs or max(outputs, FEWEST_OUTPUTS)) * rms
    drift = arithmetic.drift(_lengths(count, found.terms, blocks)[0]) * magnitudes.coherence(reduction)
    random = largest * magnitudes.excess(reduction, count, repetition)
    return MARGIN * (random + UNIT_ROUNDOFF * sqrt(found.product) * drift)


def expected_rms(
    scheme: Scheme2d | None,
    reduction: int,
    *,
    form: Form = "forward",
    blocks: tuple[int, ...] = (),
    flatness: float = 0.0,
    equal_products: float = 1.0,
    arithmetic: Arithmetic = FLOAT32,
    spread: float = 0.0,
    known: Growth | None = None,
) -> float:
    """Rms error at the worst position of a tile, for even data, relative to the output's scale, without margin."""
    found = known or growth(scheme, form)
    products, *of_sums = _lengths(_count(found, reduction), found.terms, blocks)
    sums = arithmetic.operands(spread) + arithmetic.sums(products, equal_products)
    sums += sum(FLOAT32.sums(length, equal_products) for length in of_sums)
    roundings = found.transforms + found.product * sums
    if flatness:
        flat = growth(scheme, form, True)
        roundings += flatness * (flat.transforms + flat.product * sums - roundings)
    return UNIT_ROUNDOFF * sqrt(ROUNDING * roundings * equal_products + arithmetic.shrinkage(products) ** 2)


def _count(found: Growth, reduction: int) -> int:
    """Number of channels or tiles."""
    return max(1, ceil(reduction / found.taps))


def _lengths(count: int, terms: float, blocks: tuple[int, ...]) -> list[float]:
    """Lengths of the nested sequential sums: of products first, then of the previous level's sums."""
    lengths: list[float] = []
    for block in blocks:
        if block < count:
            lengths.append(block * terms)
            count, terms = ceil(count / block), 1.0
    return [*lengths, count * terms]


@lru_cache(maxsize=4096)
def largest_over_rms(sums: float, outputs: float = OUTPUTS) -> float:
    """Largest of ``outputs`` errors, in units of the rms at the worst position of a tile, which one output in ten has.

    The roundings of a long sum scale with its partial sums, a random walk whose mean square has the mean 1/2 and the
    variance 1/3, close to a gamma distribution of shape 3/4; for ``sums`` sums the shape is k = 3/4 sums. An error of s
    is a mean square I times the usual one, of probability exp(-k (I - 1 - log I)), and a normal deviate of s / sqrt(I),
    of probability exp(-s^2 / 2I). s is the largest for which some I makes the product 10 / outputs.
    """
    shape, likelihood = 0.75 * sums, log(outputs / 10)
    tries = (2 ** (step / 32) for step in range(256))
    return sqrt(max(2 * i * (likelihood - shape * (i - 1 - log(i))) for i in tries))


def error_bound(
    scheme: Scheme2d | None,
    reduction: int,
    *,
    form: Form = "forward",
    blocks: tuple[int, ...] = (),
    count: int | None = None,
    magnitudes: Magnitudes,
) -> float:
    """Rigorous bound on the error for any data within ``x_max`` and ``w_max``, relative to the output's scale.

    Every rounding is at its worst and all have one sign, so actual errors are far smaller. ``count`` is the number of
    channels or, in the weight gradient, of tiles, by default for tiles that do not extend beyond the border.
    """
    if magnitudes.x_max is None or magnitudes.w_max is None:
        raise ValueError("a bound needs the largest magnitudes of both operands, x_max and w_max")
    found = growth(scheme, form)
    count = count or _count(found, reduction)
    longest = sum(map(ceil, _lengths(count, found.longest, blocks)))
    scale = magnitudes.scale(reduction)
    roundings = (found.depth + longest) * UNIT_ROUNDOFF
    if roundings >= 1 or not scale:
        return inf
    largest = count * found.absolute * magnitudes.x_max * magnitudes.w_max
    return roundings / (1 - roundings) * largest / scale
