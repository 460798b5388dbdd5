"""Code generation for constant matrices: one C++ text for CUDA device code and for vector types on the CPU.

Common subexpressions found for the matrices of :mod:`polyconv.algebra.cook_toom`:

* points +p and -p give two rows (B^T, G) or two columns (A^T) that agree up to signs: the even part e and the odd part
  o are computed once, then e + o and e - o;
* rows on the same inputs are sometimes cheaper as one common row plus a correction each: from
  u = a - 5b + c come 4a - 5b + c = u + 3a, a - 5b + 4c = u + 3c and a - 4.25b + c = u + 0.75b;
* sums of two terms that occur in several rows are computed once;
* a coefficient other than 1 and -1 is one multiply-add if the sum starts with a term of coefficient 1.

With and without common rows, from the matrix and from its transpose (then reversed): all four combinations are
compiled and the cheapest is used. The result is deterministic.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations, product
from math import lcm
from typing import Literal, TypeAlias

from .matrices import Matrix, is_dyadic, transpose
from .program import Builder, Op, Program, common_factor

Form: TypeAlias = dict[int, Fraction]
"""A linear form: non-zero coefficient by value index."""

Recipe: TypeAlias = list[tuple[Fraction, Form]]
"""An output as a sum of scaled linear forms, which outputs may share."""

Scalar: TypeAlias = Literal["float", "double"]


def emit_transform(
    name: str, matrix: Matrix, *, scalar: Scalar = "float", rounded: bool = False, program: Program | None = None
) -> str:
    """C++ text of ``template <class T> void name(const T* x, T* y)`` with ``y = matrix x``.

    The text uses ``POLYCONV_INLINE``, ``mul_add`` and ``mul_sub`` of kernels/winograd/axis.cuh; another compiler or a
    vector type supplies its own. ``x`` and ``y`` may alias: all inputs are read before an output is written.
    Coefficients must be exact in ``scalar`` unless ``rounded`` allows the nearest (G has thirds and ninths). To
    accumulate into existing outputs, append the identity to the matrix and pass the outputs as further inputs; for a
    subset of points, pass a subset of rows.
    """
    program = program or compile_matrix(matrix)
    names = {i: f"x{i}" for i in range(program.inputs)}
    used = {v for op in program.ops for v in (op.a, op.b)} | {o for o in program.outputs if o is not None}
    lines = [f"  const T x{i} = x[{i}];" for i in range(program.inputs) if i in used]

    # An output that no operation reads needs no temporary.
    reads = {v for op in program.ops for v in ((op.a,) if op.kind == "mul" else (op.a, op.b))}
    stores: dict[int, list[int]] = {}
    for row, value in enumerate(program.outputs):
        if value is not None:
            stores.setdefault(value, []).append(row)
    temporaries = 0
    for number, op in enumerate(program.ops, program.inputs):
        text = _expression(op, names, scalar, rounded)
        rows = stores.pop(number, [])
        if number not in reads and len(rows) == 1:
            lines.append(f"  y[{rows[0]}] = {text};")
            continue
        names[number] = f"t{temporaries}"
        temporaries += 1
        lines.append(f"  const T {names[number]} = {text};")
        lines += [f"  y[{row}] = {names[number]};" for row in rows]
    lines += [f"  y[{row}] = {names[value]};" for value, rows in stores.items() for row in rows]
    zero = _literal(Fraction(0), scalar, rounded)
    lines += [f"  y[{row}] = T({zero});" for row, value in enumerate(program.outputs) if value is None]

    head = f"// {len(program.outputs)} from {program.inputs} in {program.count()}."
    signature = f"template <class T>\nPOLYCONV_INLINE void {name}(const T* x, T* y) {{"
    return "\n".join([head, signature, *lines, "}", ""])


def _expression(op: Op, names: dict[int, str], scalar: Scalar, rounded: bool) -> str:
    a, b = names[op.a], names.get(op.b, "")
    if op.kind in ("add", "sub"):
        return f"{a} {'+' if op.kind == 'add' else '-'} {b}"
    if op.kind == "mul":
        return f"-{a}" if op.c == -1 else f"{a} * {_literal(op.c, scalar, rounded)}"
    return f"{'mul_add' if op.kind == 'fma' else 'mul_sub'}({a}, {_literal(op.c, scalar, rounded)}, {b})"


def _literal(c: Fraction, scalar: Scalar, rounded: bool) -> str:
    """Shortest decimal that parses to ``c``, or to the nearest ``scalar`` if ``rounded``."""
    nearest = float(c)
    if scalar == "float":
        nearest = struct.unpack("f", struct.pack("f", nearest))[0]
    if Fraction(nearest) != c and not rounded:
        raise ValueError(f"the coefficient {c} is not exact in {scalar}")
    if scalar == "double":
        return repr(nearest)
    digits = (f"{nearest:.{d}g}" for d in range(1, 10))
    return repr(float(next(t for t in digits if struct.pack("f", float(t)) == struct.pack("f", nearest)))) + "f"


# ---------------------------------------------------------------------------------------------- matrix -> program


@cache
def compile_matrix(matrix: Matrix) -> Program:
    """Cheapest program found for ``y = matrix x``: fewest operations, then least depth."""
    straight = [_compile(matrix, common=common) for common in (True, False)]
    backward = [_compile(transpose(matrix), common=common).transposed() for common in (True, False)]
    programs = straight + backward
    return min(programs, key=lambda p: (p.count().total, p.count().depth))


def _compile(matrix: Matrix, *, common: bool) -> Program:
    builder = Builder(len(matrix[0]))
    forms = [{j: c for j, c in enumerate(row) if c} for row in matrix]
    _pair_columns(builder, forms)
    recipes = _pair_rows(forms)
    parts = _distinct([part for recipe in recipes for _, part in recipe if len(part) > 1])
    shared = list(parts)
    if common:
        _common_rows(builder, shared)
    _common_pairs(builder, shared)

    values = [builder.sum([(c, v) for v, c in form.items()]) for form in shared]
    outputs: list[int | None] = []
    for recipe in recipes:
        terms = []
        for scale, part in recipe:
            if len(part) > 1:
                terms.append((scale, values[parts.index(part)]))
            else:
                terms += [(scale * c, v) for v, c in part.items()]
        outputs.append(builder.sum(terms) if terms else None)
    return builder.program(outputs)


def _distinct(forms: list[Form]) -> list[Form]:
    return [form for i, form in enumerate(forms) if form not in forms[:i]]


def _signs(a: Sequence[Fraction], b: Sequence[Fraction]) -> tuple[Fraction, list[int]] | None:
    """(ratio, signs) with ``b[i] = signs[i] * ratio * a[i]`` and dyadic ratio > 0, or None; a and b have no zeros."""
    ratios = [q / p for p, q in zip(a, b, strict=True)]
    if len(set(map(abs, ratios))) != 1 or not is_dyadic(ratios[0]):
        return None
    first = ratios[0]
    return abs(first), [1 if ratio > 0 else -1 for ratio in ratios]


def _pair_columns(builder: Builder, forms: list[Form]) -> None:
    """Replace columns x and z that agree up to sign by x + z and x - z if that saves operations."""
    for j, k in combinations(range(builder.inputs), 2):
        users = [form for form in forms if j in form]
        if users != [form for form in forms if k in form]:
            continue
        found = _signs([form[j] for form in users], [form[k] for form in users])
        if found is None:
            continue
        ratio, signs = found
        if len(users) <= len(set(signs)):
            continue
        made = {sign: builder.multiply_add(sign * ratio, k, j) for sign in sorted(set(signs), reverse=True)}
        for form, sign in zip(users, signs, strict=True):
            form[made[sign]] = form.pop(j)
            del form[k]


def _primitive(form: Form) -> tuple[Fraction, Form]:
    """(scale, form / scale) with a coefficient of 1 if possible, so that the sum starts without a multiplication."""
    scale = common_factor(list(form.values()))
    return scale, {v: c / scale for v, c in form.items()}


def _pair_rows(forms: list[Form]) -> list[Recipe]:
    """Split rows that agree up to sign into e + o and e - o; e has the terms of equal sign, o the others."""
    recipes: list[Recipe | None] = [None] * len(forms)
    for i, k in combinations(range(len(forms)), 2):
        if recipes[i] or recipes[k] or forms[i].keys() != forms[k].keys():
            continue
        found = _signs(list(forms[i].values()), [forms[k][v] for v in forms[i]])
        if found is None:
            continue
        ratio, signs = found
        if len(set(signs)) == 1:
            recipes[i] = [(Fraction(1), forms[i])]
            recipes[k] = [(ratio * signs[0], forms[i])]
            continue
        if len(signs) < 3:
            continue
        even: Form = {v: c for (v, c), sign in zip(forms[i].items(), signs, strict=True) if sign > 0}
        odd: Form = {v: c for (v, c), sign in zip(forms[i].items(), signs, strict=True) if sign < 0}
        (p, even_), (q, odd_) = _primitive(even), _primitive(odd)
        if abs(p) != 1 and abs(q) != 1:
            # One of the two needs factor 1, or both outputs would multiply twice.
            if len(even) > 1:
                p, even_ = Fraction(1), even
            else:
                q, odd_ = Fraction(1), odd
        recipes[i] = [(p, even_), (q, odd_)]
        recipes[k] = [(p * ratio, even_), (-q * ratio, odd_)]
    return [recipe or [(Fraction(1), form)] for recipe, form in zip(recipes, forms, strict=True)]


def _cost(form: Form) -> int:
    """Operations of :meth:`Builder.sum` for the form."""
    if len(form) == 0:
        return 0
    units = [c for c in form.values() if abs(c) == 1]
    negated = len(units) == len(form) and all(c < 0 for c in units)
    return len(form) - (1 if units else 0) + (1 if negated else 0)


def _minus(a: Form, b: Form, sign: int) -> Form:
    """``a - sign * b``."""
    found = {v: a.get(v, Fraction(0)) - sign * b.get(v, Fraction(0)) for v in a.keys() | b.keys()}
    return {v: found[v] for v in sorted(found) if found[v]}


def _cheapest_row(forms: Sequence[Form], support: tuple[int, ...]) -> Form | None:
    """Common row from which forms on the same values take the fewest operations, None if it saves none."""
    # Hundreds of rows are tried, so coefficients are scaled to integers.
    unit = lcm(*(c.denominator for form in forms for c in form.values()))
    rows = [[int(form[v] * unit) for v in support] for form in forms]
    alone = [_cost(form) for form in forms]
    best: tuple[int, int] = (sum(alone), 0)
    chosen: Form | None = None
    for row in product(*([0, *sorted({each[place] for each in rows})] for place in range(len(support)))):
        base = {v: Fraction(c, unit) for v, c in zip(support, row, strict=True) if c}
        if len(base) < 2:
            continue
        residues = [[abs(c - b) for c, b in zip(each, row, strict=True)] for each in rows]
        costs = (min(cost, len(each) - each.count(0)) for cost, each in zip(alone, residues, strict=True))
        total = _cost(base) + sum(costs)
        # Among equally cheap rows, the smallest coefficients lose the fewest digits.
        weight = sum(map(abs, row)) + sum(map(sum, residues))
        if total < best[0] or (chosen is not None and (total, weight) < best):
            best, chosen = (total, weight), base
    return chosen


def _common_rows(builder: Builder, forms: list[Form]) -> None:
    """Rewrite each set of three or more forms on the same values as a common row plus corrections, if cheaper."""
    supports = {tuple(sorted(form)) for form in forms}
    for support in sorted(supports):
        group = [i for i, form in enumerate(forms) if tuple(sorted(form)) == support]
        if len(group) < 3 or not 3 <= len(support) <= 4:
            continue
        chosen = _cheapest_row([forms[i] for i in group], support)
        if chosen is None:
            continue
        value = builder.sum([(c, v) for v, c in chosen.items()])
        for i in group:
            residue = _minus(forms[i], chosen, 1)
            if len(residue) < _cost(forms[i]):
                forms[i] = {value: Fraction(1)} | residue


def _common_pairs(builder: Builder, forms: list[Form]) -> None:
    """Compute two-term sums that several forms contain (up to a factor) once, while that saves operations."""
    while True:
        before = sum(map(_cost, forms))
        best: tuple[int, list[Form], tuple[int, Fraction, int]] | None = None
        for a, ratio, b in _candidates(forms):
            trial = [_replace_pair(form, a, ratio, b, -1) for form in forms]
            after = sum(map(_cost, trial)) + 1
            if after < before and (best is None or after < best[0]):
                best = after, trial, (a, ratio, b)
        if best is None:
            return
        _, trial, (a, ratio, b) = best
        value = builder.multiply_add(ratio, b, a)
        forms[:] = [{value if v == -1 else v: c for v, c in form.items()} for form in trial]


def _candidates(forms: list[Form]) -> Iterator[tuple[int, Fraction, int]]:
    """(a, ratio, b) for each ``a + ratio * b`` with a dyadic ratio in at least two forms, in a fixed order."""
    count: dict[tuple[int, Fraction, int], int] = {}
    for form in forms:
        for a, b in combinations(sorted(form), 2):
            ratio = form[b] / form[a]
            for key in ((a, ratio, b), (b, 1 / ratio, a)):
                count[key] = count.get(key, 0) + 1
    return (key for key, times in count.items() if times > 1 and is_dyadic(key[1]))


def _replace_pair(form: Form, a: int, ratio: Fraction, b: int, value: int) -> Form:
    if a not in form or b not in form or form[b] != ratio * form[a]:
        return form
    return {v: c for v, c in form.items() if v not in (a, b)} | {value: form[a]}
