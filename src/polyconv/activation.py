"""Activations of a forward pass: their names, their parameters, and each as ATen computes it."""

from __future__ import annotations

import re
from functools import lru_cache
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:  # planners need no torch
    from torch import Tensor


class _Function(NamedTuple):
    aten: str
    """Name of ATen's operator; that of its in-place version ends in ``_``."""
    defaults: tuple[float, ...] = ()
    """Parameters as torch's modules have them by default."""
    slope: float = 1.0
    """Largest slope, without parameters."""
    roundings: int = 0
    """Largest error that a kernel adds [half ulp of its argument or result]."""
    options: tuple[tuple[str, str], ...] = ()


_FUNCTIONS = {
    "none": _Function(""),
    "relu": _Function("relu"),
    "silu": _Function("silu", slope=1.1, roundings=6),
    "hardtanh": _Function("hardtanh", (-1.0, 1.0)),
    "leaky_relu": _Function("leaky_relu", (0.01,), roundings=1),
    "hardswish": _Function("hardswish", slope=1.5, roundings=5),
    "hardsigmoid": _Function("hardsigmoid", roundings=4),
    "sigmoid": _Function("sigmoid", roundings=6),
    "gelu": _Function("gelu", slope=1.13, roundings=10),
    "gelu_tanh": _Function("gelu", slope=1.13, roundings=10, options=(("approximate", "tanh"),)),
}
"""By the names in kernels, except that these call ``hardtanh`` a clamp."""

_TEXT = re.compile(r"(\w+)(?:\(([^()]*)\))?")


class Activation(str):
    """Function that a forward pass applies to its sums before storing them.

    A name, with parameters where they are not torch's defaults: ``relu``, ``leaky_relu(0.2)``, ``hardtanh(0.0, 6.0)``.
    Equal to its text. Each of the named constants is a single object.
    """

    function: str
    parameters: tuple[float, ...]

    NONE: ClassVar[Activation]
    RELU: ClassVar[Activation]
    SILU: ClassVar[Activation]

    def __new__(cls, text: str) -> Activation:
        return text if isinstance(text, Activation) else _CONSTANTS.get(text) or _parsed(text)

    @classmethod
    def of(cls, function: str, *parameters: float) -> Activation:
        """The activation of a name and its parameters as numbers."""
        return cls(f"{function}({', '.join(map(repr, parameters))})" if parameters else function)

    def __reduce__(self) -> tuple[Any, ...]:
        return Activation, (str(self),)

    @property
    def kernel(self) -> str:
        """Name in the kernels' enumerations."""
        return "clamp" if self.function == "hardtanh" else self.function

    @property
    def aten(self) -> tuple[str, tuple[float, ...], dict[str, str]]:
        """ATen's operator, its parameters after the tensor, and its keyword arguments."""
        found = _FUNCTIONS[self.function]
        return found.aten, self.parameters, dict(found.options)

    @property
    def ab(self) -> tuple[float, float]:
        """Parameters as the kernels take them: bounds, or a slope and zero."""
        a, b = (*self.parameters, 0.0, 0.0)[:2]
        return a, b

    @property
    def is_saved_by_output(self) -> bool:
        """Whether the derivative needs no more than the output, so that a pass that is differentiated may fuse it."""
        return self.function in ("none", "relu")

    @property
    def slope(self) -> float:
        """Largest slope: factor of the error of the sums."""
        if self.function == "leaky_relu":
            return max(1.0, abs(self.parameters[0]))
        return _FUNCTIONS[self.function].slope

    @property
    def roundings(self) -> int:
        """Largest error that a kernel adds [half ulp of its argument or result]."""
        return _FUNCTIONS[self.function].roundings

    def __call__(self, y: Tensor) -> Tensor:
        """The activation in PyTorch."""
        return self._call("", y)

    def in_place(self, y: Tensor) -> Tensor:
        return self._call("_", y)

    def _call(self, suffix: str, y: Tensor) -> Tensor:
        if self.function == "none":
            return y
        import torch

        name, parameters, options = self.aten
        result: Tensor = getattr(torch.ops.aten, name + suffix)(y, *parameters, **options)
        return result


def _make(function: str, parameters: tuple[float, ...] = ()) -> Activation:
    defaults = _FUNCTIONS[function].defaults
    text = function if parameters == defaults else f"{function}({', '.join(map(repr, parameters))})"
    made = str.__new__(Activation, text)
    made.function, made.parameters = function, parameters
    return made


@lru_cache(maxsize=256)
def _parsed(text: str) -> Activation:
    found = _TEXT.fullmatch(text.strip())
    name, given = found.groups() if found else ("", None)
    if name == "relu6" and given is None:
        name, given = "hardtanh", "0, 6"
    if name not in _FUNCTIONS:
        raise ValueError(
            f"activation must be None or one of {', '.join([*_FUNCTIONS, 'relu6'])}; got {text!r}. "
            "Any other function can be called on the result"
        )
    defaults = _FUNCTIONS[name].defaults
    try:
        parameters = tuple(float(number) for number in given.split(",")) if given else defaults
    except ValueError:
        parameters = ()
    if len(parameters) != len(defaults) or any(map(isnan, parameters)):
        raise ValueError(f"{name} takes {len(defaults) or 'no'} parameters, as {_make(name, defaults)!r}; got {text!r}")
    if name == "hardtanh" and parameters[0] > parameters[1]:
        raise ValueError(f"the lower bound of hardtanh must be below the upper one; got {text!r}")
    if name == "leaky_relu" and not isfinite(parameters[0]):
        raise ValueError(f"the slope of leaky_relu must be finite; got {text!r}")
    return _make(name, parameters)


_CONSTANTS = {name: _make(name) for name in ("none", "relu", "silu")}
Activation.NONE, Activation.RELU, Activation.SILU = _CONSTANTS.values()
ACTIVATIONS = (*_FUNCTIONS, "relu6")
"""Names that a caller may give. ``relu6`` is ``hardtanh(0.0, 6.0)``."""
