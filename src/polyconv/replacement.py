"""``replace`` and ``restore``: the convolutions of an existing model, swapped in place.

Only the class of a module changes. The object stays the same, and with it the parameters, hooks, optimiser references
and whoever else holds the module; and because the two classes have the same attributes, there is nothing to convert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from . import tf32
from .nn import OURS, TORCHS, Convolution, has_all_sides
from .once import warn_once
from .sharded import is_gathered, is_split, placements_of

Class = type[torch.nn.Module]

_OURS: dict[Class, Class] = dict(OURS.items())
_TORCHS: dict[Class, Class] = {ours: torchs for torchs, ours in OURS.items()}


@dataclass(frozen=True, slots=True)
class Replacement:
    """What was done to a model. Prints as one sentence, and one line for each module that was left alone."""

    action: str
    """``"replaced"`` or ``"restored"``."""
    count: int
    left_alone: dict[str, str] = field(default_factory=dict)
    """Name of the module -> why it was not touched."""

    @property
    def total(self) -> int:
        return self.count + len(self.left_alone)

    def __int__(self) -> int:
        return self.count

    def __str__(self) -> str:
        lines = [f"{self.action} {self.count} of {self.total} convolutions"]
        lines += [f"  left alone: {name or '(the model itself)'}: {why}" for name, why in self.left_alone.items()]
        return "\n".join(lines)


def replace(model: torch.nn.Module) -> Replacement:
    """Make every convolution in a model, the model itself included, polyconv's.

    A ``torch.nn.Conv2d`` becomes a :class:`polyconv.Conv2d`, and so on for ``Conv1d``, ``ConvTranspose1d`` and
    ``ConvTranspose2d``. A lazy module becomes one that turns into polyconv's at its first input, and a module keeps its
    parametrisations (``torch.nn.utils.parametrize``) and its sharding (``fully_shard``). Other subclasses of torch's
    modules are left alone, because they may do more than a convolution; so are modules of which each rank has a part,
    for tensor parallelism. The result counts what was replaced and names what was not.

    Where the model is on a GPU on which PyTorch's TF32 is likely to be faster, and is on, one warning says so.
    """
    done = _swap(model, "replaced", _OURS, why_not_replace)
    if done.count:
        _tell_of_tf32(model)
    return done


def _tell_of_tf32(model: torch.nn.Module) -> None:
    """Once per kind of GPU; nothing is asked of a driver unless a parameter is on one."""
    on_gpus = dict.fromkeys(parameter.device for parameter in model.parameters() if parameter.is_cuda)
    for device in on_gpus if tf32.is_allowed() else ():
        gpu = torch.cuda.get_device_properties(device)
        arch = f"sm_{gpu.major}{gpu.minor}"
        if tf32.is_likely_faster(arch, gpu.name):
            warn_once(tf32.advice(gpu.name))


def restore(model: torch.nn.Module) -> Replacement:
    """The reverse of :func:`replace`: every :class:`polyconv.Conv2d`, say, becomes a ``torch.nn.Conv2d`` again."""
    return _swap(model, "restored", _TORCHS, _why_not_restore)


def _swap(
    model: torch.nn.Module,
    action: str,
    classes: dict[Class, Class],
    why_not: Callable[[torch.nn.Module], str | None],
) -> Replacement:
    count, left_alone = 0, {}
    for name, module in model.named_modules():
        reason = why_not(module)
        if reason is not None:
            left_alone[name] = reason
        elif _plain_class(module) in classes:
            module.__class__ = _counterpart(type(module), classes)
            count += 1
    return Replacement(action, count, left_alone)


def _is_parametrised(kind: Class) -> bool:
    """Whether ``torch.nn.utils.parametrize`` made this class: for one module, to hold its properties, as a subclass."""
    return kind.__module__ == "torch.nn.utils.parametrize" and len(kind.__bases__) == 1


def _is_fully_sharded(kind: Class) -> bool:
    """Whether ``fully_shard`` made this class: it puts methods of its own before those of the class that it found."""
    first, *others = kind.__bases__
    return len(others) == 1 and any(each.__name__ == "FSDPModule" for each in first.__mro__)


def _plain_class(module: torch.nn.Module) -> Class:
    """The class of a module before parametrisations and sharding."""
    kind = type(module)
    while _is_parametrised(kind) or _is_fully_sharded(kind):
        kind = kind.__bases__[-1]
    return kind


def _counterpart(kind: Class, classes: dict[Class, Class]) -> Class:
    """The class to swap in: for one that torch made of another for its purposes, its like with another base."""
    if kind in classes:
        return classes[kind]
    *before, base = kind.__bases__
    made = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (*before, _counterpart(base, classes)), made)


def why_not_replace(module: torch.nn.Module) -> str | None:
    """Why a convolution cannot become polyconv's, or None; None, too, for what is no convolution of torch's."""
    kind = _plain_class(module)
    if kind in _OURS:
        if getattr(module, "qconfig", None) is not None:
            return "torch.ao.quantization has prepared it; with the qconfig None it would stay in float"
        if (split := _split_parameter(module)) is not None:
            return split
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
        return f"its weight is {dtype}; polyconv computes with real numbers" if dtype.is_complex else None
    if not isinstance(module, TORCHS) or isinstance(module, Convolution):
        return None
    torchs = next(each for each in kind.__mro__ if each in _OURS)
    return f"{kind.__module__}.{kind.__qualname__} is a subclass of {_named(torchs)} and may do more than a convolution"


def _named(torchs: Class) -> str:
    """As a user writes it."""
    return f"torch.nn.{torchs.__name__}"


def _split_parameter(module: torch.nn.Module) -> str | None:
    """Tensor parallelism: its wrappers count on each rank's having a part of the layer. FSDP gathers what it splits."""
    for name, parameter in () if is_gathered(module) else module.named_parameters():
        if is_split(parameter):
            how = f"its {name} is a DTensor with the placements {placements_of(parameter)}"
            return f"{how}: polyconv shards a convolution over its batch alone, and would gather it at each call"
    return None


def _why_not_restore(module: torch.nn.Module) -> str | None:
    kind = _plain_class(module)
    if not isinstance(module, Convolution):
        return None
    if kind not in _TORCHS:
        ours = next(each for each in kind.__mro__ if each in _TORCHS)
        return f"{kind.__qualname__} is a subclass of polyconv.{ours.__name__}"
    if module.activation not in (None, "none"):
        return f"it applies {module.activation}, which {_named(_TORCHS[kind])} would leave out"
    if has_all_sides(module):
        return f"{_named(_TORCHS[kind])} has no padding of {_SIDES[len(module.padding)]} sides {module.padding}"
    return None


_SIDES = {2: "two", 4: "four"}
