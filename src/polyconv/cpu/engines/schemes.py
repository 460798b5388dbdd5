"""The Cook-Toom schemes that the native kernels are compiled for.

A scheme computes a tile by one algorithm per direction (``csrc/cpu/common/cook_toom.h``). Forward pass and weight
gradient share schemes, because one is the transpose of the other. The kernels report their list: see :func:`compiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...algebra.segments import AxisScheme, Scheme2d
from ...problem import Extents
from ...util.cached import cached_property
from ...util.intmath import ceil_div
from .. import native


@dataclass(frozen=True)
class KernelScheme:
    """F(m, r) along H and along W; ``nested``: two segments of taps along W, combined by F(2, 2)."""

    m_h: int
    r_h: int
    m_w: int
    r_w: int
    nested: bool = False

    @cached_property
    def taps(self) -> tuple[int, int]:
        return self.r_h, self.r_w + (self.m_w if self.nested else 0)

    @cached_property
    def outputs(self) -> tuple[int, int]:
        return self.m_h, self.m_w * (2 if self.nested else 1)

    @cached_property
    def points(self) -> tuple[int, int]:
        return self.m_h + self.r_h - 1, self.m_w + self.r_w - 1

    @cached_property
    def slots(self) -> int:
        """Products per point and tile."""
        return 3 if self.nested else 1

    @cached_property
    def direct(self) -> bool:
        return self.points == (1, 1)

    def segments(self, taps: Extents) -> int:
        """Number of segments of a kernel; each counts as an additional input channel."""
        return ceil_div(taps[0], self.taps[0]) * ceil_div(taps[1], self.taps[1])

    def why_too_long(self, taps: Sequence[Extents]) -> str | None:
        """Why the scheme does not suit a kernel, or None; ``taps``: those of each of its correlations. Combining taps
        along an axis where every correlation has one tap saves nothing and multiplies absent taps. Fewer taps than the
        scheme's, but more than one, may still gain: no scheme is compiled for every number of taps."""
        for axis, name in enumerate(("down", "across")):
            if self.taps[axis] > 1 and all(count[axis] == 1 for count in taps):
                return f"combines {self.taps[axis]} taps {name}, where the kernel has one"
        return None

    @cached_property
    def exact(self) -> Scheme2d | None:
        """The scheme in exact arithmetic, for the error model; None for direct summation."""
        if self.direct:
            return None
        h = AxisScheme.direct(1) if self.r_h == 1 else AxisScheme.cut(self.m_h, self.r_h)
        if self.nested:
            w = AxisScheme.cut(self.m_w, self.taps[1], self.m_w, self.r_w, tiles=2)
        else:
            w = AxisScheme.direct(1) if self.r_w == 1 else AxisScheme.cut(self.m_w, self.r_w)
        return Scheme2d(h, w)

    @cached_property
    def name(self) -> str:
        if self.direct:
            return "direct"
        nested = " in two nested segments" if self.nested else ""
        return f"F({self.m_h},{self.r_h}) x F({self.m_w},{self.r_w}){nested}"

    def __str__(self) -> str:
        return self.name


@lru_cache(maxsize=8)
def compiled(kernels: str) -> tuple[KernelScheme, ...]:
    """Schemes of the ``tile``, ``channel`` or ``gradient`` kernels, which must be installed. The position of a scheme
    is its number in the operators."""
    return tuple(KernelScheme(*numbers) for numbers in native.facts()[f"{kernels}_schemes"])


@lru_cache(maxsize=256)
def suited(kernels: str, taps: tuple[Extents, ...]) -> tuple[tuple[KernelScheme, str | None], ...]:
    """:func:`compiled`, each with :meth:`KernelScheme.why_too_long`."""
    return tuple((scheme, scheme.why_too_long(taps)) for scheme in compiled(kernels))
