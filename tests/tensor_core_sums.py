"""Tensor-core sums and split-operand products in double, exact until truncated: a reference for emulator and model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from polyconv.numerics.tensor_core import TOP, SplitProducts, TensorCore

Array = npt.NDArray[Any]
Factors = tuple[Array, Array]


def random_values(seed: int, orders: int, *shapes: tuple[int, ...]) -> list[Array]:
    """Values of either sign whose magnitudes span this many binary orders."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) * 2.0 ** rng.integers(-orders, orders + 1, shape) for shape in shapes]


def block_sum(core: TensorCore, factors: list[Factors], addend: Array) -> Array:
    """One block: products and addend aligned to the largest exponent, truncated there, and the sum truncated to
    float32.

    The exponent of a product is the sum of its factors', though its significand may have one bit more.
    """
    none = -(10**6)
    largest = np.where(addend == 0, none, np.frexp(addend)[1] - 1)
    for a, b in factors:
        exponents = np.frexp(a)[1] + np.frexp(b)[1] - 2
        largest = np.maximum(largest, np.where((a == 0) | (b == 0), none, exponents))
    last = np.where(largest == none, 0, largest - 23 - core.extra_bits)
    unit = np.ldexp(1.0, last)
    total = np.trunc(addend / unit)
    for a, b in factors:
        total = total + np.trunc(a * b / unit)
    cut = np.ldexp(1.0, np.maximum(0, np.maximum(np.frexp(total)[1] - 24, -149 - last)))
    found: Array = (np.trunc(total / cut) * cut * unit).astype(np.float32)
    return found


def added(core: TensorCore, factors: list[Factors], addend: Array) -> Array:
    """Products and addend, block after block."""
    for first in range(0, len(factors), core.block):
        addend = block_sum(core, factors[first : first + core.block], addend)
    return addend


def multiply_add(core: TensorCore, a: Array, b: Array, c: Array) -> Array:
    """a (..., i, k) times b (..., j, k), summed over k, plus c (..., i, j): a matrix instruction."""
    a, b = a.astype(np.float64)[..., :, None, :], b.astype(np.float64)[..., None, :, :]
    return added(core, [(a[..., k], b[..., k]) for k in range(a.shape[-1])], c)


class SplitSums:
    """Sums of products of two tensors, each scaled by the power of two that fits its largest magnitude."""

    def __init__(self, products: SplitProducts, u: Array, v: Array):
        self.products = products
        self.exponents = tuple(TOP - int(np.frexp(np.abs(t).max())[1]) for t in (u, v))

    def split(self, t: Array, exponent: int) -> list[Array]:
        """Parts of a scaled operand: FP16 values, in double."""
        scaled = np.ldexp(t.astype(np.float64), exponent)
        hi = scaled.astype(np.float16).astype(np.float64)
        if self.products.parts == 1:
            return [hi]
        lo = np.ldexp(scaled - hi, self.products.shift).astype(np.float16).astype(np.float64)
        return [hi, lo]

    def chain(self, terms: Iterable[Factors], total: Array) -> Array:
        """The products u v, added in sequence; small ones first, or in a separate sum if scaled up."""
        back = sum(self.exponents)
        large: list[Factors] = []
        small: list[Factors] = []
        for u, v in terms:
            (u_hi, *u_lo), (v_hi, *v_lo) = (self.split(t, e) for t, e in zip((u, v), self.exponents, strict=True))
            beside = small if self.products.shift else large
            beside += [(u_hi, lo) for lo in v_lo] + [(lo, v_hi) for lo in u_lo]
            large.append((u_hi, v_hi))
        core = self.products.core
        sums = added(core, large, np.ldexp(total.astype(np.float64), back).astype(np.float32))
        corrected = sums + np.ldexp(added(core, small, np.zeros_like(sums)), -self.products.shift)
        found: Array = np.ldexp(corrected.astype(np.float32), -back)
        return found
