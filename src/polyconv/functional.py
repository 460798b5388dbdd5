"""``conv2d``: the arguments of ``torch.nn.functional.conv2d``, two more forms of padding, and an epilogue."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from . import ops
from .arguments import Extent, Geometry, Padding, activation_name, normalise
from .compilation import written_out
from .exchange import check_tracer, refuse_scripting, to_onnx, written_in_aten
from .ops import shortcut


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
    y = None if is_compiling() else shortcut.conv2d(*args)
    return by_operator(*args) if y is None else y


conv2d.__prepare_scriptable__ = refuse_scripting  # type: ignore[attr-defined]


def by_operator(
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
    """The call that autocast, transforms, modes and tracers see."""
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))):
        options = {"tolerance": tolerance, "activation": activation, "residual": residual}
        given = (input, weight, bias, stride, padding, dilation, groups)
        return _without_tensors(*given, padding_mode=padding_mode, **options)
    if is_compiling():
        input, weight, bias, tolerance = written_out(input, weight, bias, tolerance)  # noqa: A001
    else:
        ops.expect_dtensors()  # here, because inference mode passes by where the operators do so
    if input.dim() not in (3, 4):
        raise RuntimeError(
            f"Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: {list(input.shape)}"
        )
    if weight.dim() != 4:
        raise RuntimeError(
            f"Expected 3-dimensional input for 3-dimensional weight, and for conv2d a 4-dimensional weight "
            f"(out_channels, in_channels/groups, height, width); got weight of size {list(weight.shape)}"
        )
    geometry = normalise(weight.shape[2:], stride, padding, dilation, groups, padding_mode, tolerance)
    exporting = to_onnx()
    if (padding_mode != "zeros" or exporting) and min(geometry.padding) < 0:
        input, geometry = _crop(input, geometry)  # noqa: A001
    applied = activation_name(activation)
    if residual is not None:
        _check_residual(residual, input)
    batched = input.dim() == 4
    if not batched:
        input = input.unsqueeze(0)  # noqa: A001
        residual = None if residual is None else residual.unsqueeze(0)
    if exporting:
        y = written_in_aten(input, weight, bias, residual, applied, geometry)
    else:
        y = ops.fprop(input, weight, bias, *geometry, residual, applied)
    return y if batched else y.squeeze(0)


def _check_residual(residual: object, input: Tensor) -> None:
    """What the operator cannot see: whether a residual is a tensor, with a batch where the input has one."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"conv2d(): argument 'residual' must be a Tensor, not {type(residual).__name__}")
    if residual.dim() != input.dim():
        raise RuntimeError(
            f"expected a residual with as many dimensions as the input of size {list(input.shape)}, "
            f"but got one of size {list(residual.shape)}"
        )


def _without_tensors(*args: Any, **options: Any) -> Tensor:
    """A call in which something is no tensor: left to what stands for one (``torch.fx`` has such), else an error."""
    if has_torch_function(args[:3]):
        check_tracer(getattr(args[0], "tracer", None))
        result: Tensor = handle_torch_function(conv2d, args[:3], *args, **options)
        return result
    for name, value in zip(("input", "weight", "bias"), args, strict=False):
        if not (isinstance(value, Tensor) or (name == "bias" and value is None)):
            raise TypeError(f"conv2d(): argument {name!r} must be a Tensor, not {type(value).__name__}")
    raise AssertionError("everything is a tensor")


def _crop(x: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """The part of the image that negative sides leave, as a view, and the padding that remains."""
    for axis in (0, 1):
        dim, (before, after) = axis - 2, geometry.padding[2 * axis : 2 * axis + 2]
        size = x.shape[dim]
        start, stop = max(-before, 0), size - max(-after, 0)
        if start > stop:
            name = ("height", "width")[axis]
            raise RuntimeError(
                f"negative padding crops more than there is: {before} and {after} along a {name} of {size}"
            )
        x = x.narrow(dim, start, stop - start)
    top, bottom, left, right = (max(side, 0) for side in geometry.padding)
    return x, geometry._replace(padding=(top, bottom, left, right))
