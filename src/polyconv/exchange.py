"""What tools that carry a model elsewhere make of a convolution of polyconv's.

They know a module by its type, or an operator by its name, and those of polyconv mean nothing to them. Where they can
be given what they know, they are: an ONNX file holds a Conv, with a Pad where one is needed. Where they cannot, and
would stop in words of their own or leave a module out without any, the words here say what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from . import settings
from .arguments import Geometry


class ExchangeError(RuntimeError):
    """A tool of torch's that cannot take polyconv's modules. The message says what to do."""


# ---- ONNX


def to_onnx() -> bool:
    """Whether the call is traced for an ONNX file, by either of torch's exporters."""
    if not (torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()):
        return False  # not asked of torch.onnx, which would begin to import things: a fork must not meet that in a call
    onnx: Any = sys.modules.get("torch.onnx")  # imported by the first export, and not by torch
    return onnx is not None and bool(onnx.is_in_onnx_export())


# What torch.compiler.assume_constant_result does: the compiler asks while it traces.
to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def written_in_aten(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, geometry: Geometry
) -> Tensor:
    """The same convolution, of an image that is cropped already, in operators that every exporter knows."""
    return _in_full_precision(
        lambda x, w, bias, residual: _written(x, w, bias, residual, activation, geometry), x, w, bias, residual
    )


def transposed_in_aten(x: Tensor, w: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    """The same transposed convolution, whose arguments torch checks as well."""
    transpose: Any = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[w.dim()]
    return _in_full_precision(lambda x, w, bias: transpose(x, w, bias, *numbers), x, w, bias)


def _in_full_precision(write: Callable[..., Tensor], x: Tensor, *others: Tensor | None) -> Tensor:
    """What polyconv's operators do in an autocast region, which ATen's would follow."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and not settings.follows_autocast(device):
        with torch.autocast(device, enabled=False):  # or ATen's convolution would lower the precision
            return write(*(None if tensor is None else _widened(tensor) for tensor in (x, *others)))
    return write(x, *others)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _written(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, geometry: Geometry
) -> Tensor:
    before, after = geometry.padding[::2], geometry.padding[1::2]
    padding = before
    if any(geometry.padding) and not (geometry.padding_mode == "zeros" and before == after):
        mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
        sides = [side for pair in reversed(list(zip(before, after, strict=True))) for side in pair]
        x, padding = F.pad(x, sides, mode=mode), tuple(0 for _ in before)
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(before)]
    y = convolve(x, w, bias, geometry.stride, padding, geometry.dilation, geometry.groups)
    if residual is not None:
        y = y + residual
    return {"relu": F.relu, "silu": F.silu}.get(activation, lambda z: z)(y)


# ---- TorchScript


def to_torchscript() -> bool:
    """Whether the call is recorded by ``torch.jit.trace``, to which sizes are tensors that no number may be made of."""
    return torch._C._get_tracing_state() is not None


to_torchscript._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_scripting(*_: object) -> NoReturn:
    """What ``torch.jit.script`` finds as ``__prepare_scriptable__``."""
    raise ExchangeError(
        "torch.jit.script cannot compile polyconv's convolutions, whose plans are made in Python. "
        "torch.jit.trace(model, inputs) records them; or polyconv.restore(model) first, and script torch's modules"
    )


# ---- quantisation


def check_qconfig(qconfig: object) -> None:
    """Refuse to be prepared, module by module, for a conversion that would leave the module out."""
    if qconfig is not None:
        _would_stay_in_float()


def check_tracer(tracer: object) -> None:
    """The same for a whole graph, which ``prepare_fx`` is tracing."""
    if any(kind.__name__ == "QuantizationTracer" for kind in type(tracer).__mro__):
        _would_stay_in_float()


def _would_stay_in_float() -> NoReturn:
    raise ExchangeError(
        "torch.ao.quantization knows torch's convolutions by their type, and would leave polyconv's in float without a "
        "word. "
        "Call polyconv.restore(model) first; polyconv.replace takes what is still in float afterwards"
    )
