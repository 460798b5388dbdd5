"""``conv1d`` to ``conv3d`` and the transposed ones: the arguments of ``torch.nn.functional``'s, and some beyond.

One implementation for any number of axes: what the functions differ in is :class:`Kind`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from . import ops
from .arguments import Extent, Geometry, Padding, activation_name, normalise, per_axis
from .compilation import written_out
from .exchange import check_tracer, refuse_scripting, to_onnx, to_torchscript, transposed_in_aten, written_in_aten
from .ops import shortcut
from .problem import AXES


class Kind(NamedTuple):
    """One of the functions below."""

    rank: int
    """The number of axes."""
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
    """A 1-D convolution. Takes what :func:`torch.nn.functional.conv1d` takes, and means the same by it.

    Everything is as in :func:`conv2d`, with one axis: (batch, in_channels, length), and two sides of padding,
    (left, right), beyond torch's forms.
    """
    args = input, weight, bias, stride, padding, dilation, groups, padding_mode, tolerance, activation, residual
    y = None if is_compiling() else shortcut.convolve(1, *args)
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
    """A 2-D convolution. Takes what :func:`torch.nn.functional.conv2d` takes, and means the same by it.

    Args:
        input: (batch, in_channels, height, width), or without the batch. Any strides in memory; never copied.
        weight: (out_channels, in_channels / groups, kernel height, kernel width).
        bias: out_channels numbers to add, or ``None``.
        stride, dilation: one integer, or (height, width).
        padding: one integer, (height, width), ``"same"``, ``"valid"``, or, beyond torch, the four sides
            (top, bottom, left, right). A negative side, in the four-sided form only, crops the image.
        groups: number of independent convolutions that the channels are split into.
        padding_mode: what stands outside the image: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``, as
            in ``torch.nn.Conv2d``. Where a side is negative the image is cropped first, then padded.
        tolerance: the error budget of this call and of its backward pass, instead of :func:`polyconv.set_tolerance`'s.
        activation: ``"relu"`` or ``"silu"``, applied to the sums before they are stored; ``None`` or ``"none"``: none.
        residual: a tensor of the output's size, dtype and device, added before the activation:
            ``activation(conv(input, weight) + bias + residual)``. Any strides; one that is not laid out as the output
            will be (channels_last if input or weight is) is copied into that layout first.

    Raises:
        RuntimeError, TypeError: where torch raises them.
    """
    args = input, weight, bias, stride, padding, dilation, groups, padding_mode, tolerance, activation, residual
    y = None if is_compiling() else shortcut.convolve(2, *args)
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
    """A 3-D convolution. Takes what :func:`torch.nn.functional.conv3d` takes, and means the same by it.

    Everything is as in :func:`conv2d`, with three axes: (batch, in_channels, depth, height, width), and six sides of
    padding, (front, back, top, bottom, left, right), beyond torch's forms.
    """
    args = input, weight, bias, stride, padding, dilation, groups, padding_mode, tolerance, activation, residual
    y = None if is_compiling() else shortcut.convolve(3, *args)
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
    """A transposed 1-D convolution. Takes what :func:`torch.nn.functional.conv_transpose1d` takes.

    Everything is as in :func:`conv_transpose2d`, with one axis: (batch, in_channels, length).
    """
    args = input, weight, bias, stride, padding, output_padding, groups, dilation, tolerance
    y = None if is_compiling() else shortcut.transpose(1, *args)
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
    """A transposed 2-D convolution. Takes what :func:`torch.nn.functional.conv_transpose2d` takes.

    It is the input gradient of a convolution, and computed by the kernels of that.

    Args:
        input: (batch, in_channels, height, width), or without the batch. Any strides in memory; never copied.
        weight: (in_channels, out_channels / groups, kernel height, kernel width).
        bias: out_channels numbers to add, or ``None``.
        stride, dilation: one integer, or (height, width): of the convolution whose input gradient this is.
        padding: one integer, or (height, width): what is left out at each end of the output.
        output_padding: one integer, or (height, width): how many outputs are added at the end.
        groups: number of independent convolutions that the channels are split into.
        tolerance: the error budget of this call and of its backward pass, instead of :func:`polyconv.set_tolerance`'s.

    Raises:
        RuntimeError, TypeError: where torch raises them.
    """
    args = input, weight, bias, stride, padding, output_padding, groups, dilation, tolerance
    y = None if is_compiling() else shortcut.transpose(2, *args)
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
    """A transposed 3-D convolution. Takes what :func:`torch.nn.functional.conv_transpose3d` takes.

    Everything is as in :func:`conv_transpose2d`, with three axes: (batch, in_channels, depth, height, width).
    """
    args = input, weight, bias, stride, padding, output_padding, groups, dilation, tolerance
    y = None if is_compiling() else shortcut.transpose(3, *args)
    return transposed_by_operator(3, *args) if y is None else y


FUNCTIONS: dict[Kind, Callable[..., Tensor]] = {
    Kind(1): conv1d,
    Kind(2): conv2d,
    Kind(3): conv3d,
    Kind(1, transposed=True): conv_transpose1d,
    Kind(2, transposed=True): conv_transpose2d,
    Kind(3, transposed=True): conv_transpose3d,
}
"""All of them."""

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
    """The call of a convolution over so many axes that autocast, transforms, modes and tracers see."""
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
        y = ops.fprop(input, weight, bias, *geometry, residual, applied)
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
    """The same of a transposed convolution."""
    kind = Kind(rank, transposed=True)
    numbers = stride, padding, output_padding, groups, dilation
    if not _are_tensors(input, weight, bias):
        return _without_tensors(kind, input, weight, bias, *numbers, tolerance=tolerance)
    input, weight, bias, tolerance = _announced(kind, input, weight, bias, tolerance)  # noqa: A001
    batched = input.dim() == rank + 2
    x = input if batched else input.unsqueeze(0)
    if to_onnx():
        y = transposed_in_aten(x, weight, bias, *numbers)
    elif to_torchscript():  # sizes are no numbers there: the operator computes that of the output when it runs
        names = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
        sizes = {name: per_axis(name, value, rank) for name, value in names.items()}
        y = ops.transposed(x, weight, bias, **sizes, groups=groups, tolerance=tolerance)
    else:
        geometry, (size, channels_last) = ops.transposed_layout(rank, x, weight, bias, *numbers, tolerance)
        y = ops.dgrad(x, weight, size, channels_last, *geometry, bias)
    return y if batched else y.squeeze(0)


def _are_tensors(input: object, weight: object, bias: object) -> bool:
    return isinstance(input, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))


def _announced(
    kind: Kind, input: Tensor, weight: Tensor, bias: Tensor | None, tolerance: float | None
) -> tuple[Tensor, Tensor, Tensor | None, float | None]:
    """What every call of an operator begins with: the settings are written out for tracers, dimensions are checked."""
    if is_compiling():
        input, weight, bias, tolerance = written_out(input, weight, bias, tolerance)  # noqa: A001
    else:
        ops.expect_dtensors()  # here, because inference mode passes by where the operators do so
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
    """What the operator cannot see: whether a residual is a tensor, with a batch where the input has one."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"{kind.name}(): argument 'residual' must be a Tensor, not {type(residual).__name__}")
    if residual.dim() != input.dim():
        raise RuntimeError(
            f"expected a residual with as many dimensions as the input of size {list(input.shape)}, "
            f"but got one of size {list(residual.shape)}"
        )


def _without_tensors(kind: Kind, *args: Any, **options: Any) -> Tensor:
    """A call in which something is no tensor: left to what stands for one (``torch.fx`` has such), else an error."""
    if has_torch_function(args[:3]):
        check_tracer(getattr(args[0], "tracer", None))
        result: Tensor = handle_torch_function(FUNCTIONS[kind], args[:3], *args, **options)
        return result
    for name, value in zip(("input", "weight", "bias"), args, strict=False):
        if not (isinstance(value, Tensor) or (name == "bias" and value is None)):
            raise TypeError(f"{kind.name}(): argument {name!r} must be a Tensor, not {type(value).__name__}")
    raise AssertionError("everything is a tensor")


def _crop(x: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """The part of the image that negative sides leave, as a view, and the padding that remains."""
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
