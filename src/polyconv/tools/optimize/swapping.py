"""Swap modules in place and back by assigning ``__class__``, so that references to them stay valid.

Parameters and buffers are never written: a folded batch normalisation is applied to copies of weight and bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from ...dispatch.transforms.interop import to_torchscript
from ...nn import OURS, Convolution
from ...runtime.frozen_weights import mark_frozen, mark_of
from ...runtime.guards import are_plain, is_watched

Torchs: TypeAlias = _ConvNd
"""A torch convolution: an instance of a key of :data:`polyconv.nn.OURS`."""


class Folded(nn.Identity):
    """A batch normalisation that the convolution before it computes; its checkpoints are those of the original."""

    _version = _NormBase._version


@dataclass(eq=False)
class Fold:
    """Weight and bias of a convolution with the batch normalisation after it folded in.

    They are computed at each call if gradients are recorded, a graph is captured or the weight is not frozen. For a
    frozen weight they are cached. A change of any tensor that they are computed from shows in its version counter or
    memory, except the statistics' updates in training, which suspend the fusion and end the cache.
    """

    norm: nn.Module | None
    """None for a convolution that only shares an activation with a folded one."""
    name: str = ""
    _kept: tuple[list[Any], tuple[object, ...], Tensor, Tensor, object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": None}

    def holds(self) -> bool:
        norm = self.norm
        return norm is None or not (norm.training or norm.running_mean is None or norm.running_var is None)

    def operands(self, conv: Torchs) -> tuple[Tensor, Tensor | None]:
        """Weight and bias for a call of the convolution."""
        norm = self.norm
        fusion: Fusion | None = getattr(conv, "fusion", None)  # another thread may undo it meanwhile
        if fusion is None or not fusion.check() or norm is None:
            return conv.weight, conv.bias
        promise = None if is_compiling() or to_torchscript() else mark_of(conv.weight)
        tensors: list[Any] = [conv.weight, conv.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var]
        given = [tensor for tensor in tensors if tensor is not None]
        if promise is None or any(tensor.is_inference() for tensor in given) or _is_recorded(given):
            return folded(conv, norm)
        kept = self._kept
        if kept is not None and all(map(is_, kept[0], tensors)) and kept[1] == _state(promise, norm, given):
            return kept[2], kept[3]
        if is_watched() or not are_plain(*given):
            return folded(conv, norm)
        state = _state(promise, norm, given)
        weight, bias = frozen_copies(conv, norm)
        # The references to promise and storages keep their addresses from being reused.
        self._kept = tensors, state, weight, bias, (promise, [tensor.untyped_storage() for tensor in given])
        return weight, bias

    def forget(self) -> None:
        self._kept = None


def _is_recorded(tensors: Sequence[Tensor]) -> bool:
    """Whether a call records gradients of the tensors, or is captured in a CUDA graph."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return True
    return tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _state(promise: object, norm: nn.Module, tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Values of which one changes with the contents of the tensors."""
    seen = ((tensor._version, tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)
    return id(promise), norm.eps, *seen


def folded(conv: Torchs, norm: Any) -> tuple[Tensor, Tensor]:
    """Differentiable weight and bias of ``norm(conv(x))`` in evaluation; scale and bias are computed in float64.

    The normalisation may be on another device: a replica of ``nn.DataParallel`` has that of the original.
    """
    weight = conv.weight

    def exact(tensor: Any, default: float = 0.0) -> Any:
        return default if tensor is None else tensor.to(weight.device, torch.float64)

    scale = (exact(norm.running_var) + norm.eps).rsqrt() * exact(norm.weight, 1.0)
    bias = (exact(conv.bias) - exact(norm.running_mean)) * scale + exact(norm.bias)
    scale = scale.to(torch.promote_types(weight.dtype, torch.float32))
    if conv.transposed:  # (in_channels, out_channels / groups, ...)
        scale = scale.view(conv.groups, -1).repeat_interleave(conv.in_channels // conv.groups, 0)
    scale = scale.view(*scale.shape, *[1] * (weight.dim() - scale.dim()))
    return (weight * scale).to(weight.dtype), bias.to(weight.dtype)


def frozen_copies(conv: Torchs, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """:func:`folded` as constants, of which the weight is frozen; usable in any grad mode and on any stream."""
    with torch.inference_mode(False), torch.no_grad():
        weight, bias = folded(conv, norm)
    mark_frozen(weight)
    if weight.is_cuda:
        torch.cuda.current_stream(weight.device).synchronize()
    return weight, bias


@dataclass(eq=False)
class Fusion:
    """Convolutions fused with what follows them: batch normalisations, an activation, or both.

    The modules that the convolutions take over become identities. A fusion is valid in the mode in which it was proved
    (:mod:`polyconv.tools.optimize.fusion_trace`), since a model may read the tensor in between in training only.
    :meth:`follow` suspends or resumes it when a convolution's mode changes, :meth:`check` when a normalisation's does.
    """

    activation: str | None
    convolutions: tuple[nn.Module, ...]
    modules: tuple[nn.Module, ...]
    """Activations."""
    folds: tuple[Fold, ...] = ()
    """One for each convolution, if a normalisation follows any of them."""
    _modes: tuple[bool, ...] = ()
    _classes: tuple[type[nn.Module], ...] = ()
    _holds: bool = False

    def apply(self) -> None:
        self._modes = tuple(conv.training for conv in self.convolutions)
        self._classes = tuple(type(module) for module in self._replaced())
        for conv in self.convolutions:
            conv.__dict__["fusion"] = self
        for conv, fold in zip(self.convolutions, self.folds, strict=bool(self.folds)):
            conv.__dict__["fold"] = fold
        self.follow()

    def _replaced(self) -> list[nn.Module]:
        return [*self.modules, *(fold.norm for fold in self.folds if fold.norm is not None)]

    def _is_in_mode(self) -> bool:
        return all(
            isinstance(conv, Convolution) and conv.training is mode
            for conv, mode in zip(self.convolutions, self._modes, strict=True)
        )

    def follow(self) -> None:
        """``model.eval()`` changes a normalisation after its convolution, so :meth:`check` reads its mode in a call."""
        self._become(self._is_in_mode())

    def check(self) -> bool:
        """Whether the fusion holds in a call of a convolution."""
        holds = self._is_in_mode() and all(fold.holds() for fold in self.folds)
        if holds is not self._holds:
            self._become(holds)
        return holds

    def _become(self, holds: bool) -> None:
        self._holds = holds
        for conv in self.convolutions:
            conv.activation = self.activation if holds else None  # type: ignore[assignment]
        for place, (module, kind) in enumerate(zip(self._replaced(), self._classes, strict=True)):
            identity = nn.Identity if place < len(self.modules) else Folded
            module.__class__ = identity if holds else kind
        if not holds:
            self.forget()

    def forget(self) -> None:
        """Drop cached weights."""
        for fold in self.folds:
            fold.forget()

    def undo(self) -> None:
        for conv in self.convolutions:
            for name in ("activation", "fusion", "fold"):
                conv.__dict__.pop(name, None)
        for module, kind in zip(self._replaced(), self._classes, strict=True):
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
