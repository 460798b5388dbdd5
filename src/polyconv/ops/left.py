"""Modules whose last call was left to PyTorch's convolution: where it comes again, nothing is planned or looked up.

Most layers of a network that polyconv is swapped into may stay PyTorch's own, and must cost what they did. Between two
convolutions the caches are emptied of Python's own objects, and each one that is asked costs as much as hundreds of
instructions: in Python the few questions below take some 18 microseconds, three quarters of them waiting. So they are
asked by native code (``csrc/ops``), in less time than ``torch.nn.Conv2d`` spends on its attributes. A wheel has it, or
``python csrc/build.py`` builds it in place; without it, :class:`Left` asks them.

Nobody who watches calls is looked for, since PyTorch's convolution shows itself to all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter, is_
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
    classes: tuple[Mapping[str, Any], ...]
    """Attributes of the module's class and of those that it is made from."""
    size: int
    """Their number. It changes when a property or a method is put before what a module has."""
    method: Callable[..., Any]
    """``_conv_forward`` of the class."""
    names: tuple[str, ...]
    values: tuple[Any, ...]
    """Attributes that the call depends on: the objects that it was made with."""


class Left:
    """The last calls of modules, by their ``id``. Native code has a class like this one, of the same methods.

    A call is kept no longer than its module lives, and not with its attributes: copies and pickles know nothing of it.
    What it was made with is compared with what the module has at each call: nobody has to say that something changed,
    and what another thread changes while a call is made is seen by the next.
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
                or found.kind._conv_forward is not found.method
                or not all(map(is_, attrgetter(*found.names)(module), found.values))
                or not module.__dict__.keys().isdisjoint(_BEFORE_THE_OWN)
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


_BEFORE_THE_OWN = "weight", "bias", "_conv_forward"
"""Among a module's own attributes, they would come before its parameters and the method of its class."""
_BEFORE_PARAMETERS = "weight", "bias", "_parameters", "__getattribute__"
"""The same for the attributes of a class."""


def _empty() -> Any:
    """By native code, where there is some. It is given what the other one imports."""
    try:
        native = import_module(_MODULE)
    except ImportError:
        return Left()
    return native.Left(epoch.seen, vouched, torch.is_grad_enabled, torch.get_num_threads)


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
    key, kind = id(module), type(module)
    classes = tuple(vars(each) for each in kind.__mro__[:-1])
    size, method = sum(map(len, classes)), kind._conv_forward
    # After what is kept of the class was read: what another thread changes meanwhile is seen here, or at the next call.
    if any(not names.isdisjoint(_BEFORE_PARAMETERS) for names in map(Mapping.keys, classes)):
        return
    if not module._comes_straight_here or kind.__getattr__ is not torch.nn.Module.__getattr__:
        return
    while_it_lives = weakref.ref(module, lambda _: forget(key))
    call = LastCall(
        while_it_lives,
        number,
        graded,
        is_vouched,
        bias is not None,
        fits,
        torchs,
        arguments,
        kind,
        classes,
        size,
        method,
        names,
        values,
    )
    _left.remember(key, call)
