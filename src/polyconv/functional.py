"""``conv1d`` to ``conv3d`` and their transposes: the functions of ``torch.nn.functional`` with additional options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from . import dispatch
from .arguments import Extent, Geometry, Padding, activation_name, normalise, per_axis
from .dispatch import fastpath
from .dispatch.transforms.interop import (
    check_tracer,
    refuse_scripting,
    to_onnx,
    to_torchscript,
    transposed_in_aten,
    written_in_aten,
)
from .dispatch.transforms.torch_compile import written_out
from .problem import AXES


class Kind(NamedTuple):
    """One of the functions below: its number of axes, and whether it is transposed."""

    rank: int
    transposed: bool = False

    @property
    def name(self) -> str:
        return f"conv_transpose{self.rank}d" if self.transposed else f"conv{self.rank}d"


def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Padding = 0,
    dilation: Extent = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    tolerance: float | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A 1-D convolution: :func:`torch.nn.functional.conv1d` with the options of :func:`conv2d`.

    The input is (batch, in_channels, length); ``padding`` may also be (left, right).
    """
    args = input, weight, bias, stride, padding, dilation, groups, padding_mode, tolerance, activation, residual
    y = None if is_compiling() else fastpath.convolve(1, *args)
    return by_operator(1, *args) if y is None else y


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Padding = 0,
    dilation: Extent = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    tolerance: float | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A 2-D convolution: :func:`torch.nn.functional.conv2d` with additional options.

    Args:
        input: (batch, in_channels, height, width), or without the batch. Any strides in memory; never copied.
        weight: (out_channels, in_channels / groups, kernel height, kernel width).
        bias: out_channels numbers to add, or ``None``.
        stride, dilation: one integer, or (height, width).
        padding: one integer, (height, width), ``"same"``, ``"valid"``, or, beyond torch, the four sides
            (top, bottom, left, right). A negative side, in the four-sided form only, crops the image.
        groups: number of independent convolutions that the channels are split into.
        padding_mode: values outside the image: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``, as in
            ``torch.nn.Conv2d``. Negative sides crop the image before it is padded.
        tolerance: error budget of this call and of its backward pass, instead of :func:`polyconv.set_tolerance`'s.
        activation: ``"relu"`` or ``"silu"``, applied to the sums before they are stored; ``None`` or ``"none"``: none.
        residual: a tensor of the output's size, dtype and device, added before the activation:
            ``activation(conv(input, weight) + bias + residual)``. Any strides; if they differ from the output's
            (channels_last if input or weight is), the residual is copied into that layout first.

    Raises:
        RuntimeError, TypeError: where torch raises them.
    """
    args = input, weight, bias, stride, padding, dilation, groups, padding_mode, tolerance, activation, residual
    y = None if is_compiling() else fastpath.convolve(2, *args)
    return by_operator(2, *args) if y is None else y


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Padding = 0,
    dilation: Extent = 1,
    groups: int = 1,
    *,
    padding_mode: str = "zeros",
    tolerance: float | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """A 3-D convolution: :func:`torch.nn.functional.conv3d` with the options of :func:`conv2d`.

    The input is (batch, in_channels, depth, height, width); ``padding`` may also be (front, back, top, bottom, left,
    right).
    """
    args = input, weight, bias, stride, padding, dilation, groups, padding_mode, tolerance, activation, residual
    y = None if is_compiling() else fastpath.convolve(3, *args)
    return by_operator(3, *args) if y is None else y


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Extent = 0,
    output_padding: Extent = 0,
    groups: int = 1,
    dilation: Extent = 1,
    *,
    tolerance: float | None = None,
) -> Tensor:
    """A transposed 1-D convolution: as :func:`conv_transpose2d`, with an input of (batch, in_channels, length)."""
    args = input, weight, bias, stride, padding, output_padding, groups, dilation, tolerance
    y = None if is_compiling() else fastpath.transpose(1, *args)
    return transposed_by_operator(1, *args) if y is None else y


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Extent = 0,
    output_padding: Extent = 0,
    groups: int = 1,
    dilation: Extent = 1,
    *,
    tolerance: float | None = None,
) -> Tensor:
    """A transposed 2-D convolution: :func:`torch.nn.functional.conv_transpose2d` with an error budget.

    It is computed as the input gradient of a convolution, by the kernels of that pass.

    Args:
        input: (batch, in_channels, height, width), or without the batch. Any strides in memory; never copied.
        weight: (in_channels, out_channels / groups, kernel height, kernel width).
        bias: out_channels numbers to add, or ``None``.
        stride, dilation: one integer, or (height, width): of the convolution whose input gradient this is.
        padding: one integer, or (height, width): outputs left out at each end.
        output_padding: one integer, or (height, width): outputs added at the end.
        groups: number of independent convolutions that the channels are split into.
        tolerance: error budget of this call and of its backward pass, instead of :func:`polyconv.set_tolerance`'s.

    Raises:
        RuntimeError, TypeError: where torch raises them.
    """
    args = input, weight, bias, stride, padding, output_padding, groups, dilation, tolerance
    y = None if is_compiling() else fastpath.transpose(2, *args)
    return transposed_by_operator(2, *args) if y is None else y


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Extent = 1,
    padding: Extent = 0,
    output_padding: Extent = 0,
    groups: int = 1,
    dilation: Extent = 1,
    *,
    tolerance: float | None = None,
) -> Tensor:
    """A transposed 3-D convolution: as :func:`conv_transpose2d`, with (batch, in_channels, depth, height, width)."""
    args = input, weight, bias, stride, padding, output_padding, groups, dilation, tolerance
    y = None if is_compiling() else fastpath.transpose(3, *args)
    return transposed_by_operator(3, *args) if y is None else y


FUNCTIONS: dict[Kind, Callable[..., Tensor]] = {
    Kind(1): conv1d,
    Kind(2): conv2d,
    Kind(3): conv3d,
    Kind(1, transposed=True): conv_transpose1d,
    Kind(2, transposed=True): conv_transpose2d,
    Kind(3, transposed=True): conv_transpose3d,
}
"""The public functions by kind."""

for _function in FUNCTIONS.values():
    _function.__prepare_scriptable__ = refuse_scripting  # type: ignore[attr-defined]


def by_operator(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Extent,
    padding: Padding,
    dilation: Extent,
    groups: int,
    padding_mode: str,
    tolerance: float | None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Call a ``rank``-D convolution by the dispatcher, where autocast, transforms, modes and tracers see it."""
    kind = Kind(rank)
    if not _are_tensors(input, weight, bias):
        options = {"tolerance": tolerance, "activation": activation, "residual": residual}
        given = (input, weight, bias, stride, padding, dilation, groups)
        return _without_tensors(kind, *given, padding_mode=padding_mode, **options)
    input, weight, bias, tolerance = _announced(kind, input, weight, bias, tolerance)  # noqa: A001
    geometry = normalise(weight.shape[2:], stride, padding, dilation, groups, padding_mode, tolerance, rank=rank)
    exporting = to_onnx()
    if (padding_mode != "zeros" or exporting) and min(geometry.padding) < 0:
        input, geometry = _crop(input, geometry)  # noqa: A001
    applied = activation_name(activation)
    if residual is not None:
        _check_residual(kind, residual, input)
    batched = input.dim() == rank + 2
    if not batched:
        input = input.unsqueeze(0)  # noqa: A001
        residual = None if residual is None else residual.unsqueeze(0)
    if exporting:
        y = written_in_aten(input, weight, bias, residual, applied, geometry)
    else:
        y = dispatch.fprop(input, weight, bias, *geometry, residual, applied)
    return y if batched else y.squeeze(0)


def transposed_by_operator(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Extent,
    padding: Extent,
    output_padding: Extent,
    groups: int,
    dilation: Extent,
    tolerance: float | None,
) -> Tensor:
    """Call a transposed ``rank``-D convolution by the dispatcher."""
    kind = Kind(rank, transposed=True)
    numbers = stride, padding, output_padding, groups, dilation
    if not _are_tensors(input, weight, bias):
        return _without_tensors(kind, input, weight, bias, *numbers, tolerance=tolerance)
    input, weight, bias, tolerance = _announced(kind, input, weight, bias, tolerance)  # noqa: A001
    batched = input.dim() == rank + 2
    x = input if batched else input.unsqueeze(0)
    if to_onnx():
        y = transposed_in_aten(x, weight, bias, *numbers)
    elif to_torchscript():  # sizes are not ints there: the operator computes the output's size when it runs
        names = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
        sizes = {name: per_axis(name, value, rank) for name, value in names.items()}
        y = dispatch.transposed(x, weight, bias, **sizes, groups=groups, tolerance=tolerance)
    else:
        geometry, (size, channels_last) = dispatch.transposed_layout(rank, x, weight, bias, *numbers, tolerance)
        y = dispatch.dgrad(x, weight, size, channels_last, *geometry, bias)
    return y if batched else y.squeeze(0)


def _are_tensors(input: object, weight: object, bias: object) -> bool:
    return isinstance(input, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))


def _announced(
    kind: Kind, input: Tensor, weight: Tensor, bias: Tensor | None, tolerance: float | None
) -> tuple[Tensor, Tensor, Tensor | None, float | None]:
    """Check the dimensions. While compiling, write the settings' tolerance and autocast's casts into the graph."""
    if is_compiling():
        input, weight, bias, tolerance = written_out(input, weight, bias, tolerance)  # noqa: A001
    else:
        dispatch.expect_dtensors()  # here too, because inference mode bypasses the autograd kernels that call it
    dims = kind.rank + 2
    if input.dim() not in (dims - 1, dims):
        raise RuntimeError(
            f"Expected {dims - 1}D (unbatched) or {dims}D (batched) input to {kind.name}, "
            f"but got input of size: {list(input.shape)}"
        )
    if weight.dim() != dims:
        given = weight.dim()
        rule = f"Expected {given}-dimensional input for {given}-dimensional weight"
        if kind.rank == 1 and given < dims:
            rule = "weight should have at least three dimensions"
        channels = "in_channels, out_channels" if kind.transposed else "out_channels, in_channels"
        raise RuntimeError(
            f"{rule}, and for {kind.name} a {dims}-dimensional weight ({channels}/groups, "
            f"{', '.join(AXES[kind.rank])}); got weight of size {list(weight.shape)}"
        )
    return input, weight, bias, tolerance


def _check_residual(kind: Kind, residual: object, input: Tensor) -> None:
    """Raise unless the residual is a tensor that has a batch if the input has one, which the operator cannot tell."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"{kind.name}(): argument 'residual' must be a Tensor, not {type(residual).__name__}")
    if residual.dim() != input.dim():
        raise RuntimeError(
            f"expected a residual with as many dimensions as the input of size {list(input.shape)}, "
            f"but got one of size {list(residual.shape)}"
        )


def _without_tensors(kind: Kind, *args: Any, **options: Any) -> Tensor:
    """Handle a non-tensor argument: defer to ``__torch_function__`` (as of a ``torch.fx`` proxy), else raise."""
    if has_torch_function(args[:3]):
        check_tracer(getattr(args[0], "tracer", None))
        result: Tensor = handle_torch_function(FUNCTIONS[kind], args[:3], *args, **options)
        return result
    for name, value in zip(("input", "weight", "bias"), args, strict=False):
        if not (isinstance(value, Tensor) or (name == "bias" and value is None)):
            raise TypeError(f"{kind.name}(): argument {name!r} must be a Tensor, not {type(value).__name__}")
    raise AssertionError("everything is a tensor")


def _crop(x: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """Apply negative padding: a view of the cropped image, and the geometry with the remaining padding."""
    names = AXES[len(geometry.stride)]
    for axis, name in enumerate(names):
        dim, (before, after) = axis - len(names), geometry.padding[2 * axis : 2 * axis + 2]
        size = x.shape[dim]
        start, stop = max(-before, 0), size - max(-after, 0)
        if start > stop:
            raise RuntimeError(
                f"negative padding crops more than there is: {before} and {after} along a {name} of {size}"
            )
        x = x.narrow(dim, start, stop - start)
    return x, geometry._replace(padding=tuple(max(side, 0) for side in geometry.padding))
