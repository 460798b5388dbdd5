"""Interoperation with tools that convert a model: ONNX, TorchScript, quantisation.

These tools identify a module by its type or an operator by its name, and do not know polyconv's. Where possible they
get ATen operators: an ONNX file holds a Conv, with a Pad if needed. Otherwise they would fail with an unclear message
or skip a module silently, and an :class:`ExchangeError` says what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import settings
from ...activation import Activation
from ...arguments import Geometry


class ExchangeError(RuntimeError):
    """A tool of torch cannot convert polyconv's modules. The message says what to do."""


# ---- ONNX


def to_onnx() -> bool:
    """Whether the call is traced for ONNX, by either of torch's exporters."""
    if not (torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()):
        return False  # without calling torch.onnx, which imports lazily: not fork-safe within a call
    onnx: Any = sys.modules.get("torch.onnx")  # imported by the first export, not by torch
    return onnx is not None and bool(onnx.is_in_onnx_export())


# What torch.compiler.assume_constant_result does: the compiler calls it while tracing.
to_onnx._dynamo_marked_constant = True  # type: ignore[attr-defined]


def written_in_aten(
    aten: Callable[..., Tensor],
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    geometry: Geometry,
) -> Tensor:
    """The convolution in ATen operators, which every exporter knows."""
    return _in_full_precision(
        lambda x, w, bias, residual: _written(aten, x, w, bias, residual, activation, geometry), x, w, bias, residual
    )


def transposed_in_aten(aten: Callable[..., Tensor], x: Tensor, w: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """The transposed convolution in ATen operators. torch checks the arguments."""
    return _in_full_precision(lambda x, w, bias: aten(x, w, bias, *args), x, w, bias)


def _in_full_precision(write: Callable[..., Tensor], x: Tensor, *others: Tensor | None) -> Tensor:
    """Call ``write`` in float32 where polyconv's operators do not follow autocast, but ATen's would."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and not settings.follows_autocast(device):
        with torch.autocast(device, enabled=False):
            return write(*(None if tensor is None else _widened(tensor) for tensor in (x, *others)))
    return write(x, *others)


def _widened(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _written(
    aten: Callable[..., Tensor],
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    geometry: Geometry,
) -> Tensor:
    before, after = geometry.padding[::2], geometry.padding[1::2]
    padding = before
    if min(geometry.padding) < 0 or ((before != after or geometry.padding_mode != "zeros") and any(geometry.padding)):
        mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
        pairs = list(zip(before, after, strict=True))
        for dim, (first, last) in enumerate(pairs, start=2):  # a border follows the crop
            x = x.narrow(dim, max(-first, 0), x.shape[dim] - max(-first, 0) - max(-last, 0))
        sides = [max(side, 0) for pair in reversed(pairs) for side in pair]
        x, padding = F.pad(x, sides, mode=mode) if any(sides) else x, tuple(0 for _ in before)
    y = aten(x, w, bias, geometry.stride, padding, geometry.dilation, geometry.groups)
    if residual is not None:
        y = y + residual
    return Activation(activation)(y)


# ---- TorchScript


def to_torchscript() -> bool:
    """Whether ``torch.jit.trace`` records the call: sizes are tensors then, and must not be converted to ints."""
    return torch._C._get_tracing_state() is not None


to_torchscript._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_scripting(*_: object) -> NoReturn:
    """``__prepare_scriptable__`` hook of ``torch.jit.script``: raises :class:`ExchangeError`."""
    raise ExchangeError(
        "torch.jit.script cannot compile polyconv's convolutions, whose plans are made in Python. "
        "torch.jit.trace(model, inputs) records them; or polyconv.restore(model) first, and script torch's modules"
    )


# ---- quantisation


def check_qconfig(qconfig: object) -> None:
    """Reject eager-mode quantisation, which would skip the module."""
    if qconfig is not None:
        _would_stay_in_float()


def check_tracer(tracer: object) -> None:
    """Reject graph-mode quantisation, by the tracer of ``prepare_fx``."""
    if any(kind.__name__ == "QuantizationTracer" for kind in type(tracer).__mro__):
        _would_stay_in_float()


def _would_stay_in_float() -> NoReturn:
    raise ExchangeError(
        "torch.ao.quantization knows torch's convolutions by their type, and would leave polyconv's in float without a "
        "word. "
        "Call polyconv.restore(model) first; polyconv.replace takes what is still in float afterwards"
    )
