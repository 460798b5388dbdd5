"""``freeze`` and ``unfreeze``: a promise about the weights of a model, and its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .nn import Convolution
from .sharded import is_dtensor, is_gathered
from .vouching import doubt, vouch


@dataclass(frozen=True, slots=True)
class Freezing:
    """What was done to a model. Prints as one sentence, and one line for each module that was left alone."""

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
    """Promise that nobody writes to the weights of a model's convolutions behind their version counters.

    In inference polyconv keeps what it made of a weight from call to call, and makes it anew when the weight changed.
    A write through ``weight.data``, a NumPy array or a memory map that shares its memory, or another tensor on its
    storage moves no version counter; nor does the step of an optimiser with ``fused=True``. So a weight is read whole
    before each call, where that is cheap beside the call; where it is not, nothing is kept, and algorithms that prepare
    weights at length do not pay. With the promise, version and memory are enough: nothing is read, and everything may
    be kept. Should such a write happen all the same, results are those of the old weights, without a word.

    What moves the counter is seen as ever: ``load_state_dict``, the step of any other optimiser, ``weight.mul_(2)``;
    and so is another tensor in the weight's place, or other memory (``weight.data = other``), also at the same address.
    ``torch.utils.swap_tensors`` ends the promise. Training is not affected: there nothing is kept.
    The promise is about the weights as they are now, not about copies of the model, nor about the same model in
    another process; it ends with :func:`unfreeze`, or with the weight. On a GPU only frozen weights are kept: to read
    others would be to wait for it. A CUDA graph makes its own at each replay.

    The result counts what was frozen and names modules of polyconv's that were not, because their weight is
    made anew before each call, or gathered from other ranks.
    """
    return _walk(model, "froze", vouch)


def unfreeze(model: torch.nn.Module) -> Freezing:
    """The end of :func:`freeze`'s promise: from now on weights are read again."""
    return _walk(model, "unfroze", doubt)


def _walk(model: torch.nn.Module, action: str, act: Callable[[torch.Tensor], bool]) -> Freezing:
    count, left_alone = 0, {}
    for name, module in model.named_modules():
        if not isinstance(module, Convolution):
            continue
        weight = module._parameters.get("weight")
        if weight is None:
            left_alone[name] = "its weight is made anew before each call"
        elif is_gathered(module):
            left_alone[name] = "FSDP writes to its weight before each call, and moves no version counter"
        elif is_dtensor(weight):
            left_alone[name] = "its weight is a DTensor, and not itself what a rank computes with"
        else:
            act(weight)
            count += 1
    return Freezing(action, count, left_alone)
