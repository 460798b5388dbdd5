"""Swap modules in place and back by assigning ``__class__``, so that references to them stay valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ...nn import OURS, Convolution

Torchs: TypeAlias = _ConvNd
"""A torch convolution: an instance of a key of :data:`polyconv.nn.OURS`."""


@dataclass(eq=False)
class Fusion:
    """Convolutions fused with the activation that follows them, and the activation modules that they replace.

    A fusion is valid in the mode in which it was proved (:mod:`polyconv.tools.optimize.fusion_trace`), since a model
    may read the tensor in between in training only. :meth:`follow` suspends or resumes it when a convolution's mode
    changes.
    """

    activation: str
    convolutions: tuple[nn.Module, ...]
    modules: tuple[nn.Module, ...]
    _modes: tuple[bool, ...] = ()
    _classes: tuple[type[nn.Module], ...] = ()

    def apply(self) -> None:
        self._modes = tuple(conv.training for conv in self.convolutions)
        self._classes = tuple(type(module) for module in self.modules)
        for conv in self.convolutions:
            conv.__dict__["fusion"] = self
        self.follow()

    def follow(self) -> None:
        holds = all(
            isinstance(conv, Convolution) and conv.training is mode
            for conv, mode in zip(self.convolutions, self._modes, strict=True)
        )
        for conv in self.convolutions:
            conv.activation = self.activation if holds else None  # type: ignore[assignment]
        for module, kind in zip(self.modules, self._classes, strict=True):
            module.__class__ = nn.Identity if holds else kind

    def undo(self) -> None:
        for conv in self.convolutions:
            conv.__dict__.pop("activation", None)
            conv.__dict__.pop("fusion", None)
        for module, kind in zip(self.modules, self._classes, strict=True):
            module.__class__ = kind


@dataclass
class Swap:
    """A set of swaps and fusions, applied or undone as a whole; as a context manager, applied for its block."""

    convolutions: Sequence[Torchs]
    fusions: Sequence[Fusion] = ()
    _classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)

    @property
    def applied(self) -> bool:
        return bool(self._classes)

    def apply(self) -> None:
        self._classes = [(module, type(module)) for module in self.convolutions]
        for convolution in self.convolutions:
            convolution.__class__ = OURS[type(convolution)]
        for fusion in self.fusions:
            fusion.apply()

    def undo(self) -> None:
        for fusion in self.fusions:
            fusion.undo()
        for module, kind in self._classes:
            module.__class__ = kind
        self._classes = []

    def __enter__(self) -> None:
        self.apply()

    def __exit__(self, *_: object) -> None:
        self.undo()
