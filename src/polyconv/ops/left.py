"""Modules whose last call was left to PyTorch's convolution: where it comes again, nothing is planned or looked up.

Most layers of a network that polyconv is swapped into may stay PyTorch's own, and must cost what they did. Between two
convolutions the caches are emptied of Python's own objects, and each one that is asked costs as much as hundreds of
instructions: in Python the few questions below take some 18 microseconds, three quarters of them waiting. So they are
asked by native code (``csrc/ops``), in less time than ``torch.nn.Conv2d`` spends on its attributes. A wheel has it, or
``python csrc/build.py`` builds it in place; without it, :class:`Left` asks them.

Nobody who watches calls is looked for, since PyTorch's convolution shows itself to all of them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import epoch
from ..vouching import vouched

_MODULE = "polyconv.ops._native"

ATTRIBUTES = "stride", "padding", "dilation", "groups", "padding_mode", "tolerance", "activation"
"""Of a module, that a convolution depends on."""
TRANSPOSED = "stride", "padding", "output_padding", "groups", "dilation", "tolerance", "padding_mode"
"""The same for a transposed one."""
HIDING = "weight", "bias", "_conv_forward"
"""Attributes that, had a module them itself, would hide its parameters and the method of its class."""
NEVER_OF_A_CLASS = "weight", "bias", "__getattribute__"
"""The same for its class."""
ANY: Any = Ellipsis
"""In the place of an attribute that a call does not depend on."""


class LastCall(NamedTuple):
    """What a module was called with, and what it led to."""

    while_it_lives: weakref.ref[torch.nn.Module]
    number: int
    """Of the state (:mod:`polyconv.epoch`)."""
    graded: bool
    """Whether gradients were recorded."""
    vouched: bool
    """Whether somebody vouched for the weight (:mod:`polyconv.vouching`)."""
    biased: bool
    fits: Callable[..., bool]
    """Says of input, weight and bias, if there is one, whether they are like those of the call."""
    torchs: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    """What PyTorch's convolution was called with after the tensors."""
    kind: type[Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    """The module's own attributes, in their order, and the objects that the call was made with: :data:`ANY` where it
    does not depend on one."""
    classes: tuple[dict[str, Any], ...]
    size: int
    """Attributes of its classes, and their number: a property or a method that is put there is one more."""
    of_classes: tuple[tuple[dict[str, Any], str, Any], ...]
    """Those of them that the call depends on."""


class Left:
    """The last calls of modules, by their ``id``. Native code has a class like this one, of the same methods.

    A call is kept no longer than its module lives, and not with its attributes: copies and pickles know nothing of it.
    Each call compares the module's attributes with those of the remembered call. No notification is needed, and a
    change by another thread during a call is seen by the next call.
    """

    def __init__(self) -> None:
        self._calls: dict[int, LastCall] = {}

    def remember(self, key: int, call: LastCall) -> None:
        """By the ``id`` of a module."""
        self._calls[key] = call

    def forget(self, key: int) -> None:
        self._calls.pop(key, None)

    def __len__(self) -> int:
        return len(self._calls)

    def again(self, module: torch.nn.Module, x: Tensor) -> Tensor | None:
        """The output of PyTorch's convolution, if the module's last call was left to it and this is the same."""
        found = self._calls.get(id(module))
        if found is None:
            return None
        try:
            if (
                found.number != epoch.now()
                or type(module) is not found.kind
                or sum(map(len, found.classes)) != found.size
                or found.names != tuple(module.__dict__)
                or not all(map(_is_like, found.values, module.__dict__.values()))
                or any(attributes.get(name) is not value for attributes, name, value in found.of_classes)
            ):
                return None
            weight, bias = module._parameters["weight"], module._parameters["bias"]
            tensors = (x, weight, bias) if found.biased else (x, weight)
            if (
                found.graded is not torch.is_grad_enabled()
                or found.vouched is not (id(weight) in vouched)
                or found.biased is (bias is None)
                or any(tensor.is_nested for tensor in tensors)  # type: ignore[union-attr]
                or not found.fits(*tensors)
            ):
                return None
        except Exception:  # no tensor, or a weight that is made anew before each call: whoever asked finds out himself
            return None
        return found.torchs(x, weight, bias, *found.arguments)


def _is_like(expected: Any, value: Any) -> bool:
    return expected is value or expected is ANY


def _empty() -> Any:
    """By native code, where there is some. It is given what the other one imports."""
    try:
        native = import_module(_MODULE)
    except ImportError:
        return Left()
    return native.Left(epoch.seen, vouched, torch.is_grad_enabled, torch.get_num_threads, ANY)


_left = _empty()

again: Callable[[torch.nn.Module, Tensor], Tensor | None] = _left.again
forget: Callable[[int], None] = _left.forget


def remember(
    module: Any,
    number: int,
    graded: bool,
    is_vouched: bool,
    bias: Tensor | None,
    fits: Callable[..., bool],
    torchs: Callable[..., Tensor],
    arguments: tuple[Any, ...],
    names: tuple[str, ...],
    values: tuple[Any, ...],
) -> None:
    """The call of a module. ``values``: of the attributes of these names, as they were when the call was made."""
    key, kind, wanted = id(module), type(module), dict(zip(names, values, strict=True))
    own = tuple(module.__dict__)
    has = set(own)
    if not has.isdisjoint(HIDING):
        return
    classes: list[dict[str, Any]] = []
    of_classes: list[tuple[dict[str, Any], str, Any]] = []
    for each in kind.__mro__[:-1]:
        attributes = vars(each)
        (dictionary,) = gc.get_referents(attributes)
        classes.append(dictionary)
        for name in attributes.keys() & {*names, "_conv_forward"}:
            value = attributes[name]
            if name in wanted and hasattr(type(value), "__get__"):
                return
            of_classes.append((dictionary, name, value if name in has else wanted.get(name, value)))
        has.update(attributes)
    size = sum(map(len, classes))
    # After all this was read: what another thread changes meanwhile is seen here, or at the next call.
    if not module._comes_straight_here or kind.__getattr__ is not torch.nn.Module.__getattr__:
        return
    if not has.isdisjoint(NEVER_OF_A_CLASS) or not has.issuperset(names):
        return
    while_it_lives = weakref.ref(module, lambda _: forget(key))
    how = graded, is_vouched, bias is not None, fits, torchs, arguments
    what = own, tuple(wanted.get(name, ANY) for name in own), tuple(classes), size, tuple(of_classes)
    _left.remember(key, LastCall(while_it_lives, number, *how, kind, *what))
