"""The native CPU kernels' schemes, and which one a problem gets.

A scheme computes tiles of outputs by one Cook-Toom algorithm per direction (see ``csrc/cpu/cook_toom.h``). The choice
is a pure function of the problem: an estimate of the cycles that each stage of a scheme takes, set against an estimate
for direct multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import PaddingMode, Pass, Problem


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Scheme:
    """F(m, r) along H and along W; ``nested``: two segments of taps along W, combined by F(2, 2)."""

    index: int
    """The value of ``polyconv::Algorithm`` in C++."""
    m_h: int
    r_h: int
    m_w: int
    r_w: int
    nested: bool
    typical_error: float
    """Largest error seen at the workloads' scale (outputs of about 0.6)."""

    @property
    def taps(self) -> tuple[int, int]:
        return self.r_h, self.r_w + (self.m_w if self.nested else 0)

    @property
    def outputs(self) -> tuple[int, int]:
        return self.m_h, self.m_w * (2 if self.nested else 1)

    @property
    def points(self) -> tuple[int, int]:
        return self.m_h + self.r_h - 1, self.m_w + self.r_w - 1

    def segments(self, kernel: tuple[int, int]) -> int:
        """Pieces that a kernel is cut into; each counts as an input channel of its own."""
        return _ceil_div(kernel[0], self.taps[0]) * _ceil_div(kernel[1], self.taps[1])

    def __str__(self) -> str:
        nested = " in two nested segments" if self.nested else ""
        return f"F({self.m_h},{self.r_h}) x F({self.m_w},{self.r_w}){nested}"


SCHEMES = (
    Scheme(0, 4, 5, 4, 5, True, 3.1e-5),
    Scheme(1, 4, 5, 4, 5, False, 2.5e-5),
    Scheme(2, 4, 3, 4, 3, False, 2.5e-5),
    Scheme(3, 6, 3, 6, 3, False, 3.5e-5),
    Scheme(4, 2, 3, 2, 3, False, 2e-6),
    Scheme(5, 1, 1, 4, 5, True, 1.5e-5),
    Scheme(6, 1, 1, 4, 5, False, 1.2e-5),
    Scheme(7, 4, 5, 1, 1, False, 1.2e-5),
    Scheme(8, 4, 3, 4, 5, False, 2e-5),
    Scheme(9, 4, 3, 4, 5, True, 2e-5),
    Scheme(10, 1, 1, 6, 3, False, 8e-6),
    Scheme(11, 6, 3, 1, 1, False, 8e-6),
    Scheme(12, 1, 1, 1, 1, False, 2e-6),
)

LANES = 16
"""Of the vectors that costs are counted in. Narrower machines scale all of them alike."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs and why: a scheme, or none and then PyTorch's own kernels."""

    scheme: Scheme | None
    reason: str
    rejected: tuple[tuple[Scheme, str], ...] = ()


def unsupported(problem: Problem) -> str | None:
    """Why no scheme can run this problem at all, or None."""
    if problem.kind is Pass.WGRAD:
        return "the weight gradient has no native kernel yet"
    if problem.dtype != "float32":
        return f"{problem.dtype} has no native kernel"
    if problem.stride != (1, 1):
        return "a stride has no native kernel yet"
    if problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding):
        return f"padding mode {problem.padding_mode} has no native kernel yet"
    if problem.x_strides[3] != 1 or problem.y_strides[3] != 1:
        return "columns must be contiguous in memory"
    if problem.kernel == (1, 1):
        return "a 1 x 1 kernel is a matrix multiplication already"
    if problem.groups > 1 and min(problem.channels_per_group) < 4:
        return "a depthwise convolution has no sums over channels, which the schemes live on"
    return None


def _work(problem: Problem) -> tuple[int, int, tuple[int, int]]:
    """Channels per group that are summed over, channels that are written, and the size of what is written."""
    c, k = problem.channels_per_group
    return (k, c, problem.in_size) if problem.kind is Pass.DGRAD else (c, k, problem.out_size)


def scheme_cycles(problem: Problem, scheme: Scheme) -> float:
    """Estimated cycles on one core, weights transformed anew. The factors were fitted on a machine with AVX-512."""
    c, k, (height, width) = _work(problem)
    c *= scheme.segments(problem.kernel)
    (d_h, d_w), (m_h, m_w), (n_h, n_w) = problem.dilation, scheme.outputs, scheme.points
    bands = problem.batch * d_h * _ceil_div(_ceil_div(height, d_h), m_h)
    units = _ceil_div(_ceil_div(width, d_w), m_w) * d_w
    vectors = bands * units / LANES
    # Transforms work on whole vectors of each band's units, products on units of many bands side by side.
    ragged = bands * _ceil_div(units, LANES)
    points, slots, blocks = n_h * n_w, 3 if scheme.nested else 1, 2 if scheme.nested else 1
    padded_k = _ceil_div(k, 8) * 8
    products = vectors * points * slots * c * padded_k * 0.45
    gather = ragged * n_h * m_w * c * 12
    expand = ragged * points * slots * c * 4
    invert = vectors * points * blocks * k * 5
    write = ragged * m_h * m_w * k * 6
    weights = points * slots * c * padded_k / LANES * 25
    calls = bands * (100 * c + 60 * k)
    return problem.groups * (products + gather + expand + invert + write + weights + calls)


def direct_cycles(problem: Problem) -> float:
    """Estimated cycles of direct multiplication by PyTorch's kernels, in its better memory layout.

    They leave out taps that fall into the padding, which are most of them where a dilation is as long as the image.
    With few channels they reach little more than half of their speed.
    """
    c, k, (height, width) = _work(problem)
    speed = 0.36 if min(c, k) >= 32 else 0.6
    taps = 1.0
    for axis in range(2):
        extent, pad, d = problem.in_size[axis], problem.padding[2 * axis], problem.dilation[axis]
        out = problem.out_size[axis]
        inside = [min(out, extent + pad - i * d) - max(0, pad - i * d) for i in range(problem.kernel[axis])]
        taps *= sum(max(0, count) for count in inside) / out
    return problem.groups * problem.batch * height * width * _ceil_div(k, LANES) * c * taps * speed


def choose(problem: Problem, tolerance: float) -> Choice:
    """The scheme with the least estimated time inside the tolerance, if it beats direct multiplication."""
    reason = unsupported(problem)
    if reason is not None:
        return Choice(None, reason)
    direct = direct_cycles(problem)
    rejected: list[tuple[Scheme, str]] = []
    best: tuple[float, Scheme] | None = None
    for scheme in SCHEMES:
        if scheme.typical_error > tolerance:
            rejected.append((scheme, f"its error of {scheme.typical_error:.1e} exceeds the tolerance {tolerance:.1e}"))
            continue
        cycles = scheme_cycles(problem, scheme)
        if cycles >= direct:
            rejected.append((scheme, f"{cycles / direct:.2f} of the time of direct multiplication"))
            continue
        if best is None or cycles < best[0]:
            if best is not None:
                rejected.append((best[1], f"{best[0] / cycles:.2f} of the chosen one's time"))
            best = (cycles, scheme)
        else:
            rejected.append((scheme, f"{cycles / best[0]:.2f} of the chosen one's time"))
    if best is None:
        return Choice(None, "direct multiplication is estimated to be faster", tuple(rejected))
    return Choice(best[1], f"estimated {direct / best[0]:.1f} times as fast as direct multiplication", tuple(rejected))
