"""``replace`` and ``restore``: swap the convolutions of an existing model in place.

Only the class of a module changes, so its parameters, hooks and all references to it stay valid. Both classes have the
same attributes, so nothing is converted.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from ..arguments import Policy, checked_policy
from ..nn import OURS, TORCHS, Convolution, has_all_sides
from ..util.sharded_params import is_gathered, is_split, placements_of

Class = type[torch.nn.Module]

Filter = Callable[[torch.nn.Module, str], bool]

_OURS: dict[Class, Class] = dict(OURS.items())
_TORCHS: dict[Class, Class] = {ours: torchs for torchs, ours in OURS.items()}
_MADE_OF = "_made_of"
"""Attribute of a class made for a subclass of torch's module: that subclass."""
_OPTIONS = "tolerance", "activation", "fusion", "fold", "policy"
"""Attributes that polyconv's modules have and torch's have not."""


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


def replace(model: torch.nn.Module, filter_fn: Filter | None = None, *, policy: Policy = "auto") -> Replacement:
    """Replace every convolution in a model, the model itself included, by polyconv's.

    A ``torch.nn.Conv2d`` becomes a :class:`polyconv.Conv2d`, and likewise 1-D, 3-D, transposed and lazy modules, with
    their parametrisations (``torch.nn.utils.parametrize``) and sharding (``fully_shard``). A module of a subclass keeps
    its methods: it gets a new class that derives from the subclass and from polyconv's. Subclasses that override
    ``forward`` or ``_conv_forward`` are left alone, because they may do more (:func:`polyconv.enable` reaches them); so
    are modules split over ranks for tensor parallelism. The result counts what was replaced and names what was not.

    Args:
        model: the model.
        filter_fn: called with each convolution and its name; replaces those for which it returns true.
        policy: for CUDA tensors, also of modules replaced before. ``"auto"``: each pass of a layer runs polyconv's
            kernels if they are expected to be ahead of PyTorch's convolution in the format that PyTorch would use (its
            TF32 flags, autocast, the layout), else PyTorch's. Both times are modelled (:func:`polyconv.explain` shows
            them), and the choice is made at the first call, so the model may be moved later. ``"own"``: always
            polyconv's kernels, with a warning for layers in which PyTorch's TF32 is expected to be faster. Modules that
            the program itself creates are always polyconv's.
    """
    checked_policy(policy)

    def why_not(module: torch.nn.Module, name: str) -> str | None:
        reason = why_not_replace(module)
        excluded = reason is None and filter_fn is not None and _is_replaceable(module) and not filter_fn(module, name)
        return "filter_fn excludes it" if excluded else reason

    for module in model.modules():
        if isinstance(module, Convolution) and module.policy is not None:  # replaced before
            vars(module)["policy"] = policy
    return _swap(model, "replaced", _ours, why_not, policy)


def restore(model: torch.nn.Module) -> Replacement:
    """Reverse :func:`replace`: a :class:`polyconv.Conv2d` becomes a ``torch.nn.Conv2d`` again, for example."""
    return _swap(model, "restored", _torchs, lambda module, _: _why_not_restore(module), None)


def _swap(
    model: torch.nn.Module,
    action: str,
    swapped: Callable[[Class], Class | None],
    why_not: Callable[[torch.nn.Module, str], str | None],
    policy: Policy | None,
) -> Replacement:
    count, left_alone = 0, {}
    for name, module in model.named_modules():
        reason = why_not(module, name)
        if reason is not None:
            left_alone[name] = reason
        elif swapped(_plain_class(module)) is not None:
            module.__class__ = _counterpart(type(module), swapped)
            if policy is None:
                vars(module).pop("policy", None)
            else:
                vars(module)["policy"] = policy
            count += 1
    return Replacement(action, count, left_alone)


def _ours(kind: Class) -> Class | None:
    """The class of polyconv's for one of torch's or a subclass; None for any other class."""
    if kind in _OURS or not issubclass(kind, TORCHS) or issubclass(kind, Convolution):
        return _OURS.get(kind)
    if kind not in _of_both:
        _of_both.setdefault(kind, _subclass_of_both(kind))
    return _of_both[kind]


_of_both: dict[Class, Class] = {}
"""Subclass of torch's module -> its class of :func:`_subclass_of_both`: one, so that copies have it as well."""


def _torchs(kind: Class) -> Class | None:
    made_of: Class | None = vars(kind).get(_MADE_OF)
    return _TORCHS.get(kind) if made_of is None else made_of


def _is_replaceable(module: torch.nn.Module) -> bool:
    return _ours(_plain_class(module)) is not None


def _torch_base(kind: Class) -> Class:
    """The module of torch's that a class derives from."""
    return next(each for each in kind.__mro__ if each in _OURS)


def _subclass_of_both(kind: Class) -> Class:
    """A subclass of a subclass of torch's module and of polyconv's counterpart. Methods of the first come first."""

    def reduced(self: Any, protocol: Any) -> Any:
        function, arguments, *rest = super(made, self).__reduce_ex__(protocol)
        if function is copyreg.__newobj__ and arguments[0] is made:  # type: ignore[attr-defined]
            function, arguments = _new_of_both, (kind, *arguments[1:])
        return function, arguments, *rest

    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    members = {**named, _MADE_OF: kind, "__reduce_ex__": reduced}
    made: Class = type(kind.__name__, (kind, _OURS[_torch_base(kind)]), members)
    return made


def _new_of_both(kind: Class, *arguments: Any) -> Any:
    """Unpickle a module of a class made by :func:`_subclass_of_both`, which no module of Python has."""
    made: Any = _ours(kind)
    return made.__new__(made, *arguments)


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


def _counterpart(kind: Class, swapped: Callable[[Class], Class | None]) -> Class:
    """The class to swap in; a class made by parametrisation or sharding is rebuilt on the counterpart of its base."""
    found = None if _is_parametrised(kind) or _is_fully_sharded(kind) else swapped(kind)
    if found is not None:
        return found
    *before, base = kind.__bases__
    made = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (*before, _counterpart(base, swapped)), made)


def why_not_replace(module: torch.nn.Module) -> str | None:
    """Why a convolution cannot become polyconv's. None if it can, or if the module is not a convolution of torch's."""
    kind = _plain_class(module)
    if not isinstance(module, TORCHS) or isinstance(module, Convolution):
        return None
    reason = None if kind in _OURS else _why_not_subclass(module, kind)
    if reason is None:
        if getattr(module, "qconfig", None) is not None:
            return "torch.ao.quantization has prepared it; with the qconfig None it would stay in float"
        if (split := _split_parameter(module)) is not None:
            return split
        dtype = next((parameter.dtype for parameter in module.parameters()), torch.float32)
        reason = f"its weight is {dtype}; polyconv computes with real numbers" if dtype.is_complex else None
    return reason


def _why_not_subclass(module: torch.nn.Module, kind: Class) -> str | None:
    """Why a module of a subclass cannot be of polyconv's class as well."""
    torchs = _torch_base(kind)
    called = f"{kind.__module__}.{kind.__qualname__} is a subclass of {_named(torchs)}"
    if issubclass(kind, LazyModuleMixin):
        return f"{called}, and becomes another class at its first input"
    for name in ("forward", "_conv_forward"):
        if getattr(kind, name, None) is not getattr(torchs, name, None) or name in vars(module):
            return f"{called} that overrides {name} and may do more than a convolution; polyconv.enable() reaches it"
    taken = next((name for name in _OPTIONS if hasattr(module, name)), None)
    return None if taken is None else f"{called} with an attribute {taken}, which means something else in polyconv's"


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
    if _torchs(kind) is None:
        ours = next(each for each in kind.__mro__ if each in _TORCHS)
        return f"{kind.__qualname__} is a subclass of polyconv.{ours.__name__}"
    torchs = _torch_base(kind)
    if module.activation not in (None, "none"):
        return f"it applies {module.activation}, which {_named(torchs)} would leave out"
    if module.fold is not None:
        return "it computes the batch normalisation after it; the undo() of optimize's report restores both"
    if has_all_sides(module):
        return f"{_named(torchs)} has no padding of {_SIDES[len(module.padding)]} sides {module.padding}"
    return None


_SIDES = {2: "two", 4: "four", 6: "six"}
