"""``replace`` and ``restore``: swap the convolutions of an existing model in place.

Only the class of a module changes, so its parameters, hooks and all references to it stay valid. Both classes have the
same attributes, so nothing is converted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..nn import OURS, TORCHS, Convolution, has_all_sides
from ..runtime.warn_once import warn_once
from ..util import gpu_arch, tf32
from ..util.sharded_params import is_gathered, is_split, placements_of

Class = type[torch.nn.Module]

_OURS: dict[Class, Class] = dict(OURS.items())
_TORCHS: dict[Class, Class] = {ours: torchs for torchs, ours in OURS.items()}


@dataclass(frozen=True, slots=True)
class Replacement:
    """Result of replacing or restoring. Prints as one sentence, and one line for each module left alone."""

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
    """Replace every convolution in a model, the model itself included, by polyconv's.

    A ``torch.nn.Conv2d`` becomes a :class:`polyconv.Conv2d`, and likewise 1-D, 3-D, transposed and lazy modules, with
    their parametrisations (``torch.nn.utils.parametrize``) and sharding (``fully_shard``). Other subclasses of torch's
    modules are left alone, because they may do more than a convolution; so are modules split over ranks for tensor
    parallelism. The result counts what was replaced and names what was not. A warning is given if the model is on a GPU
    where PyTorch's TF32 is enabled and likely to be faster.
    """
    done = _swap(model, "replaced", _OURS, why_not_replace)
    if done.count:
        _tell_of_tf32(model)
    return done


def _tell_of_tf32(model: torch.nn.Module) -> None:
    """Warn once per GPU model. The driver is queried only if a parameter is on a GPU."""
    on_gpus = dict.fromkeys(parameter.device for parameter in model.parameters() if parameter.is_cuda)
    for device in on_gpus if tf32.is_allowed() else ():
        gpu = torch.cuda.get_device_properties(device)
        arch = f"sm_{gpu.major}{gpu.minor}"
        if gpu_arch.is_likely_faster(arch, gpu.name):
            warn_once(tf32.advice(gpu.name))


def restore(model: torch.nn.Module) -> Replacement:
    """Reverse :func:`replace`: a :class:`polyconv.Conv2d` becomes a ``torch.nn.Conv2d`` again, for example."""
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
    """Whether ``torch.nn.utils.parametrize`` made this class: a subclass for one module, with its properties."""
    return kind.__module__ == "torch.nn.utils.parametrize" and len(kind.__bases__) == 1


def _is_fully_sharded(kind: Class) -> bool:
    """Whether ``fully_shard`` made this class: it puts its own base class before the module's class."""
    first, *others = kind.__bases__
    return len(others) == 1 and any(each.__name__ == "FSDPModule" for each in first.__mro__)


def _plain_class(module: torch.nn.Module) -> Class:
    """Class of a module without parametrisations and sharding."""
    kind = type(module)
    while _is_parametrised(kind) or _is_fully_sharded(kind):
        kind = kind.__bases__[-1]
    return kind


def _counterpart(kind: Class, classes: dict[Class, Class]) -> Class:
    """The class to swap in; a class made by parametrisation or sharding is rebuilt on the counterpart of its base."""
    if kind in classes:
        return classes[kind]
    *before, base = kind.__bases__
    made = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (*before, _counterpart(base, classes)), made)


def why_not_replace(module: torch.nn.Module) -> str | None:
    """Why a convolution cannot become polyconv's. None if it can, or if the module is not a convolution of torch's."""
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
    """Public name of a module of torch's."""
    return f"torch.nn.{torchs.__name__}"


def _split_parameter(module: torch.nn.Module) -> str | None:
    """Why tensor parallelism forbids replacement: each rank must keep its part. None for FSDP, which gathers."""
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
    if module.fold is not None:
        return "it computes the batch normalisation after it; the undo() of optimize's report restores both"
    if has_all_sides(module):
        return f"{_named(_TORCHS[kind])} has no padding of {_SIDES[len(module.padding)]} sides {module.padding}"
    return None


_SIDES = {2: "two", 4: "four", 6: "six"}
