"""Data that is hard for float32: heavy tails, spikes, scales that differ by channel or place, offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from polyconv.numerics.error_model import Magnitudes

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Make = Callable[[np.random.Generator, Shape], Array]

WINDOW = 8
"""About a tile: :attr:`Magnitudes.x_local` is measured over windows of this size."""


def _by_channel(g: np.random.Generator, shape: Shape) -> Array:
    return g.standard_normal(shape) * 10 ** g.uniform(-3, 3, (*shape[:-2], 1, 1))


def _rising(g: np.random.Generator, shape: Shape) -> Array:
    """Input and weights with the same large channels."""
    return g.standard_normal(shape) * np.geomspace(1e-3, 1e3, shape[-3])[:, None, None]


def _by_place(g: np.random.Generator, shape: Shape) -> Array:
    """Dark except for a bright region."""
    x = g.standard_normal(shape)
    h, w = (int(g.integers(0, size)) for size in shape[-2:])
    x[..., : h + 1, : w + 1] *= 1e3
    return x


def _spikes(g: np.random.Generator, shape: Shape) -> Array:
    return g.standard_normal(shape) * np.where(g.random(shape) < 1e-3, 1e4, 1.0)


def _sparse(g: np.random.Generator, shape: Shape) -> Array:
    return g.standard_normal(shape) * (g.random(shape) < 0.02)


def _smooth(g: np.random.Generator, shape: Shape) -> Array:
    x = np.cumsum(np.cumsum(g.standard_normal(shape), -1), -2)
    return x + g.standard_normal(shape) * 0.1


KINDS: dict[str, Make] = {
    "normal": lambda g, s: g.standard_normal(s),
    "uniform": lambda g, s: g.uniform(-1, 1, s),
    "rand": lambda g, s: g.random(s),
    "after relu": lambda g, s: np.maximum(g.standard_normal(s), 0),
    "Student t, 2": lambda g, s: g.standard_t(2, s),
    "Student t, 3": lambda g, s: g.standard_t(3, s),
    "lognormal": lambda g, s: g.lognormal(0, 2, s) * g.choice([-1, 1], s),
    "positive lognormal": lambda g, s: g.lognormal(0, 1.5, s),
    "spikes": _spikes,
    "sparse": _sparse,
    "scales by channel": _by_channel,
    "rising scales": _rising,
    "bright region": _by_place,
    "offset": lambda g, s: g.standard_normal(s) + 10,
    "large offset": lambda g, s: g.standard_normal(s) * 1e-3 + 1,
    "smooth": _smooth,
    "tiny": lambda g, s: g.standard_normal(s) * 1e-12,
    "huge": lambda g, s: g.standard_normal(s) * 1e12,
}

PATTERNS: dict[str, Make] = {
    "alternating": lambda g, s: (1 - 2 * (np.arange(s[-1]) % 2)) * (1 + 0.1 * g.standard_normal(s)),
    "checks": lambda g, s: (1 - 2 * (np.indices(s).sum(0) % 2)) * (1 + 0.1 * g.standard_normal(s)),
    "all equal": lambda g, s: np.full(s, 0.1),
}
"""The same in every tile or without randomness, so that rounding errors add up instead of averaging out. Only the bound
covers these, no estimate."""


def draw(kind: str, g: np.random.Generator, shape: Shape) -> Array:
    return (KINDS | PATTERNS)[kind](g, shape).astype(np.float32)


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def local_rms(x: Array) -> float:
    """The largest over windows of one channel; partial windows count as if zero-padded."""
    squares = np.square(x, dtype=np.float64)
    for axis in (-2, -1):
        size = squares.shape[axis]
        total = np.cumsum(np.concatenate([np.zeros_like(squares.take([0], axis)), squares], axis), axis)
        ends = np.minimum(np.arange(size) + WINDOW, size)
        squares = (total.take(ends, axis) - total.take(np.arange(size), axis)) / min(WINDOW, size)
    return float(np.sqrt(max(0.0, squares.max())))


def local_mean(w: Array) -> float:
    """Over windows (all taps, if there are fewer), rms over channels and places, the largest for any leading index."""
    means = w.astype(np.float64)
    for axis in (-2, -1):
        means = np.lib.stride_tricks.sliding_window_view(means, min(WINDOW, w.shape[axis]), axis).mean(-1)
    return float(np.sqrt(np.square(means).mean(axis=(1, 2, 3)).max()))


def measure(x: Array, w: Array, exact: Array) -> Magnitudes:
    """Magnitudes of both operands, whose last two axes are places or taps, and of the result."""
    return Magnitudes(
        x_rms=rms(x),
        x_max=float(np.abs(x).max()),
        x_local=max(rms(x), local_rms(x)),
        w_rms=rms(w),
        w_max=float(np.abs(w).max()),
        w_local=max(rms(w), local_rms(w)),
        w_mean=local_mean(w),
        y_max=float(np.abs(exact).max()),
    )
