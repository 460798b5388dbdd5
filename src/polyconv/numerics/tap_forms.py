"""Dependence of a scheme's roundings on the weights, as quadratic forms of the taps (docs/accuracy.md).

Every value rounded in :mod:`~polyconv.numerics.error_model` is linear in the weights ``w`` of one channel and in the
input, so for independent inputs of rms 1 its mean square is ``w^T Q w``. Along one axis, for output ``i``:

    product  Q = sum_p A[i,p]^2 sum_b r r^T,      r = sum over the products n of the accumulator p of B[n,b] G_n
    input    Q = sum_k |S_k|^2 t t^T,             t = (A[i] * T_k) G
    output   Q = sum_k T_k[i]^2 sum_b r r^T,      r = S_k (G . B)[b]
    taps     Q = 1                                the exact output

Two axes combine as a Kronecker product. For independent taps of equal energy only the traces count, which are the sums
of :class:`~polyconv.numerics.error_model.AxisGrowth`. Energy in a single tap ``k`` counts ``Q[k][k]``, which for an
outer tap is several times the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..algebra.segments import AxisScheme
from ..algebra.steps import axis_steps
from .error_model import followed_roundings

Form = list[list[float]]
"""Quadratic form of the taps: symmetric, taps x taps."""


@dataclass(frozen=True, slots=True)
class TapForms:
    """Forms of one axis of a forward scheme, by output of its tile."""

    product: tuple[Form, ...]
    input: tuple[Form, ...]
    output: tuple[Form, ...]
    accumulators: tuple[tuple[tuple[float, ...], ...], ...]
    """[accumulator][input][tap]: factor of input * tap in the accumulator."""
    back: tuple[tuple[float, ...], ...]
    """[output][accumulator]: factor of the accumulator in the output."""
    points: int
    """Accumulators of one pass; those of consecutive nested passes are completely correlated."""

    @property
    def taps(self) -> int:
        return len(self.product[0])


@lru_cache(maxsize=256)
def tap_forms(scheme: AxisScheme) -> TapForms:
    """Forms of an axis, from its exact matrices. Weights are transformed in double and rounded once."""
    steps = axis_steps(scheme)
    g, bt, at = ([[float(c) for c in row] for row in rows] for rows in (steps.g, steps.bt, steps.at))
    taps, inputs = range(len(g[0])), range(len(bt[0]))

    sums = [[[0.0] * len(taps) for _ in inputs] for _ in range(steps.accumulators)]
    for accumulator, weights, values in zip(steps.sums, g, bt, strict=True):
        for b, value in enumerate(values):
            if value:
                for k in taps:
                    sums[accumulator][b][k] += value * weights[k]
    back = tuple(
        tuple(
            next(a for n, a in zip(steps.sums, row, strict=True) if n == accumulator)
            for accumulator in range(steps.accumulators)
        )
        for row in at
    )
    products = [_squares(rows, len(taps)) for rows in sums]

    entering = []
    for rounding in followed_roundings(steps.input):
        size = sum(c * c for c in rounding.made_of.values())
        entering.append((size, [[c * weight for weight in g[p]] for p, c in rounding.enters.items()], rounding.enters))
    leaving = []
    for rounding in followed_roundings(steps.output):
        rows = [[sum(c * sums[n][b][k] for n, c in rounding.made_of.items()) for k in taps] for b in inputs]
        leaving.append((rounding.enters, _squares(rows, len(taps))))

    def of_inputs(row: list[float]) -> Form:
        reached = []
        for size, rows, enters in entering:
            factors = [row[p] * size**0.5 for p in enters]
            reached.append([sum(f * r[k] for f, r in zip(factors, rows, strict=True)) for k in taps])
        return _squares(reached, len(taps))

    return TapForms(
        product=tuple(_total([(a * a, q) for a, q in zip(row, products, strict=True)], len(taps)) for row in back),
        input=tuple(map(of_inputs, at)),
        output=tuple(
            _total([(enters.get(i, 0.0) ** 2, form) for enters, form in leaving], len(taps)) for i in range(len(at))
        ),
        accumulators=tuple(tuple(map(tuple, rows)) for rows in sums),
        back=back,
        points=steps.accumulators // scheme.outer.products if steps.passes > 1 else steps.accumulators,
    )


def _squares(rows: list[list[float]], taps: int) -> Form:
    """Sum of the squares of linear forms."""
    form = [[0.0] * taps for _ in range(taps)]
    for row in rows:
        held = [(k, c) for k, c in enumerate(row) if c]
        for k, c in held:
            for j, d in held:
                form[k][j] += c * d
    return form


def _total(terms: list[tuple[float, Form]], taps: int) -> Form:
    form = [[0.0] * taps for _ in range(taps)]
    for factor, term in terms:
        if factor:
            for line, row in zip(form, term, strict=True):
                for j, c in enumerate(row):
                    line[j] += factor * c
    return form
