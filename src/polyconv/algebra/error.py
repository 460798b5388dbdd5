"""The error model: how far a float32 convolution strays from the exact one, known before it runs.

Every operation rounds, and a fast algorithm passes roundings on through matrices whose entries grow with the number of
points. Here each operation of a scheme is followed to the output: how large the value is that it rounds, and with which
factor the rounding arrives. Both follow from the exact matrices, and nothing is fitted to measurements but a margin.

Write the scheme as ``y = A^T sum_c (G w_c) * (B^T x_c)``, for independent ``x`` of rms 1 and ``w`` of rms 1. Along one
axis, for the output ``i``, with ``S_k`` the row of coefficients that makes the value of operation ``k`` out of the
inputs of its transform and ``T_k`` those with which it enters the outputs of its transform, the roundings add up to

    taps     r                                         = sum over (x, w) of the factor of x w in y[i]: 1 or 0, exactly
    product  sum_p A[i,p]^2 |G_p|^2 |B_p|^2              one rounding of each product (or of each transformed weight)
    input    sum_k |S_k|^2 |(A[i] * T_k) G|^2            operations of B^T
    output   sum_k T_k[i]^2 |S_k (G . B)|^2              operations of A^T

(``*`` is by element, ``G . B`` the tensor of the products). Of two axes, the one that is transformed first meets the
other one as exact (its ``taps``), the second meets transformed values (``product``):

    input = input_first taps_second + product_first input_second,      product = product_h product_w,

and likewise for the output; the order is the backend's, so the worse one counts. A sum of L products in sequence rounds
partial sums of 1, 2, ... L terms: (L + 1) / 2 times ``product``. A rounding has the mean square ``ROUNDING u^2`` of the
value, u = 2^-24, so that relative to the output's scale, ``sqrt(reduction) rms(x) rms(w)``, the error has the rms

    u sqrt(ROUNDING (input + weight + output + product (L + 1) / 2) / taps)

and the largest of many outputs is :func:`largest_over_rms` times that, times what :meth:`Magnitudes.excess` says of
uneven data, times MARGIN. Where a tensor is expanded, or its windows overlap, data is not independent:
:class:`Repetition` says how much of it is the same, and what of the above becomes larger by that.

What this does not cover: patterns that repeat from tile to tile (or in every channel) and cancel only in the output,
data without any randomness, values below the smallest exponent (about 1e-38). :func:`error_bound` covers the first two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil, inf, log, sqrt
from typing import NamedTuple, Protocol

from polyconv.algebra.matrices import Matrix, is_dyadic
from polyconv.algebra.program import Program
from polyconv.algebra.segments import AxisScheme, Scheme2d
from polyconv.algebra.steps import Form, axis_steps

UNIT_ROUNDOFF = 2.0**-24

ROUNDING = 1 / (8 * log(2))
"""Mean square of a rounding, in units of (u |value|)^2: 1/3 for an evenly spread error next to a power of two, less
above it, on average over mantissas that are spread as 1 / m."""

OUTPUTS = 1e8
"""Output elements of which the largest error is predicted, where their number is not given. The dependence is weak: the
largest of 1e6 normally distributed errors is 4.9 times their rms, of 1e8 it is 5.7 times."""

FEWEST_OUTPUTS = 1e6
"""Output elements that are counted at the least: a few of them may be the worst of many calls."""

USUAL_SPREAD = 32.0
"""Largest magnitude of a tensor over its rms, where nothing else is known."""

TRANSFORMED_SPREAD = 8.0
"""How much larger it may be of what transforms of eight make, one along each axis: in a row of eight, magnitudes add up
to sqrt(8) times the root of their squares."""

MARGIN = 1.1
"""For what differs between kernels: order of operations, other programs for the same transform, a bias."""


# --------------------------------------------------------------------------------------------- roundings, followed


class Rounding(NamedTuple):
    """A value that is rounded: its coefficients from the inputs, and those with which it enters the outputs."""

    made_of: dict[int, float]
    enters: dict[int, float]


def followed_roundings(program: Program) -> list[Rounding]:
    """Every rounding of a program. Powers of two do not round; a coefficient that is no float32 does, once more."""
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
    """Whether a coefficient is a float32 as it is."""
    return is_dyadic(c) and abs(c.numerator) < 2**24


def _gram(a: Matrix, flat: bool = False) -> list[list[float]]:
    """Scalar products of the rows: what values of rms 1 make of them, independent ones or (flat) equal ones."""
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
    """The sums of the module's first lines, by output of one axis, and the norms of the rigorous bound."""

    taps: int
    terms: float
    """Length of the sequence that makes an accumulator, per channel or tile. Of q passes that follow one another the
    partial sums have the size of the first pass's sum from there on: they count like a sequence of 2 - 1 / q."""
    longest: int
    """The same for the bound: every addition counts."""
    product: tuple[float, ...]
    fourth: tuple[float, ...]
    """Like ``product``, of fourth powers, for every pair of accumulators: tells how many of them matter."""
    input: tuple[float, ...]
    weight: tuple[float, ...] | None
    output: tuple[float, ...]
    absolute: float
    """The largest ``sum_p |A|[i,p] |G_p|_1 |B_p|_1``, the matrices being those of absolute values along the way."""
    depth: int
    """Roundings between an input and an output, at most, those of the sum of products not counted."""


@lru_cache(maxsize=1024)
def axis_growth(scheme: AxisScheme, form: Form = "forward", flat: bool = False) -> AxisGrowth:
    """Every rounding of one axis, followed to every output of its tile; ``flat``, for weights that are all equal."""
    steps = axis_steps(scheme, form)
    at = [[float(c) for c in row] for row in steps.at]
    weights, inputs = _gram(steps.g, flat), _gram(steps.bt)
    both = [[g * b for g, b in zip(p, q, strict=True)] for p, q in zip(weights, inputs, strict=True)]

    def entering(program: Program, other: list[list[float]], flat: bool = False) -> tuple[float, ...]:
        # What the operations of one operand's transform do, after the products with the other operand.
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

    # Accumulators are correlated, passes that follow one another entirely: what is common does not average out.
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
        # In double, then rounded; one more rounding of float32 is more than all of double's.
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
    """The program's matrix with every operation on absolute values, and the most roundings on any path."""
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
    """A scheme's roundings in both axes, mean squares relative to the output's: the worst output of a tile."""

    taps: int
    """Products of the definition per channel (forward) or tile (weight gradient)."""
    terms: float
    """Products in the sequence that makes an accumulator, for these."""
    transforms: float
    """What all transforms together do, whatever the number of channels."""
    product: float
    """What one rounding of every product does."""
    longest: int
    """Additions of products on the way to one output, at most, for these."""
    sums: float
    """How many independent sums an output's error is made of, in effect: 1 for direct summation."""
    absolute: float
    """Largest magnitude that an output's terms can add up to, of data of magnitude 1, before any cancellation."""
    depth: int
    """Roundings between an input and an output, at most, those of the sum of products not counted."""

    def __str__(self) -> str:
        return f"growth {sqrt(self.product):.1f} per rounding of the sum, {sqrt(self.transforms):.1f} in the transforms"


DIRECT = Growth(taps=1, terms=1.0, transforms=0.0, product=1.0, longest=1, sums=1.0, absolute=1.0, depth=1)


@lru_cache(maxsize=4096)
def growth(scheme: Scheme2d | None, form: Form = "forward", flat: bool = False) -> Growth:
    """How a scheme makes roundings grow; None is direct summation. ``flat``: for equal weights, if that is worse."""
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
            # Whichever axis comes first meets the other one as exact, the second meets transformed values.
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


# ------------------------------------------------------------------------------------------------ data, and the answer


@dataclass(frozen=True, slots=True)
class Repetition:
    """How much of the data is the same because of how tensors lie in memory: expanded, or windows that overlap.

    ``x`` and ``w`` as in :class:`Magnitudes`. The default is a problem whose values all have a place of their own.
    """

    products: float = 1.0
    """How many of the products that one output sums are the same, on average: both operands repeat there together.
    Equal products add up to so many times the usual mean square, and adding the same number to a sum rounds the same
    way again, as long as the sum keeps its exponent: roundings of equal products do not average out."""
    x_channels: float = inf
    """Channels (tiles) of x that differ, at most: a value that sticks out does so in every channel that repeats it.
    Zero, if all that an output map reads of x is one number: then none sticks out."""
    w_channels: float = inf
    """The same of w."""
    flat: bool = False
    """Taps of w (in the weight gradient, pixels of dy) repeat: see :attr:`Magnitudes.w_mean`."""
    outputs: float | None = None
    """Outputs that differ, where an output map reads one number of one operand: few."""


INDEPENDENT = Repetition()


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """What is known of the data. The default is what a network's layer sees: normal inputs, uniform weights.

    ``x`` is the operand that B^T transforms and ``w`` the other: ``dy`` and the weights in the input gradient, the
    input and ``dy`` in the weight gradient. Only ratios matter to a relative error.
    """

    x_rms: float = 1.0
    x_max: float | None = None
    """Largest magnitude of all."""
    w_rms: float = 1.0
    w_max: float | None = None
    """The same of the other operand."""
    x_local: float | None = None
    """Largest rms within one channel over a window of about a tile, where scales differ from place to place."""
    w_local: float | None = None
    """Largest rms of the taps between two channels, where scales differ."""
    y_max: float | None = None
    """Largest magnitude of the output, where sums are of one sign and outgrow those of random signs: for data with an
    offset and weights with one, ``reduction`` times both means. Up to three times the scale it changes nothing."""

    w_mean: float = 0.0
    """Of the weights of one output, the rms over channels of the mean of their taps, largest of all outputs (of ``dy``:
    of its means over windows): equal weights meet at one point of a transform and grow more than random ones."""

    x_tensor_max: float | None = None
    """Largest magnitude of the whole tensor, where other images (output maps) are larger than the one that is asked
    about: a format of few exponents is fitted to it (:mod:`polyconv.algebra.tensor_core`)."""
    w_tensor_max: float | None = None
    """The same of the other operand."""

    @property
    def spread(self) -> float:
        """Largest magnitude of a tensor over the rms of the part that is asked about: of the operand where it is
        larger, a few times that of normal data if nothing is known."""
        x, w = self.x_tensor_max or self.x_max, self.w_tensor_max or self.w_max
        ratios = [largest / rms for largest, rms in ((x, self.x_rms), (w, self.w_rms)) if largest and rms]
        return max(ratios, default=USUAL_SPREAD)

    def coherence(self, reduction: int) -> float:
        """The largest output over the scale, where sums are of one sign."""
        scale = self.scale(reduction)
        largest = (self.y_max or 0.0) / scale if scale else 0.0
        return largest if largest > 3 else 0.0

    def scale(self, reduction: int) -> float:
        """The output's scale: its rms for independent data, ``reduction`` products per output."""
        return sqrt(reduction) * self.x_rms * self.w_rms

    def excess(self, reduction: int, count: int, repetition: Repetition = INDEPENDENT) -> float:
        """How much larger than for even data the rms error may be where it is largest.

        A window with the largest scale, and in one of its ``count`` channels (tiles) the largest value of all, meet the
        same of the weights; and partial sums are as large as the largest output. Of weights nothing sticks out, if
        nothing else is known, unless few of them stand for all.
        """
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
        """Share of equal weights in the mean square of all."""
        return min(1.0, (self.w_mean / self.w_rms) ** 2) if self.w_rms else 0.0


TYPICAL = Magnitudes()


def _lone(largest: float, channels: float) -> float:
    """What one channel of so many, with the largest value in it, adds to the mean square."""
    return largest**2 / channels if channels else 0.0


class Arithmetic(Protocol):
    """How products are made and added up, in one sequence. Its roundings are counted in those to nearest of float32."""

    def operands(self, spread: float) -> float:
        """What is lost of both operands of a product before they meet, in mean square. ``spread`` is the largest
        magnitude of a whole tensor over the rms of what one output map is made of."""

    def sums(self, length: float, equal_products: float) -> float:
        """Roundings of a sequence of so many products, of which so many are equal, in mean square: 1 is one rounding of
        the whole sum."""

    def shrinkage(self, length: float) -> float:
        """What every sequence loses of its sum, in units of u: it is as much of the output."""

    def drift(self, length: float) -> float:
        """What a sequence of products of one sign loses beyond that, in the same unit."""

    def __hash__(self) -> int:
        """Equal ones are equal: predictions are remembered."""


class Float32:
    """Multiply-adds that round to nearest, one after another."""

    def operands(self, spread: float) -> float:
        return 0.0

    def sums(self, length: float, equal_products: float) -> float:
        # Partial sums of 1, 2, ... L terms out of L make (L + 1) / 2 times the mean square of the whole; of one sign,
        # its square.
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
    """The largest |ours - exact| of any output element that is to be expected, relative to the output's scale.

    ``scheme`` None is direct summation. ``reduction`` counts the products of the definition per output element:
    channels * taps (forward and input gradient), batch * output height * output width (weight gradient).

    ``blocks`` says how sums are cut: the first is the number of channels (forward), tiles (weight gradient) or products
    (direct) that are added in sequence, the next the number of such sums that are added in sequence, and so on; what is
    left at the end is added in sequence, too. ``outputs`` is the number of output elements. ``arithmetic`` is that of
    the innermost sequences; transforms, and sums of sums, are float32's. ``known`` is the growth for the weights that
    are there (:mod:`~polyconv.algebra.taps`); without it taps are independent and of equal energy.
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
    """The rms of the error where in a tile it is largest, for even data, relative to the output's scale: no margin."""
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
    """Channels or tiles."""
    return max(1, ceil(reduction / found.taps))


def _lengths(count: int, terms: float, blocks: tuple[int, ...]) -> list[float]:
    """The sequences of a sum, one inside another: of products first, then of sums of the level before."""
    lengths: list[float] = []
    for block in blocks:
        if block < count:
            lengths.append(block * terms)
            count, terms = ceil(count / block), 1.0
    return [*lengths, count * terms]


@lru_cache(maxsize=4096)
def largest_over_rms(sums: float, outputs: float = OUTPUTS) -> float:
    """The largest of so many errors, in units of the rms where in a tile it is largest: one in ten lies there.

    The roundings of one long sum are as large as its partial sums happen to be: a random walk, the mean square of which
    has the mean 1/2 and the variance 1/3, much like a gamma distribution of shape 3/4. Over ``sums`` of them the shape
    is k = 3/4 sums. An error of s means a mean square I times the usual one, of probability exp(-k (I - 1 - log I)),
    and a normal deviate of s / sqrt(I), of probability exp(-s^2 / 2I): s is the largest for which some I makes the
    product one in ten outputs.
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
    """What the error cannot exceed for any data of these ``x_max`` and ``w_max``, relative to the output's scale.

    Every rounding at its worst, all of one sign: far above what happens, and never below it. ``count`` is the number of
    channels or, in the weight gradient, of tiles; there, tiles that jut out make it more than the default, which is
    ``reduction`` divided by the taps or outputs of one.
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


def allowed(
    scheme: Scheme2d | None,
    reduction: int,
    tolerance: float,
    *,
    form: Form = "forward",
    blocks: tuple[int, ...] = (),
    outputs: float = OUTPUTS,
    magnitudes: Magnitudes = TYPICAL,
) -> bool:
    """Whether a scheme stays within the caller's tolerance. Direct summation always may run: nothing is safer."""
    if scheme is None:
        return True
    found = predicted_error(scheme, reduction, form=form, blocks=blocks, outputs=outputs, magnitudes=magnitudes)
    return found <= tolerance
