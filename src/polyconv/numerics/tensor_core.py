"""Tensor core arithmetic for the error model: split operands and truncated sums.

A float32 operand v is scaled by a power of two and split: ``hi = half(v)``, ``lo = half((v - hi) 2^shift)``. The
remainder is v times two roundings of FP16, as is the product of both ``lo``, which is not computed. The other three
products are exact. For each block of products, a tensor core aligns the products and the addend to their largest
exponent, truncates them to the bits it keeps, and truncates the sum to float32. With S the partial sum, per block:

    each product       loses up to ulp(S) 2^-extra_bits, toward zero: of either sign, so it averages out
    the sum            loses up to ulp(S) (1 - 2^-extra_bits), always toward zero: a bias that accumulates

The first is one rounding of the sum per product, with 4 * 4^-extra_bits times the mean square of one to nearest. The
second has the mean u (1 - 2^-extra_bits) S times the mean of 1 / m over mantissas m. Over K steps of a random walk the
S add up to K / 2 times the whole sum, a relative loss of the output that is not amplified, and a part that varies from
sum to sum, of K^2 / 12 times its mean square. Kernels therefore restart sums every few products and add them to float32
accumulators, which round to nearest; ``blocks[0]`` of the error model is that length.

(Fasi et al. 2021, PeerJ CS 330; Khattak and Mikaitis, arXiv 2512.07004. Simulation: ``tests/tensor_core_sums.py``.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from ..util.gpu_arch import capability
from .error_model import ROUNDING

SIGNIFICAND = 24
"""Significand of float32 [bits]."""
INVERSE_MANTISSA = 1 / (2 * log(2))
"""Mean of 1 / m over mantissas m with density 1 / m."""
TOP = 15
"""Scaled operands are below 2^TOP, within the range of FP16; bfloat16 does not need the limit."""
LAST_OF_HALF = -24
"""Exponent of the smallest FP16 subnormal."""


@dataclass(frozen=True, slots=True)
class TensorCore:
    """Summation of products of 16-bit numbers in one tensor core generation."""

    block: int
    """Products added at once."""
    extra_bits: int
    """Bits kept below the last bit of float32 until the sum is truncated."""


VOLTA = TensorCore(4, 0)
AMPERE = TensorCore(8, 1)
HOPPER = TensorCore(16, 2)


def tensor_core(arch: str) -> TensorCore:
    """Tensor core of a compiler architecture. Turing is assumed to be no better than Volta."""
    generation = capability(arch)
    return VOLTA if generation < 80 else AMPERE if generation < 90 else HOPPER


@dataclass(frozen=True, slots=True)
class SplitProducts:
    """:class:`~polyconv.numerics.error_model.Arithmetic` of float32 operands on tensor cores."""

    core: TensorCore
    parts: int = 2
    """Parts of an operand: 2 (``hi`` and ``lo``), or 1, which is only rounded (half-precision tensors)."""
    bits: int = 11
    """Significant bits of a part: 11 for FP16, 8 for bfloat16."""
    shift: int = 11
    """Exponent of the scale of ``lo``. With 0, ``lo`` loses bits if operands differ by more than 2^17."""
    small_first: bool = False
    """True if a sum adds all small products before the first large one, instead of alternating."""

    @property
    def accumulated(self) -> int:
        """Products of parts per product of operands that round at full size. A scaled ``lo`` has its own accumulator,
        whose roundings shrink by the scale, and small products that come first round a small sum."""
        return 1 if self.parts == 1 or self.shift or self.small_first else 3

    def operands(self, spread: float) -> float:
        kept = 2.0 ** (SIGNIFICAND - self.parts * self.bits)
        # One part: a rounding of each operand. Two: of each a rounding of a rounding, and the product of both ``lo``.
        rounded = 2 * kept**2 if self.parts == 1 else 3 * ROUNDING * kept**2
        below = LAST_OF_HALF - (self.shift if self.parts > 1 else 0)
        step = 2.0 ** (below - (TOP - 1) + SIGNIFICAND) * spread
        return rounded + 2 * step**2 / 12 / ROUNDING

    def sums(self, length: float, equal_products: float) -> float:
        half = (length + 1) / 2
        products = 4 * 4.0**-self.core.extra_bits * self.accumulated * half * min(half, equal_products)
        return products + self.shrinkage(length) ** 2 / 3 / ROUNDING

    def shrinkage(self, length: float) -> float:
        steps = length * self.accumulated / self.core.block
        return INVERSE_MANTISSA * (1 - 2.0**-self.core.extra_bits) * steps / 2

    def drift(self, length: float) -> float:
        # In a sum of one sign the truncations of the products do not average out either.
        return INVERSE_MANTISSA * 2.0**-self.core.extra_bits * length * self.accumulated / 2
