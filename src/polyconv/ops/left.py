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
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import epoch
from ..vouching import vouched

_MODULE = "polyconv.ops._native"


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


class Left:
    """The last calls of modules, by their ``id``. Native code has a class like this one, of the same methods.

    A call is kept no longer than its module lives, and not with its attributes: copies and pickles know nothing of it.
    """

    def __init__(self) -> None:
        self._calls: dict[int, LastCall] = {}

    def remember(self, key: int, *call: Any) -> None:
        """By the ``id`` of a module, the fields of a :class:`LastCall`."""
        self._calls[key] = LastCall(*call)

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
            if found.number != epoch.now():
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


def _empty() -> Any:
    """By native code, where there is some. It is given what the other one imports."""
    try:
        native = import_module(_MODULE)
    except ImportError:
        return Left()
    return native.Left(epoch.seen, vouched, torch.is_grad_enabled)


_left = _empty()

again: Callable[[torch.nn.Module, Tensor], Tensor | None] = _left.again
forget: Callable[[int], None] = _left.forget


def remember(
    module: torch.nn.Module,
    number: int,
    graded: bool,
    weight: Tensor,
    bias: Tensor | None,
    fits: Callable[..., bool],
    torchs: Callable[..., Tensor],
    arguments: tuple[Any, ...],
) -> None:
    """The call of a module, until an attribute of it is set."""
    key = id(module)
    while_it_lives = weakref.ref(module, lambda _: forget(key))
    _left.remember(
        key, while_it_lives, number, graded, id(weight) in vouched, bias is not None, fits, torchs, arguments
    )
