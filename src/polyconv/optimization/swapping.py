"""Swap modules in place, and back: only classes change, so that every object stays where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..nn import OURS

Torchs: TypeAlias = _ConvNd
"""A convolution of torch's: one of the keys of :data:`polyconv.nn.OURS`."""


@dataclass(frozen=True)
class Fusion:
    """Convolutions that compute the activation which follows them, and the modules that did."""

    activation: str
    convolutions: tuple[nn.Module, ...]
    modules: tuple[nn.Module, ...]


@dataclass
class Swap:
    """A set of changes to a model that is made or undone as a whole. A ``with`` block makes it and undoes it."""

    convolutions: Sequence[Torchs]
    fusions: Sequence[Fusion] = ()
    _classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)

    @property
    def applied(self) -> bool:
        return bool(self._classes)

    def apply(self) -> None:
        self._classes = [(module, type(module)) for module in self.convolutions]
        self._classes += [(module, type(module)) for fusion in self.fusions for module in fusion.modules]
        for convolution in self.convolutions:
            convolution.__class__ = OURS[type(convolution)]
        for fusion in self.fusions:
            for conv in fusion.convolutions:
                conv.activation = fusion.activation  # type: ignore[assignment]
            for module in fusion.modules:
                module.__class__ = nn.Identity

    def undo(self) -> None:
        for fusion in self.fusions:
            for conv in fusion.convolutions:
                conv.__dict__.pop("activation", None)
        for module, kind in self._classes:
            module.__class__ = kind
        self._classes = []

    def __enter__(self) -> None:
        self.apply()

    def __exit__(self, *_: object) -> None:
        self.undo()
