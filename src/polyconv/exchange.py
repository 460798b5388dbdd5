"""What tools that carry a model elsewhere make of a convolution of polyconv's.

They know a module by its type, or an operator by its name, and those of polyconv mean nothing to them. Where they can
be given what they know, they are: an ONNX file holds a Conv, with a Pad where one is needed. Where they cannot, and
would stop in words of their own or leave a module out without any, the words here say what to do.
"""

from __future__ import annotations

import sys
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
    device = x.device.type
    if torch.is_autocast_enabled(device) and not settings.follows_autocast(device):
        with torch.autocast(device, enabled=False):  # or ATen's convolution would lower the precision
            b, r = (None if t is None else _widened(t) for t in (bias, residual))
            return _written(_widened(x), _widened(w), b, r, activation, geometry)
    return _written(x, w, bias, residual, activation, geometry)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _written(
    x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, geometry: Geometry
) -> Tensor:
    top, bottom, left, right = geometry.padding
    padding = (top, left)
    if any(geometry.padding) and not (geometry.padding_mode == "zeros" and (top, left) == (bottom, right)):
        mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
        x, padding = F.pad(x, (left, right, top, bottom), mode=mode), (0, 0)
    y = F.conv2d(x, w, bias, geometry.stride, padding, geometry.dilation, geometry.groups)
    if residual is not None:
        y = y + residual
    return {"relu": F.relu, "silu": F.silu}.get(activation, lambda z: z)(y)


# ---- TorchScript


def refuse_scripting(*_: object) -> NoReturn:
    """What ``torch.jit.script`` finds as ``__prepare_scriptable__``."""
    raise ExchangeError(
        "torch.jit.script cannot compile polyconv's convolutions, whose plans are made in Python. "
        "torch.jit.trace(model, inputs) records them; or polyconv.restore(model) first, and script torch.nn.Conv2d"
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
        "torch.ao.quantization knows torch.nn.Conv2d by its type, and would leave polyconv's in float without a word. "
        "Call polyconv.restore(model) first; polyconv.replace takes what is still in float afterwards"
    )
