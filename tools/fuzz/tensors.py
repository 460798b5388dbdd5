"""Tensors that are hard for a convolution: by value, and by memory layout.

Every function is self-contained, so that a script can quote it: see :func:`sources`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

Shape = tuple[int, ...]
Fill = Callable[[Shape, torch.Generator], Tensor]
Place = Callable[[Shape, Fill, torch.Generator, torch.dtype], Tensor]

# ---- values: (shape, generator) -> float64


def normal(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def uniform(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=g, dtype=torch.float64)


def integers(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.randint(-4, 5, shape, generator=g).double()


def one_hot(shape: Shape, g: torch.Generator) -> Tensor:
    x = torch.zeros(shape, dtype=torch.float64)
    if x.numel():
        x.view(-1)[torch.randint(x.numel(), (1,), generator=g)] = 1
    return x


def outlier(shape: Shape, g: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    if x.numel():
        x.view(-1)[torch.randint(x.numel(), (1,), generator=g)] = 1e8
    return x


def channel_scales(shape: Shape, g: torch.Generator) -> Tensor:
    scales = torch.logspace(0, -4, shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1))
    return torch.randn(shape, generator=g, dtype=torch.float64) * scales


def large(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64) * 1e16


def tiny(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64) * 1e-16


def denormal(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64) * 1e-39


def zeros(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def constant(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.full(shape, 0.1, dtype=torch.float64)


def ramp(shape: Shape, g: torch.Generator) -> Tensor:
    n = torch.tensor(shape).prod().item()
    return torch.arange(n, dtype=torch.float64).reshape(shape) / max(n, 1)


def alternating(shape: Shape, g: torch.Generator) -> Tensor:
    signs = 1 - 2 * (torch.arange(shape[-1], dtype=torch.float64) % 2)
    return signs * (1 + 0.1 * torch.randn(shape, generator=g, dtype=torch.float64))


def repeated_rows(shape: Shape, g: torch.Generator) -> Tensor:
    row = torch.randn(*shape[:-2], 1, shape[-1], generator=g, dtype=torch.float64) if len(shape) > 1 else None
    return torch.full(shape, 0.7, dtype=torch.float64) if row is None else row.expand(shape).clone()


def repeated_channels(shape: Shape, g: torch.Generator) -> Tensor:
    one = torch.randn(shape[0], 1, *shape[2:], generator=g, dtype=torch.float64) if len(shape) > 2 else None
    return torch.full(shape, 0.7, dtype=torch.float64) if one is None else one.expand(shape).clone()


def one_nan(shape: Shape, g: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    if x.numel():
        x.view(-1)[torch.randint(x.numel(), (1,), generator=g)] = float("nan")
    return x


def one_infinity(shape: Shape, g: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    if x.numel():
        x.view(-1)[torch.randint(x.numel(), (1,), generator=g)] = float("inf")
    return x


# ---- values of filters, whose last two axes are taps: learnt, or designed


def one_tap(shape: Shape, g: torch.Generator) -> Tensor:
    w = torch.randn(shape, generator=g, dtype=torch.float64)
    kept = torch.full(shape[-2:], 1e-3, dtype=torch.float64)
    kept.view(-1)[torch.randint(kept.numel(), (1,), generator=g)] = 1
    return w * kept


def last_tap(shape: Shape, g: torch.Generator) -> Tensor:
    w = torch.randn(shape, generator=g, dtype=torch.float64)
    kept = torch.full(shape[-2:], 10.0 ** -int(torch.randint(1, 7, (1,), generator=g)), dtype=torch.float64)
    kept[-1, -1] = 1
    return w * kept


def causal(shape: Shape, g: torch.Generator) -> Tensor:
    """Nothing after the centre, as in a masked convolution; or nothing before it."""
    w = torch.randn(shape, generator=g, dtype=torch.float64).flatten(-2)
    half = w.shape[-1] // 2
    w[..., half + 1 :] = 0
    return (w.flip(-1) if torch.rand(1, generator=g) < 0.5 else w).reshape(shape)


def decaying(shape: Shape, g: torch.Generator) -> Tensor:
    """Each tap is a fraction of the one before."""
    share = 0.2 + 0.6 * torch.rand(1, generator=g, dtype=torch.float64)
    rows, columns = (share ** torch.arange(n, dtype=torch.float64) for n in shape[-2:])
    w = torch.randn(shape, generator=g, dtype=torch.float64) * rows[:, None] * columns
    return w.flip(-2, -1) if torch.rand(1, generator=g) < 0.5 else w


def shift(shape: Shape, g: torch.Generator) -> Tensor:
    """Each filter takes one channel, shifted by some pixels."""
    w = torch.zeros(shape, dtype=torch.float64)
    at = [int(torch.randint(n, (1,), generator=g)) for n in shape[-2:]]
    for k in range(shape[0]):
        w[k, k % shape[1], at[0], at[1]] = 1
    return w


def laplacian(shape: Shape, g: torch.Generator) -> Tensor:
    """The sum of the taps is zero."""
    scales = torch.randn(*shape[:2], 1, 1, generator=g, dtype=torch.float64)
    taps = torch.full(shape[-2:], -1.0, dtype=torch.float64)
    taps[shape[-2] // 2, shape[-1] // 2] += taps.numel()
    return scales * taps / max(1, taps.numel())


def blur(shape: Shape, g: torch.Generator) -> Tensor:
    """All taps nearly equal."""
    return 1 + 1e-3 * torch.randn(shape, generator=g, dtype=torch.float64)


def sparse(shape: Shape, g: torch.Generator) -> Tensor:
    kept = torch.rand(shape, generator=g) < 0.1
    return torch.randn(shape, generator=g, dtype=torch.float64) * kept


def filter_scales(shape: Shape, g: torch.Generator) -> Tensor:
    """Filters and channels of very different magnitudes, as after training without normalisation."""
    sizes = [10 ** (-4 * torch.rand(n, generator=g, dtype=torch.float64)) for n in shape[:2]]
    return torch.randn(shape, generator=g, dtype=torch.float64) * (sizes[0][:, None] * sizes[1])[..., None, None]


FILTERS = (one_tap, last_tap, causal, decaying, shift, laplacian, blur, sparse, filter_scales)

# ---- values of images


def with_offset(shape: Shape, g: torch.Generator) -> Tensor:
    return 10 + torch.randn(shape, generator=g, dtype=torch.float64)


def after_relu(shape: Shape, g: torch.Generator) -> Tensor:
    return torch.relu(torch.randn(shape, generator=g, dtype=torch.float64))


def photograph(shape: Shape, g: torch.Generator) -> Tensor:
    """Smooth, with edges and some noise, from 0 to 1."""
    x = torch.randn(shape, generator=g, dtype=torch.float64).cumsum(-1).cumsum(-2)
    x = (x - x.amin((-2, -1), keepdim=True)) / (x.amax((-2, -1), keepdim=True) - x.amin((-2, -1), keepdim=True) + 1e-9)
    x[..., x.shape[-1] // 2 :] *= 0.3
    return x + 0.01 * torch.randn(shape, generator=g, dtype=torch.float64)


IMAGES = (normal, with_offset, after_relu, photograph)

# ---- classes of values

EVEN = (normal, uniform, integers, large, tiny, zeros)
"""Independent values of one scale."""
UNEVEN = (one_hot, outlier, channel_scales)
"""Scales that differ from place to place: the error model knows their extra cost."""
PATTERNED = (constant, ramp, alternating, repeated_rows, repeated_channels)
"""The same in every tile or without randomness: docs/accuracy.md promises the bound for these, not the estimate."""
BEYOND = (denormal,)
"""Below the smallest exponent in intermediates: only an error of that size, times the other operand, is promised."""
POISON = (one_nan, one_infinity)
"""Spreads over its tile and no further."""
PAST_FLOAT16 = (outlier, large)
"""Infinite in float16."""

FILLS: dict[str, Fill] = {fill.__name__: fill for fill in (*EVEN, *UNEVEN, *PATTERNED, *BEYOND, *POISON)}
"""For any tensor."""
ALL: dict[str, Fill] = {**FILLS, **{fill.__name__: fill for fill in (*FILTERS, *IMAGES)}}

# ---- layouts: (shape, values, generator, dtype) -> a tensor of that shape


def contiguous(shape: Shape, fill: Fill, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    return fill(shape, g).to(dtype)


def channels_last(shape: Shape, fill: Fill, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    x = fill(shape, g).to(dtype)
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x


def transposed(shape: Shape, fill: Fill, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    x = fill(shape, g).to(dtype)
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if len(shape) > 1 else x


def batch_last(shape: Shape, fill: Fill, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    x = fill(shape, g).to(dtype)
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def sliced(shape: Shape, fill: Fill, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    """A part of a larger tensor: rows with a gap, every second column, unaligned; NaN in between."""
    *lead, width = shape
    whole = torch.full([n + 1 for n in lead] + [2 * width + 1], float("nan"), dtype=dtype)
    part = whole[tuple(slice(1, None) for _ in lead)][..., 1::2]
    return part.copy_(fill(shape, g))


def offset(shape: Shape, fill: Fill, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Dense, but three elements past an aligned address."""
    whole = torch.full((torch.Size(shape).numel() + 3,), float("nan"), dtype=dtype)
    return whole[3:].view(shape).copy_(fill(shape, g))


def expanded(shape: Shape, fill: Fill, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Stride 0 along some axes."""
    kept = torch.rand(len(shape), generator=g) < 0.5
    return fill(tuple(n if keep else min(n, 1) for n, keep in zip(shape, kept, strict=True)), g).to(dtype).expand(shape)


def overlapping(shape: Shape, fill: Fill, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Windows of one signal: rows that start one or a few elements after one another."""
    strides = [int(torch.randint(1, 6, (1,), generator=g)) for _ in shape[:-1]] + [1]
    length = 1 + sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
    return fill((1, 1, 1, length), g).to(dtype).view(-1).as_strided(shape, strides)


DENSE = (contiguous, channels_last, transposed, batch_last, sliced, offset)
ALIASED = (expanded, overlapping)
PLACES: dict[str, Place] = {place.__name__: place for place in (*DENSE, *ALIASED)}


@dataclass(frozen=True)
class Operand:
    """A named kind of tensor, for any shape."""

    fill: str = "normal"
    place: str = "contiguous"
    seed: int = 0

    def make(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        return PLACES[self.place](shape, ALL[self.fill], torch.Generator().manual_seed(self.seed), dtype)

    def source(self, shape: Shape, dtype: str) -> str:
        """The expression that makes it, for a script that quotes the functions."""
        g = f"torch.Generator().manual_seed({self.seed})"
        return f"{self.place}({shape}, {self.fill}, {g}, torch.{dtype})"

    def simpler(self) -> Iterator[Operand]:
        if self.place != "contiguous":
            yield replace(self, place="contiguous")
        if self.fill != "normal":
            yield replace(self, fill="normal")

    def is_any_of(self, fills: Iterable[Fill]) -> bool:
        return ALL[self.fill] in fills

    @property
    def aliased(self) -> bool:
        return PLACES[self.place] in ALIASED


def draw(random: Random, poison: bool = False) -> Operand:
    """Any kind of tensor. Half of them have plain values: two hard ones together are the exception."""
    weights = {kind: 0.0 if fill in POISON and not poison else 0.4 for kind, fill in FILLS.items()}
    weights["normal"] = 8.0
    fill = random.choices([*weights], [*weights.values()])[0]
    place = random.choice(["contiguous", "contiguous", "contiguous", "channels_last", *PLACES])
    return Operand(fill, place, random.randrange(2**31))


def sources(operands: Iterable[Operand]) -> str:
    """Source of the functions that a script needs to make these."""
    used = dict.fromkeys(f for o in operands for f in (ALL[o.fill], PLACES[o.place]))
    return "\n\n".join(_quoted(function) for function in used)


def _quoted(function: Callable[..., Tensor]) -> str:
    text = inspect.getsource(function)
    body = text.partition(") -> Tensor:\n")[2]
    names = ", ".join(inspect.signature(function).parameters)
    return f"def {function.__name__}({names}):\n{body}"
