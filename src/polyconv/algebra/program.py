"""Straight-line programs that multiply a vector by a constant matrix: the IR between a matrix and its C++ text.

A program is a list of operations on numbered values. It runs on fractions, so a test proves that it computes its
matrix exactly, and its operations are counted for the cost model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

from .matrices import Matrix, Number, Vector, is_dyadic, transpose

Kind: TypeAlias = Literal["add", "sub", "mul", "fma", "fms"]


class Op(NamedTuple):
    """``a + b``, ``a - b``, ``a * c``, ``a * c + b`` or ``a * c - b``; a and b are indices of earlier values."""

    kind: Kind
    a: int
    b: int = -1
    c: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class OpCount:
    """Operation counts of a program; subtractions count as additions, ``fms`` as ``fma``."""

    adds: int
    muls: int
    fmas: int
    depth: int

    @property
    def total(self) -> int:
        return self.adds + self.muls + self.fmas

    def __str__(self) -> str:
        return f"{self.total} operations ({self.adds} add, {self.muls} mul, {self.fmas} fma), depth {self.depth}"


@dataclass(frozen=True, slots=True)
class Program:
    """Values 0 to ``inputs - 1`` are the inputs, then one per operation. ``outputs`` holds indices, None for zero."""

    inputs: int
    ops: tuple[Op, ...]
    outputs: tuple[int | None, ...]

    def run(self, x: Sequence[Number]) -> Vector:
        if len(x) != self.inputs:
            raise ValueError(f"the program takes {self.inputs} values, not {len(x)}")
        values = [Fraction(v) for v in x]
        for op in self.ops:
            a, b = values[op.a], values[op.b]
            if op.kind == "add":
                values.append(a + b)
            elif op.kind == "sub":
                values.append(a - b)
            elif op.kind == "mul":
                values.append(a * op.c)
            else:
                values.append(a * op.c + (b if op.kind == "fma" else -b))
        return tuple(Fraction(0) if o is None else values[o] for o in self.outputs)

    def matrix(self) -> Matrix:
        return transpose(tuple(self.run([int(i == j) for i in range(self.inputs)]) for j in range(self.inputs)))

    def transposed(self) -> Program:
        """Program for the transposed matrix: the operations in reverse, each use of a value becoming a contribution. By
        Tellegen's theorem the operation counts differ by the excess of inputs over outputs only."""
        builder = Builder(len(self.outputs))
        uses: list[dict[int, Fraction]] = [{} for _ in range(self.inputs + len(self.ops))]

        def use(value: int, c: Fraction, by: int) -> None:
            uses[value][by] = uses[value].get(by, Fraction(0)) + c

        for row, value in enumerate(self.outputs):
            if value is not None:
                use(value, Fraction(1), row)
        for number in range(len(uses) - 1, self.inputs - 1, -1):
            terms = [(c, v) for v, c in uses[number].items() if c]
            if not terms:
                continue
            # Factors are deferred to the addition that uses them; only sums become operations.
            scale = common_factor([c for c, _ in terms])
            total = builder.sum([(c / scale, v) for c, v in terms])
            op = self.ops[number - self.inputs]
            use(op.a, scale * op.c, total)
            if op.kind != "mul":
                use(op.b, scale if op.kind in ("add", "fma") else -scale, total)
        sums = [[(c, v) for v, c in uses[i].items() if c] for i in range(self.inputs)]
        return builder.program([builder.sum(terms) if terms else None for terms in sums])

    def count(self) -> OpCount:
        depth = [0] * self.inputs
        for op in self.ops:
            depth.append(1 + max(depth[op.a], depth[op.b] if op.kind != "mul" else 0))
        kinds = [op.kind for op in self.ops]
        return OpCount(
            adds=kinds.count("add") + kinds.count("sub"),
            muls=kinds.count("mul"),
            fmas=kinds.count("fma") + kinds.count("fms"),
            depth=max((depth[o] for o in self.outputs if o is not None), default=0),
        )


Term: TypeAlias = tuple[Fraction, int]


def common_factor(coefficients: Sequence[Fraction]) -> Fraction:
    """Coefficient of smallest magnitude by which all others can be divided with dyadic results, 1 if there is none."""
    for c in sorted(coefficients, key=lambda c: (abs(c), c < 0)):
        if all(is_dyadic(other / c) for other in coefficients):
            return c
    return Fraction(1)


@dataclass(slots=True)
class Builder:
    """Collects operations without duplicates: an equal operation returns the existing value."""

    inputs: int
    ops: list[Op] = field(default_factory=list)
    _known: dict[Op, int] = field(default_factory=dict)

    def op(self, op: Op) -> int:
        if op.kind == "add" and op.a > op.b:
            op = op._replace(a=op.b, b=op.a)
        if op not in self._known:
            self._known[op] = self.inputs + len(self.ops)
            self.ops.append(op)
        return self._known[op]

    def add(self, a: int, b: int) -> int:
        return self.op(Op("add", a, b))

    def sub(self, a: int, b: int) -> int:
        return self.op(Op("sub", a, b))

    def scale(self, c: Fraction, a: int) -> int:
        return a if c == 1 else self.op(Op("mul", a, c=c))

    def multiply_add(self, c: Fraction, a: int, b: int, sign: int = 1) -> int:
        """``c * a + sign * b``, as an addition or subtraction if that suffices."""
        if c == 1:
            return self.add(a, b) if sign > 0 else self.sub(a, b)
        if c == -1 and sign > 0:
            return self.sub(b, a)
        return self.op(Op("fma" if sign > 0 else "fms", a, b, c))

    def signed_sum(self, terms: Sequence[Term]) -> tuple[int, int]:
        """(sign, value) with ``sum(c * v) = sign * value`` for c of 1 or -1: a balanced tree of additions."""
        pending = [(int(c), v) for c, v in terms]
        while len(pending) > 1:
            joined = []
            for (p, a), (q, b) in zip(pending[::2], pending[1::2], strict=False):
                if p == q:
                    joined.append((p, self.add(a, b)))
                else:
                    joined.append((1, self.sub(a, b) if p > 0 else self.sub(b, a)))
            pending = joined + pending[len(pending) - len(pending) % 2 :]
        return pending[0]

    def sum(self, terms: Iterable[Term]) -> int:
        """``sum(c * v)``: one multiply-add per group of coefficients of equal magnitude. The group of magnitude 1,
        which needs no multiplication, is first; the others follow in rising magnitude."""
        groups: dict[Fraction, list[Term]] = {}
        for c, v in terms:
            groups.setdefault(abs(c), []).append((Fraction(1 if c > 0 else -1), v))
        first, *others = sorted(groups, key=lambda c: (c != 1, c))
        sign, value = self.signed_sum(groups[first])
        if first != 1:
            value, sign = self.scale(sign * first, value), 1
        for c in others:
            more, group = self.signed_sum(groups[c])
            value, sign = self.multiply_add(more * c, group, value, sign), 1
        return value if sign > 0 else self.scale(Fraction(-1), value)

    def program(self, outputs: Sequence[int | None]) -> Program:
        """Program of the operations that the outputs need, each as late as possible, for short live ranges."""
        rename = {i: i for i in range(self.inputs)}
        ops: list[Op] = []

        def place(number: int) -> int:
            if number not in rename:
                op = self.ops[number - self.inputs]
                a, b = place(op.a), -1 if op.kind == "mul" else place(op.b)
                rename[number] = self.inputs + len(ops)
                ops.append(op._replace(a=a, b=b))
            return rename[number]

        placed = tuple(None if o is None else place(o) for o in outputs)
        return Program(self.inputs, tuple(ops), placed)
