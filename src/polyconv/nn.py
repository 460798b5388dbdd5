"""``Conv1d`` to ``Conv3d`` and the transposed ones: ``torch.nn``'s with another engine.

Subclasses that add no state of their own: parameters, initialisation, state dict, repr and ``isinstance`` are torch's:
a checkpoint moves between the two in both directions, and :func:`polyconv.replace` may swap one class for the other
in place. All of them are in :data:`OURS`, which is what tools ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.modules.conv import _ConvNd

from .arguments import Extent, Padding, activation_name
from .exchange import check_qconfig, refuse_scripting
from .functional import by_operator, transposed_by_operator
from .ops import shortcut
from .ops.left import again
from .settings import checked_tolerance
from .vouching import is_frozen

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class Fusion(Protocol):
    """An activation inside a convolution that holds in one mode alone."""

    def follow(self) -> None:
        """Suspend or resume it, after the mode of a module has changed."""


class Convolution(_ConvNd):
    """What all of polyconv's modules share: an error budget, and the way to calls that are left to PyTorch."""

    tolerance: float | None = None
    activation: str | None = None
    fusion: Fusion | None = None
    """Why it computes the activation of another module, where :func:`polyconv.optimize` found that it may."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig":
            check_qconfig(value)
        super().__setattr__(name, value)
        if name == "training" and self.fusion is not None:
            self.fusion.follow()

    __prepare_scriptable__ = refuse_scripting

    @property
    def _comes_straight_here(self) -> bool:
        """Whether :meth:`forward` calls no method that may be another one than polyconv's."""
        return True

    def extra_repr(self) -> str:
        plain: str = super().extra_repr()
        activation = "" if self.activation is None else f", activation={self.activation}"
        return plain + activation + (", frozen" if is_frozen(self) else "")


class _Forward(Convolution):
    """A convolution over any number of axes."""

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
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        tolerance: float | None = None,
        activation: str | None = None,
    ) -> None:
        # torch's annotations know neither lists nor all sides; its code carries both through to `self.padding`.
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
        _keep_options(self, tolerance, activation)
        if has_all_sides(self):
            # What torch.nn.functional.pad would be called with, the last axis first; torch's constructor expects one
            # number per axis here.
            pairs = [self.padding[i : i + 2] for i in range(0, len(self.padding), 2)]
            self._reversed_padding_repeated_twice = [int(side) for pair in reversed(pairs) for side in pair]

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """``activation(conv(input) + bias + residual)``.

        Tools that wrap a module's forward keep this method, bound to the module, whatever class the module has later:
        so it asks no more of ``_conv_forward`` than torch's has, unless it was given more.
        """
        if residual is None and not is_dynamo_compiling() and (y := again(self, input)) is not None:
            return y
        if residual is not None:
            return self._conv_forward(input, self.weight, self.bias, residual)
        return self._conv_forward(input, self.weight, self.bias)

    def _conv_forward(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        sizes = self.stride, self.padding, self.dilation, self.groups, self.padding_mode
        args = len(self.kernel_size), input, weight, bias, *sizes, self.tolerance, self.activation, residual
        y = None if is_compiling() else shortcut.convolve(*args, self if self._comes_straight_here else None)
        return by_operator(*args) if y is None else y

    @property
    def _comes_straight_here(self) -> bool:
        """Whether :meth:`forward` calls the method above: not one of a subclass's, nor one that was set."""
        return type(self)._conv_forward is _Forward._conv_forward and "_conv_forward" not in self.__dict__


class _Transposed(Convolution):
    """A transposed convolution over any number of axes."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Extent,
        stride: Extent = 1,
        padding: Extent = 0,
        output_padding: Extent = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Extent = 1,
        padding_mode: Literal["zeros"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        tolerance: float | None = None,
    ) -> None:
        sizes: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
        sizes["output_padding"] = output_padding
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
        _keep_options(self, tolerance, None)

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """``output_size`` says how large the output is to be, where the stride leaves that open."""
        if output_size is None and not is_dynamo_compiling() and (y := again(self, input)) is not None:
            return y
        weight, bias = self.weight, self.bias
        if self.padding_mode != "zeros":
            raise ValueError(f"Only `zeros` padding mode is supported for {type(self).__name__}")
        rank, output_padding = len(self.kernel_size), self.output_padding
        if output_size is not None:
            sizes: Any = self.stride, self.padding, self.kernel_size, rank, self.dilation
            output_padding = self._output_padding(input, list(output_size), *sizes)  # type: ignore[operator]
        padding: Any = self.padding  # no word, as it may be in other convolutions
        numbers = self.stride, padding, tuple(output_padding), self.groups, self.dilation
        args = rank, input, weight, bias, *numbers, self.tolerance
        y = None if is_compiling() else shortcut.transpose(*args, self if output_size is None else None)
        return transposed_by_operator(*args) if y is None else y


def _keep_options(module: Convolution, tolerance: float | None, activation: str | None) -> None:
    """As attributes of the module only where they are given: torch's modules have none."""
    if tolerance is not None:
        module.tolerance = checked_tolerance(tolerance)
    if activation is not None:
        module.activation = activation_name(activation)


def has_all_sides(module: Convolution) -> bool:
    """Whether the padding is given side by side, which torch's modules do not know."""
    return not isinstance(module.padding, str) and len(module.padding) == 2 * len(module.kernel_size)


class Conv1d(_Forward, torch.nn.Conv1d):
    """Takes the arguments of :class:`torch.nn.Conv1d`; ``padding`` may also be (left, right). See :class:`Conv2d`."""


class Conv2d(_Forward, torch.nn.Conv2d):
    """Takes the arguments of :class:`torch.nn.Conv2d`; ``padding`` may also be (top, bottom, left, right).

    A padding mode other than zeros costs no padded copy of the input: the kernels compute the index. ``tolerance`` is
    the error budget of this module; None is the one of :func:`polyconv.set_tolerance`. ``activation`` (``"relu"``,
    ``"silu"``) is applied before the output is stored, after the residual that :meth:`forward` may be given is added.
    """


class Conv3d(_Forward, torch.nn.Conv3d):
    """Takes the arguments of :class:`torch.nn.Conv3d`; ``padding`` may also be all six sides. See :class:`Conv2d`."""


class ConvTranspose1d(_Transposed, torch.nn.ConvTranspose1d):
    """Takes the arguments of :class:`torch.nn.ConvTranspose1d`. See :class:`ConvTranspose2d`."""


class ConvTranspose2d(_Transposed, torch.nn.ConvTranspose2d):
    """Takes the arguments of :class:`torch.nn.ConvTranspose2d`.

    ``tolerance`` is the error budget of this module; None is the one of :func:`polyconv.set_tolerance`.
    """


class ConvTranspose3d(_Transposed, torch.nn.ConvTranspose3d):
    """Takes the arguments of :class:`torch.nn.ConvTranspose3d`. See :class:`ConvTranspose2d`."""


class _LazyForward:
    """A convolution whose in_channels are those of the first input."""

    def __init__(
        self,
        out_channels: int,
        kernel_size: Extent,
        stride: Extent = 1,
        padding: Padding = 0,
        dilation: Extent = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        tolerance: float | None = None,
        activation: str | None = None,
    ) -> None:
        sizes: Any = kernel_size, stride, padding, dilation
        made: Any = super()
        made.__init__(out_channels, *sizes, groups, bias, padding_mode, device, dtype)
        _keep_options(self, tolerance, activation)  # type: ignore[arg-type]


class _LazyTransposed:
    """The same, transposed."""

    def __init__(
        self,
        out_channels: int,
        kernel_size: Extent,
        stride: Extent = 1,
        padding: Extent = 0,
        output_padding: Extent = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Extent = 1,
        padding_mode: Literal["zeros"] = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        tolerance: float | None = None,
    ) -> None:
        sizes: Any = kernel_size, stride, padding, output_padding
        made: Any = super()
        made.__init__(out_channels, *sizes, groups, bias, dilation, padding_mode, device, dtype)
        _keep_options(self, tolerance, None)  # type: ignore[arg-type]


class LazyConv1d(_LazyForward, torch.nn.LazyConv1d, Conv1d):  # type: ignore[misc]
    """Takes the arguments of :class:`torch.nn.LazyConv1d`; becomes a :class:`Conv1d` at its first input."""

    cls_to_become = Conv1d


class LazyConv2d(_LazyForward, torch.nn.LazyConv2d, Conv2d):  # type: ignore[misc]
    """Takes the arguments of :class:`torch.nn.LazyConv2d`: in_channels is that of the first input.

    From then on the module is a :class:`Conv2d`.
    """

    cls_to_become = Conv2d


class LazyConv3d(_LazyForward, torch.nn.LazyConv3d, Conv3d):  # type: ignore[misc]
    """Takes the arguments of :class:`torch.nn.LazyConv3d`; becomes a :class:`Conv3d` at its first input."""

    cls_to_become = Conv3d


class LazyConvTranspose1d(_LazyTransposed, torch.nn.LazyConvTranspose1d, ConvTranspose1d):  # type: ignore[misc]
    """Takes the arguments of :class:`torch.nn.LazyConvTranspose1d`; becomes a :class:`ConvTranspose1d`."""

    cls_to_become = ConvTranspose1d  # type: ignore[assignment]


class LazyConvTranspose2d(_LazyTransposed, torch.nn.LazyConvTranspose2d, ConvTranspose2d):  # type: ignore[misc]
    """Takes the arguments of :class:`torch.nn.LazyConvTranspose2d`; becomes a :class:`ConvTranspose2d`."""

    cls_to_become = ConvTranspose2d  # type: ignore[assignment]


class LazyConvTranspose3d(_LazyTransposed, torch.nn.LazyConvTranspose3d, ConvTranspose3d):  # type: ignore[misc]
    """Takes the arguments of :class:`torch.nn.LazyConvTranspose3d`; becomes a :class:`ConvTranspose3d`."""

    cls_to_become = ConvTranspose3d  # type: ignore[assignment]


OURS: dict[type[_ConvNd], type[Convolution]] = {
    torch.nn.Conv1d: Conv1d,
    torch.nn.Conv2d: Conv2d,
    torch.nn.Conv3d: Conv3d,
    torch.nn.ConvTranspose1d: ConvTranspose1d,
    torch.nn.ConvTranspose2d: ConvTranspose2d,
    torch.nn.ConvTranspose3d: ConvTranspose3d,
    torch.nn.LazyConv1d: LazyConv1d,
    torch.nn.LazyConv2d: LazyConv2d,
    torch.nn.LazyConv3d: LazyConv3d,
    torch.nn.LazyConvTranspose1d: LazyConvTranspose1d,
    torch.nn.LazyConvTranspose2d: LazyConvTranspose2d,
    torch.nn.LazyConvTranspose3d: LazyConvTranspose3d,
}
"""The modules of torch's that have a counterpart here, and which. What is known, is known by this table."""

TORCHS: tuple[type[_ConvNd], ...] = tuple(OURS)
"""For ``isinstance``: any convolution that is, or could be, polyconv's."""
