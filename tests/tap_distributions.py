"""Weights with energy spread unevenly over taps: shifts, causal filters, blurs, edges."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Shape = tuple[int, ...]


def _where(shape: Shape, mask: Tensor) -> Tensor:
    return (torch.rand(shape) * 2 - 1) * mask


def _one_tap(shape: Shape, *place: int) -> Tensor:
    mask = torch.zeros(shape[2:])
    mask[place] = 1
    return _where(shape, mask)


def _causal(shape: Shape) -> Tensor:
    mask = torch.ones(shape[2:]).flatten()
    mask[mask.numel() // 2 + 1 :] = 0
    return _where(shape, mask.reshape(shape[2:]))


def _decaying(shape: Shape) -> Tensor:
    mask = torch.ones(shape[2:])
    for axis, extent in enumerate(shape[2:]):
        falling = 0.5 ** torch.arange(extent)
        mask = mask * falling.reshape([-1 if other == axis else 1 for other in range(len(shape) - 2)])
    return _where(shape, mask)


def _stencil(shape: Shape, stencil: Tensor) -> Tensor:
    """The same taps in every channel, up to a factor."""
    return (torch.rand(*shape[:2], *(1 for _ in shape[2:])) * 2 - 1) * stencil


def _laplacian(shape: Shape) -> Tensor:
    stencil = -torch.ones(shape[2:])
    stencil[tuple(extent // 2 for extent in shape[2:])] = stencil.numel() - 1
    return _stencil(shape, stencil)


def _edge(shape: Shape) -> Tensor:
    stencil = torch.zeros(shape[2:])
    stencil[..., 0], stencil[..., -1] = 1, -1
    return _stencil(shape, stencil)


def _shift(shape: Shape) -> Tensor:
    """Each filter reads one channel through its last tap."""
    w = torch.zeros(shape)
    for filter_ in range(shape[0]):
        w[(filter_, filter_ % shape[1], *(-1 for _ in shape[2:]))] = 0.7 + 0.01 * filter_
    return w


TAPS: dict[str, Callable[[Shape], Tensor]] = {
    "even": lambda shape: torch.rand(shape) * 2 - 1,
    "last tap": lambda shape: _one_tap(shape, *(-1 for _ in shape[2:])),
    "first tap": lambda shape: _one_tap(shape, *(0 for _ in shape[2:])),
    "middle tap": lambda shape: _one_tap(shape, *(extent // 2 for extent in shape[2:])),
    "causal half": _causal,
    "geometric decay": _decaying,
    "geometric growth": lambda shape: _decaying(shape).flip(*range(2, len(shape))),
    "blur": lambda shape: _stencil(shape, torch.ones(shape[2:])),
    "Laplacian": _laplacian,
    "edge": _edge,
    "shift": _shift,
}
"""Weights of a shape, by name."""
