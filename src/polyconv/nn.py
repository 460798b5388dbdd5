"""``Conv2d``: ``torch.nn.Conv2d`` with another engine.

A subclass that adds no state of its own: parameters, initialisation, state dict, repr and ``isinstance`` are torch's: a
checkpoint moves between the two in both directions, and :func:`polyconv.replace` may swap one class for the other
in place.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .arguments import Extent, Padding, activation_name
from .exchange import check_qconfig, refuse_scripting
from .functional import by_operator
from .ops import shortcut
from .ops.shortcut import again
from .settings import checked_tolerance
from .vouching import is_frozen


class Conv2d(torch.nn.Conv2d):
    """Takes the arguments of :class:`torch.nn.Conv2d`; ``padding`` may also be (top, bottom, left, right).

    A padding mode other than zeros costs no padded copy of the input: the kernels compute the index. ``tolerance`` is
    the error budget of this module; None is the one of :func:`polyconv.set_tolerance`. ``activation`` (``"relu"``,
    ``"silu"``) is applied before the output is stored, after the residual that :meth:`forward` may be given is added.
    """

    tolerance: float | None = None
    activation: str | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Extent,
        stride: Extent = 1,
        padding: Padding = 0,
        dilation: Extent = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        tolerance: float | None = None,
        activation: str | None = None,
    ) -> None:
        # torch's annotations know neither lists nor four sides; its code carries both through to `self.padding`.
        sizes: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
        super().__init__(
            in_channels,
            out_channels,
            groups=groups,
            bias=bias,
            padding_mode=padding_mode,
            device=device,
            dtype=dtype,
            **sizes,
        )
        if tolerance is not None:
            self.tolerance = checked_tolerance(tolerance)
        if activation is not None:
            self.activation = activation_name(activation)
        if not isinstance(self.padding, str) and len(self.padding) == 4:
            top, bottom, left, right = self.padding
            # What torch.nn.functional.pad would be called with; torch's constructor expects two sides here.
            self._reversed_padding_repeated_twice = [left, right, top, bottom]

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """``activation(conv(input) + bias + residual)``.

        Tools that wrap a module's forward keep this method, bound to the module, whatever class the module has later:
        so it asks no more of ``_conv_forward`` than torch's has, unless it was given more.
        """
        own: dict[str, Any] = self._parameters
        try:  # where torch looks last for an attribute, after half a microsecond
            weight, bias = own["weight"], own["bias"]
        except KeyError:  # made anew before each call: a parametrisation, a hook
            weight, bias = self.weight, self.bias
        if residual is not None:
            return self._conv_forward(input, weight, bias, residual)
        if not is_compiling() and (y := again(self, input, weight, bias)) is not None:
            return y
        return self._conv_forward(input, weight, bias)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig":
            check_qconfig(value)
        shortcut.forget_left(self)
        super().__setattr__(name, value)

    __prepare_scriptable__ = refuse_scripting

    def extra_repr(self) -> str:
        plain: str = super().extra_repr()
        activation = "" if self.activation is None else f", activation={self.activation}"
        return plain + activation + (", frozen" if is_frozen(self) else "")

    def _conv_forward(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        sizes = self.stride, self.padding, self.dilation, self.groups, self.padding_mode
        args = input, weight, bias, *sizes, self.tolerance, self.activation, residual
        y = None if is_compiling() else shortcut.conv2d(*args, self if self._comes_straight_here else None)
        return by_operator(*args) if y is None else y

    @property
    def _comes_straight_here(self) -> bool:
        """Whether :meth:`forward` calls the method above: not one of a subclass's, nor one that was set."""
        return type(self)._conv_forward is Conv2d._conv_forward and "_conv_forward" not in self.__dict__


class LazyConv2d(torch.nn.LazyConv2d, Conv2d):  # type: ignore[misc]
    """Takes the arguments of :class:`torch.nn.LazyConv2d`: in_channels is that of the first input.

    From then on the module is a :class:`Conv2d`.
    """

    cls_to_become = Conv2d

    def __init__(
        self,
        out_channels: int,
        kernel_size: Extent,
        stride: Extent = 1,
        padding: Padding = 0,
        dilation: Extent = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        tolerance: float | None = None,
        activation: str | None = None,
    ) -> None:
        sizes: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
        super().__init__(
            out_channels, groups=groups, bias=bias, padding_mode=padding_mode, device=device, dtype=dtype, **sizes
        )
        if tolerance is not None:
            self.tolerance = checked_tolerance(tolerance)
        if activation is not None:
            self.activation = activation_name(activation)
