"""``freeze`` and ``unfreeze``: frozen weights of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import is_not
from typing import Any
from weakref import ref

import torch
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from ..nn import Convolution
from ..runtime.frozen_weights import mark_frozen, unmark_frozen
from ..util.sharded_params import is_dtensor, is_gathered


@dataclass(frozen=True, slots=True)
class Freezing:
    """Result of freezing or unfreezing. Prints as one sentence, and one line for each module left alone."""

    action: str
    """``"froze"`` or ``"unfroze"``."""
    count: int
    left_alone: dict[str, str] = field(default_factory=dict)
    """Name of the module -> why it was not touched."""

    def __int__(self) -> int:
        return self.count

    def __str__(self) -> str:
        lines = [f"{self.action} the weights of {self.count} of {self.count + len(self.left_alone)} convolutions"]
        lines += [f"  left alone: {name or '(the model itself)'}: {why}" for name, why in self.left_alone.items()]
        return "\n".join(lines)


def freeze(model: torch.nn.Module) -> Freezing:
    """Promise that every write to the weights of a model's convolutions moves their version counters.

    In inference polyconv caches transformed weights between calls, and renews them when the weight changes. A write
    through ``weight.data``, or through a NumPy array, memory map or tensor that shares its memory, moves no version
    counter; nor does the step of an optimiser with ``fused=True``. So the whole weight is read before each call, if
    that is cheap compared with the call; if not, nothing is cached, and algorithms with a costly weight transform do
    not pay. For frozen weights version and memory suffice: nothing is read, and everything may be cached. After a write
    that breaks the promise, results are silently those of the old weights.

    Other writes are detected as before: ``load_state_dict``, the step of any other optimiser, ``weight.mul_(2)``,
    another tensor in the weight's place, or other memory (``weight.data = other``), also at the same address. Training
    caches nothing and is not affected. The promise covers the current weights, not copies of the model or the model in
    another process; it ends with :func:`unfreeze`, ``torch.utils.swap_tensors`` or the weight itself. On a GPU only
    frozen weights are cached, since reading others would wait for it. A CUDA graph transforms weights at each replay.

    A weight with parametrisations (``weight_norm``, ``spectral_norm``) is computed once in evaluation mode without
    gradients, and again after a change of the tensors that it is computed from.

    The result counts the frozen modules and names those of polyconv's that were not frozen, because a hook recomputes
    their weight before each call, or it is gathered from other ranks.
    """
    return _walk(model, "froze", mark_frozen)


def unfreeze(model: torch.nn.Module) -> Freezing:
    """End the promise of :func:`freeze`: weights are read again to detect changes."""
    return _walk(model, "unfroze", unmark_frozen)


def _walk(model: torch.nn.Module, action: str, act: Callable[[torch.Tensor], bool]) -> Freezing:
    count, left_alone = 0, {}
    for name, module in model.named_modules():
        if not isinstance(module, Convolution):
            continue
        weight = module._parameters.get("weight")
        if is_parametrized(module, "weight"):
            _fold(module, folds=action == "froze")
            count += 1
        elif weight is None:
            left_alone[name] = "its weight is made anew before each call"
        elif is_gathered(module):
            left_alone[name] = "FSDP writes to its weight before each call, and moves no version counter"
        elif is_dtensor(weight):
            left_alone[name] = "its weight is a DTensor, and not itself what a rank computes with"
        else:
            act(weight)
            count += 1
    return Freezing(action, count, left_alone)


class _FoldedParametrizations(ParametrizationList):
    """Parametrisations whose result is kept until a tensor that it depends on changes."""

    _folded: tuple[Any, list[ref[torch.UntypedStorage]], torch.Tensor] | None
    """State, memory of the tensors, and result. Weak references, since a freed object's ``id`` soon is another's."""

    def forward(self) -> torch.Tensor:
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward()
        tensors = (*self.parameters(), *self.buffers())
        if any(tensor.is_inference() for tensor in tensors):  # these have no version
            return super().forward()
        places = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors]
        state = tuple(self), places, [(id(tensor), tensor._version) for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        folded = self._folded
        if folded is None or folded[0] != state or any(map(is_not, storages, (known() for known in folded[1]))):
            weight = super().forward()
            mark_frozen(weight)
            self._folded = folded = state, list(map(ref, storages)), weight
        return folded[2]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_folded": None}  # a copy computes its own


def _fold(module: Any, *, folds: bool) -> None:
    parametrizations = module.parametrizations["weight"]
    kind = type(parametrizations)
    if folds and kind is ParametrizationList:
        parametrizations.__class__ = _FoldedParametrizations
        parametrizations._folded = None
    elif not folds and kind is _FoldedParametrizations:
        parametrizations.__class__ = ParametrizationList
        del parametrizations._folded
