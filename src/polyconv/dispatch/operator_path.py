"""Operator path: a call through PyTorch's dispatcher, where autocast, transforms, modes and tracers see it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from ..arguments import activation_name, normalise, per_axis
from ..problem import AXES, Tolerance
from ..settings import checked_tolerance
from .op import PUBLIC, Args, Op
from .operands import transposed_layout
from .schema import dgrad, fprop, transposed
from .transforms.dtensor_import import expect_dtensors
from .transforms.interop import check_tracer, to_onnx, to_torchscript, transposed_in_aten, written_in_aten
from .transforms.torch_compile import written_out


def call(
    op: Op,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    args: Args,
    tolerance: Tolerance | None,
    activation: str | None = None,
    residual: Tensor | None = None,
    policy: str | None = None,
) -> Tensor:
    """Call a convolution by the dispatcher. Arguments as for :func:`polyconv.dispatch.fastpath.call`."""
    if not (isinstance(x, Tensor) and isinstance(w, Tensor) and (bias is None or isinstance(bias, Tensor))):
        return _without_tensors(op, (x, w, bias), args, tolerance, activation, residual)
    number = None if tolerance is None else checked_tolerance(tolerance)
    x, w, bias, tolerance = _announced(op, x, w, bias, number)
    if residual is not None:
        _check_residual(op, residual, x)
    batched = x.dim() == op.rank + 2
    if not batched:
        x = x.unsqueeze(0)
        residual = None if residual is None else residual.unsqueeze(0)
    if op.transposed:
        y = _transposed(op, x, w, bias, args, tolerance, policy)
    else:
        y = _forward(op, x, w, bias, args, tolerance, activation, residual, policy)
    return y if batched else y.squeeze(0)


def _forward(
    op: Op,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    args: Args,
    tolerance: float | None,
    activation: str | None,
    residual: Tensor | None,
    policy: str | None,
) -> Tensor:
    geometry, applied = normalise(w.shape[2:], *args, tolerance, rank=op.rank), activation_name(activation)
    if to_onnx():
        return written_in_aten(op.aten, x, w, bias, residual, applied, geometry)
    return fprop(x, w, bias, *geometry.under_policy(policy), residual, applied)


def _transposed(
    op: Op, x: Tensor, w: Tensor, bias: Tensor | None, args: Args, tolerance: float | None, policy: str | None
) -> Tensor:
    if to_onnx():
        return transposed_in_aten(op.aten, x, w, bias, *args)
    if to_torchscript():  # sizes are not ints there: the operator computes the output's size when it runs
        stride, padding, output_padding, groups, dilation = args
        names = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
        sizes = {name: per_axis(name, value, op.rank) for name, value in names.items()}
        return transposed(x, w, bias, **sizes, groups=groups, tolerance=tolerance)
    geometry, (size, channels_last) = transposed_layout(op.rank, x, w, bias, *args, tolerance)
    return dgrad(x, w, size, channels_last, *geometry.under_policy(policy), bias)


def _announced(
    op: Op, x: Tensor, w: Tensor, bias: Tensor | None, tolerance: float | None
) -> tuple[Tensor, Tensor, Tensor | None, float | None]:
    """Check the dimensions. While compiling, write the settings' tolerance and autocast's casts into the graph."""
    if is_compiling():
        x, w, bias, tolerance = written_out(x, w, bias, tolerance)
    else:
        expect_dtensors()  # here too, because inference mode bypasses the autograd kernels that call it
    dims = op.rank + 2
    if x.dim() not in (dims - 1, dims):
        raise RuntimeError(
            f"Expected {dims - 1}D (unbatched) or {dims}D (batched) input to {op.name}, "
            f"but got input of size: {list(x.shape)}"
        )
    if w.dim() != dims:
        given = w.dim()
        rule = f"Expected {given}-dimensional input for {given}-dimensional weight"
        if op.rank == 1 and given < dims:
            rule = "weight should have at least three dimensions"
        channels = "in_channels, out_channels" if op.transposed else "out_channels, in_channels"
        raise RuntimeError(
            f"{rule}, and for {op.name} a {dims}-dimensional weight ({channels}/groups, "
            f"{', '.join(AXES[op.rank])}); got weight of size {list(w.shape)}"
        )
    return x, w, bias, tolerance


def _check_residual(op: Op, residual: object, x: Tensor) -> None:
    """Raise unless the residual is a tensor that has a batch if the input has one, which the operator cannot tell."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"{op.name}(): argument 'residual' must be a Tensor, not {type(residual).__name__}")
    if residual.dim() != x.dim():
        raise RuntimeError(
            f"expected a residual with as many dimensions as the input of size {list(x.shape)}, "
            f"but got one of size {list(residual.shape)}"
        )


def _without_tensors(
    op: Op,
    tensors: tuple[Any, ...],
    args: Args,
    tolerance: Tolerance | None,
    activation: str | None,
    residual: Tensor | None,
) -> Tensor:
    """Handle a non-tensor argument: defer to ``__torch_function__`` (as of a ``torch.fx`` proxy), else raise."""
    if has_torch_function(tensors):
        check_tracer(getattr(tensors[0], "tracer", None))
        options: dict[str, Any] = {"tolerance": tolerance}
        if not op.transposed:
            options |= {"padding_mode": args[-1], "activation": activation, "residual": residual}
        given = args if op.transposed else args[:-1]
        result: Tensor = handle_torch_function(PUBLIC[op], tensors, *tensors, *given, **options)
        return result
    for name, value in zip(("input", "weight", "bias"), tensors, strict=True):
        if not (isinstance(value, Tensor) or (name == "bias" and value is None)):
            raise TypeError(f"{op.name}(): argument {name!r} must be a Tensor, not {type(value).__name__}")
    raise AssertionError("everything is a tensor")
