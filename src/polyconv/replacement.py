"""``replace`` and ``restore``: the convolutions of an existing model, swapped in place.

Only the class of a module changes. The object stays the same, and with it the parameters, hooks, optimiser references
and whoever else holds the module; and because the two classes have the same attributes, there is nothing to convert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .nn import Conv2d


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
        lines = [f"{self.action} {self.count} of {self.total} Conv2d modules"]
        lines += [f"  left alone: {name or '(the model itself)'}: {why}" for name, why in self.left_alone.items()]
        return "\n".join(lines)


def replace(model: torch.nn.Module) -> Replacement:
    """Make every ``torch.nn.Conv2d`` in a model, the model itself included, a :class:`polyconv.Conv2d`.

    Subclasses of ``torch.nn.Conv2d`` are left alone, because they may do more than a convolution; so are lazy modules
    that have not seen their first input. The result counts what was replaced and names what was not.
    """
    return _swap(model, "replaced", torch.nn.Conv2d, Conv2d, why_not_replace)


def restore(model: torch.nn.Module) -> Replacement:
    """The reverse of :func:`replace`: every :class:`polyconv.Conv2d` becomes a ``torch.nn.Conv2d`` again."""
    return _swap(model, "restored", Conv2d, torch.nn.Conv2d, _why_not_restore)


def _swap(
    model: torch.nn.Module,
    action: str,
    old: type[torch.nn.Module],
    new: type[torch.nn.Module],
    why_not: Callable[[torch.nn.Module], str | None],
) -> Replacement:
    count, left_alone = 0, {}
    for name, module in model.named_modules():
        reason = why_not(module)
        if reason is not None:
            left_alone[name] = reason
        elif type(module) is old:
            module.__class__ = new
            count += 1
    return Replacement(action, count, left_alone)


def why_not_replace(module: torch.nn.Module) -> str | None:
    """Why a convolution cannot become polyconv's, or None; None, too, for what is no convolution of torch's."""
    if type(module) is torch.nn.Conv2d:
        dtype = module.weight.dtype
        return f"its weight is {dtype}; polyconv computes with real numbers" if dtype.is_complex else None
    if not isinstance(module, torch.nn.Conv2d) or isinstance(module, Conv2d):
        return None
    if isinstance(module, torch.nn.LazyConv2d):
        return "lazy and not initialised yet; call replace again after the first forward pass"
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__} is a subclass of torch.nn.Conv2d and may do more than a convolution"


def _why_not_restore(module: torch.nn.Module) -> str | None:
    if type(module) is Conv2d and module.activation not in (None, "none"):
        return f"it applies {module.activation}, which torch.nn.Conv2d would leave out"
    if type(module) is Conv2d and not isinstance(module.padding, str) and len(module.padding) == 4:
        return f"torch.nn.Conv2d has no padding of four sides {module.padding}"
    if isinstance(module, Conv2d) and type(module) is not Conv2d:
        return f"{type(module).__qualname__} is a subclass of polyconv.Conv2d"
    return None
