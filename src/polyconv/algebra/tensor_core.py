"""How tensor cores multiply and add, in the terms of the error model: operands of few bits, and sums that truncate.

A float32 operand v is scaled by a power of two and split, ``hi = half(v)``, ``lo = half((v - hi) 2^shift)``; what is
left is v times two roundings of FP16, and so is the product of both ``lo``, which nobody computes. The other three
products are exact. A tensor core adds them in blocks: it aligns the products of a block and the addend to the largest
exponent among them, cuts off what lies below the bits that it keeps, and cuts the sum to float32. Hence, of partial
sums S with the last bit ulp(S), per step of a block:

    each product       loses up to ulp(S) 2^-extra_bits, toward zero: as likely up as down, so it averages out
    the sum            loses up to ulp(S) (1 - 2^-extra_bits), always toward zero: it adds up, step by step

The first is a rounding of the sum per product, 4 * 4^-extra_bits times as large (in mean square) as one to nearest. The
second has the mean u (1 - 2^-extra_bits) S times the mean of 1 / m over mantissas m. Over K steps of a random walk S
adds up to K / 2 times the whole sum, which makes the output smaller by as much and is not amplified, and beside it to
K^2 / 12 times its mean square, which differs from sum to sum. So kernels begin sums anew every few products and add
them to float32 accumulators, which round to nearest; the error model knows these cuts as its first block.

(Fasi et al. 2021, PeerJ CS 330; Khattak and Mikaitis, arXiv 2512.07004. ``tests/tensor_core_sums.py`` does it in numpy,
operation by operation.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from polyconv.algebra.error import ROUNDING
from polyconv.tf32 import capability

SIGNIFICAND = 24
"""Of float32."""
INVERSE_MANTISSA = 1 / (2 * log(2))
"""Mean of 1 / m over mantissas that are spread as 1 / m."""
TOP = 15
"""Scaled operands are less than two to this: FP16 ends there, and bfloat16 has no need to."""
LAST_OF_HALF = -24
"""Exponent of the last bit of the smallest FP16 numbers."""


@dataclass(frozen=True, slots=True)
class TensorCore:
    """How one generation adds products of 16-bit numbers."""

    block: int
    """Products that are added at once."""
    extra_bits: int
    """Kept below the last bit of float32, until the sum is cut."""


VOLTA = TensorCore(4, 0)
AMPERE = TensorCore(8, 1)
HOPPER = TensorCore(16, 2)


def tensor_core(arch: str) -> TensorCore:
    """Of an architecture as the compiler is told. Turing is taken to be no better than Volta."""
    generation = capability(arch)
    return VOLTA if generation < 80 else AMPERE if generation < 90 else HOPPER


@dataclass(frozen=True, slots=True)
class SplitProducts:
    """Products of float32 operands on tensor cores: an arithmetic of the error model."""

    core: TensorCore
    parts: int = 2
    """Into which an operand is split: two, or one, which is rounded and no more (half-precision tensors)."""
    bits: int = 11
    """Significant ones of a part: 11 of FP16, 8 of bfloat16."""
    shift: int = 11
    """Binary orders by which ``lo`` is scaled up. With 0 it loses bits where operands differ by more than 2^17."""
    small_first: bool = False
    """Whether a sum takes all its small products before the first large one, and not step by step."""

    @property
    def accumulated(self) -> int:
        """Products of parts that one accumulator takes for a product of operands. What was scaled up has one of its
        own, whose roundings are as much smaller as it is scaled; small products that all come first meet a sum that is
        as small."""
        return 1 if self.parts == 1 or self.shift or self.small_first else 3

    def operands(self, spread: float) -> float:
        """What is lost of both operands of a product, in mean square, a rounding to nearest of float32 being 1.

        ``spread`` is the largest magnitude of a tensor over the rms of what an output is made of.
        """
        kept = 2.0 ** (SIGNIFICAND - self.parts * self.bits)
        # Of one part each; of two, the rest of each, a rounding of a rounding, and the product of both small parts.
        rounded = 2 * kept**2 if self.parts == 1 else 3 * ROUNDING * kept**2
        below = LAST_OF_HALF - (self.shift if self.parts > 1 else 0)
        step = 2.0 ** (below - (TOP - 1) + SIGNIFICAND) * spread
        return rounded + 2 * step**2 / 12 / ROUNDING

    def sums(self, length: float, equal_products: float) -> float:
        """Roundings of a sum of so many products of operands, in mean square: one of the whole sum, to nearest, is 1.
        Equal products round the same way again."""
        half = (length + 1) / 2
        products = 4 * 4.0**-self.core.extra_bits * self.accumulated * half * min(half, equal_products)
        return products + self.shrinkage(length) ** 2 / 3 / ROUNDING

    def shrinkage(self, length: float) -> float:
        """What every sum loses of itself, in units of u."""
        steps = length * self.accumulated / self.core.block
        return INVERSE_MANTISSA * (1 - 2.0**-self.core.extra_bits) * steps / 2

    def drift(self, length: float) -> float:
        """What a sum of one sign loses beyond that, in the same unit: there products do not average out either."""
        return INVERSE_MANTISSA * 2.0**-self.core.extra_bits * length * self.accumulated / 2
