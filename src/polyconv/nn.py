"""``Conv1d`` to ``Conv3d`` and their transposes: subclasses of ``torch.nn``'s modules that run polyconv's kernels.

They add no state: parameters, initialisation, state dict, repr and ``isinstance`` are torch's. So checkpoints load in
both directions, and :func:`polyconv.replace` swaps the class of a module in place. :data:`OURS` lists all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.modules.conv import _ConvNd

from .arguments import Extent, Padding, Policy, activation_name
from .dispatch import fastpath, operator_path
from .dispatch.op import FORWARD, TRANSPOSED
from .dispatch.passthrough import again
from .dispatch.transforms.interop import check_qconfig, refuse_scripting
from .problem import Tolerance
from .runtime.frozen_weights import is_frozen
from .settings import checked_tolerance

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class Fusion(Protocol):
    """An activation fused into a convolution that is valid only in training mode or only in evaluation mode."""

    def follow(self) -> None:
        """Suspend or resume the fusion after the mode of a module has changed."""


class Fold(Protocol):
    """A batch normalisation folded into the weight and bias of a convolution."""

    def operands(self, conv: Any) -> tuple[Tensor, Tensor | None]:
        """Weight and bias for a call of the convolution."""


class Convolution(_ConvNd):
    """Base class of polyconv's modules: tolerance, activation and the passthrough cache."""

    tolerance: Tolerance | None = None
    activation: str | None = None
    fusion: Fusion | None = None
    """Set by :func:`polyconv.optimize` if this module computes what other modules did."""
    fold: Fold | None = None
    """Set with ``fusion`` if normalisations are among these modules."""
    policy: Policy | None = None
    """Set by :func:`polyconv.replace`. None is ``"own"`` without warnings."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "qconfig":
            check_qconfig(value)
        super().__setattr__(name, value)
        if name == "training" and self.fusion is not None:
            self.fusion.follow()

    __prepare_scriptable__ = refuse_scripting

    @property
    def _comes_straight_here(self) -> bool:
        """Whether :meth:`forward` runs polyconv's own code only, on its parameters, as a passthrough requires."""
        return self.fold is None

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
        tolerance: Tolerance | None = None,
        activation: str | None = None,
    ) -> None:
        # torch's annotations allow neither lists nor all sides; its code passes both through to `self.padding`.
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
            # The argument of torch.nn.functional.pad, last axis first; torch's constructor assumes one number per axis.
            pairs = [self.padding[i : i + 2] for i in range(0, len(self.padding), 2)]
            self._reversed_padding_repeated_twice = [int(side) for pair in reversed(pairs) for side in pair]

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """``activation(conv(input) + bias + residual)``.

        Tools that wrap a module's forward keep this bound method even after the module's class changes. So without a
        residual it calls ``_conv_forward`` with the arguments that torch's has.
        """
        if residual is None and not is_dynamo_compiling() and (y := again(self, input)) is not None:
            return y
        # Another thread may restore the module meanwhile: torch's class has no fold.
        fold: Fold | None = getattr(self, "fold", None)
        weight, bias = (self.weight, self.bias) if fold is None else fold.operands(self)
        if residual is not None:
            return self._conv_forward(input, weight, bias, residual)
        return self._conv_forward(input, weight, bias)

    def _conv_forward(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None
    ) -> Tensor:
        op = FORWARD[len(self.kernel_size)]
        args = self.stride, self.padding, self.dilation, self.groups, self.padding_mode
        # Another thread may restore the module meanwhile: torch's class has none of these.
        options = getattr(self, "tolerance", None), getattr(self, "activation", None), residual
        policy = getattr(self, "policy", None)
        if is_compiling():
            return operator_path.call(op, input, weight, bias, args, *options, policy)
        module = self if getattr(self, "_comes_straight_here", False) else None
        return fastpath.call(op, input, weight, bias, args, *options, module, policy)

    @property
    def _comes_straight_here(self) -> bool:
        """Whether ``_conv_forward`` is the one above: overridden neither by a subclass nor on the instance."""
        straight = type(self)._conv_forward is _Forward._conv_forward and "_conv_forward" not in self.__dict__
        return straight and self.fold is None


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
        tolerance: Tolerance | None = None,
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
        """``output_size`` selects the output's extents among those that the stride allows."""
        if output_size is None and not is_dynamo_compiling() and (y := again(self, input)) is not None:
            return y
        fold: Fold | None = getattr(self, "fold", None)
        weight, bias = (self.weight, self.bias) if fold is None else fold.operands(self)
        if self.padding_mode != "zeros":
            raise ValueError(f"Only `zeros` padding mode is supported for {type(self).__name__}")
        op, output_padding = TRANSPOSED[len(self.kernel_size)], self.output_padding
        if output_size is not None:
            sizes: Any = self.stride, self.padding, self.kernel_size, op.rank, self.dilation
            output_padding = self._output_padding(input, list(output_size), *sizes)  # type: ignore[operator]
        padding: Any = self.padding  # never "same" or "valid" here
        args = self.stride, padding, tuple(output_padding), self.groups, self.dilation
        tolerance, policy = getattr(self, "tolerance", None), getattr(self, "policy", None)
        if is_compiling():
            return operator_path.call(op, input, weight, bias, args, tolerance, policy=policy)
        module = self if output_size is None else None
        return fastpath.call(op, input, weight, bias, args, tolerance, module=module, policy=policy)


def _keep_options(module: Convolution, tolerance: Tolerance | None, activation: str | None) -> None:
    """Set options as attributes of the module only if they are given: torch's modules have none."""
    if tolerance is not None:
        checked = checked_tolerance(tolerance)
        module.tolerance = "torch" if tolerance == "torch" else checked
    if activation is not None:
        module.activation = activation_name(activation)


def has_all_sides(module: Convolution) -> bool:
    """Whether the padding is given for each side, which torch's modules do not support."""
    return not isinstance(module.padding, str) and len(module.padding) == 2 * len(module.kernel_size)


class Conv1d(_Forward, torch.nn.Conv1d):
    """:class:`torch.nn.Conv1d` with the options of :class:`Conv2d`; ``padding`` may also be (left, right)."""


class Conv2d(_Forward, torch.nn.Conv2d):
    """:class:`torch.nn.Conv2d` with more options; ``padding`` may also be (top, bottom, left, right).

    Padding modes other than zeros make no padded copy of the input: the kernels compute the index. ``tolerance`` is the
    error budget of this module; None means that of :func:`polyconv.set_tolerance`. ``activation``
    (:func:`polyconv.conv2d` lists them) is applied before the output is stored, after the optional residual of
    :meth:`forward` is added.
    """


class Conv3d(_Forward, torch.nn.Conv3d):
    """:class:`torch.nn.Conv3d` with the options of :class:`Conv2d`; ``padding`` may also be all six sides."""


class ConvTranspose1d(_Transposed, torch.nn.ConvTranspose1d):
    """:class:`torch.nn.ConvTranspose1d` with the ``tolerance`` of :class:`ConvTranspose2d`."""


class ConvTranspose2d(_Transposed, torch.nn.ConvTranspose2d):
    """:class:`torch.nn.ConvTranspose2d` with an error budget, ``tolerance``; None: :func:`polyconv.set_tolerance`'s."""


class ConvTranspose3d(_Transposed, torch.nn.ConvTranspose3d):
    """:class:`torch.nn.ConvTranspose3d` with the ``tolerance`` of :class:`ConvTranspose2d`."""


class _LazyForward:
    """A convolution that takes in_channels from its first input."""

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
        tolerance: Tolerance | None = None,
        activation: str | None = None,
    ) -> None:
        sizes: Any = kernel_size, stride, padding, dilation
        made: Any = super()
        made.__init__(out_channels, *sizes, groups, bias, padding_mode, device, dtype)
        _keep_options(self, tolerance, activation)  # type: ignore[arg-type]


class _LazyTransposed:
    """A transposed convolution that takes in_channels from its first input."""

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
        tolerance: Tolerance | None = None,
    ) -> None:
        sizes: Any = kernel_size, stride, padding, output_padding
        made: Any = super()
        made.__init__(out_channels, *sizes, groups, bias, dilation, padding_mode, device, dtype)
        _keep_options(self, tolerance, None)  # type: ignore[arg-type]


class LazyConv1d(_LazyForward, torch.nn.LazyConv1d, Conv1d):  # type: ignore[misc]
    """:class:`torch.nn.LazyConv1d` that becomes a :class:`Conv1d` at its first input."""

    cls_to_become = Conv1d


class LazyConv2d(_LazyForward, torch.nn.LazyConv2d, Conv2d):  # type: ignore[misc]
    """:class:`torch.nn.LazyConv2d` that takes in_channels from its first input and becomes a :class:`Conv2d`."""

    cls_to_become = Conv2d


class LazyConv3d(_LazyForward, torch.nn.LazyConv3d, Conv3d):  # type: ignore[misc]
    """:class:`torch.nn.LazyConv3d` that becomes a :class:`Conv3d` at its first input."""

    cls_to_become = Conv3d


class LazyConvTranspose1d(_LazyTransposed, torch.nn.LazyConvTranspose1d, ConvTranspose1d):  # type: ignore[misc]
    """:class:`torch.nn.LazyConvTranspose1d` that becomes a :class:`ConvTranspose1d` at its first input."""

    cls_to_become = ConvTranspose1d  # type: ignore[assignment]


class LazyConvTranspose2d(_LazyTransposed, torch.nn.LazyConvTranspose2d, ConvTranspose2d):  # type: ignore[misc]
    """:class:`torch.nn.LazyConvTranspose2d` that becomes a :class:`ConvTranspose2d` at its first input."""

    cls_to_become = ConvTranspose2d  # type: ignore[assignment]


class LazyConvTranspose3d(_LazyTransposed, torch.nn.LazyConvTranspose3d, ConvTranspose3d):  # type: ignore[misc]
    """:class:`torch.nn.LazyConvTranspose3d` that becomes a :class:`ConvTranspose3d` at its first input."""

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
"""torch's module -> polyconv's counterpart: the only list of supported modules."""

TORCHS: tuple[type[_ConvNd], ...] = tuple(OURS)
"""Classes for ``isinstance``: any convolution that is, or could be, polyconv's."""
