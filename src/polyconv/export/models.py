"""The modules that an exported file can hold: KernelBench's, with their constructors, and any ``nn.Conv2d``."""

from __future__ import annotations

import importlib
import operator
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..arguments import Geometry, normalise, per_axis
from ..measure.workloads import entries
from ..nn import Conv2d
from ..problem import Problem

_ARGUMENTS = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
)


class ExportError(ValueError):
    """What was asked for cannot be exported; the message says why."""


@dataclass(frozen=True)
class Layer:
    """One convolution of a module."""

    attribute: str
    arguments: str
    """What ``Conv2d`` is called with, in terms of the constructor's arguments."""
    problem: Problem
    """Its forward pass on the exported input."""


@dataclass(frozen=True)
class Model:
    """A module to export."""

    title: str
    command: str
    """Arguments of ``polyconv export`` that ask for it."""
    signature: tuple[str, ...]
    """Parameters of the constructor, as they are written."""
    init_inputs: str
    inputs: tuple[int, int, int, int]
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class _Constructor:
    """How a KernelBench problem is constructed: its parameters, and the arguments of each convolution."""

    signature: tuple[str, ...]
    layers: dict[str, str]
    init_inputs: str


def _dense(init_inputs: str, zero: str = "0", one: str = "1") -> _Constructor:
    parameters = ("in_channels", "out_channels", "kernel_size", f"stride={one}", f"padding={zero}", f"dilation={one}")
    return _Constructor(
        (*parameters, "groups=1", "bias=False"),
        {"conv2d": "in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias"},
        init_inputs,
    )


_KERNELBENCH = {
    "kb50": _Constructor(("num_classes=1000",), {"conv1": "3, 96, kernel_size=11, stride=4, padding=2"}, "[1000]"),
    "kb55": _dense("[64, 128, 3]"),
    "kb56": _dense("[64, 128, (5, 7)]", "(0, 0)", "(1, 1)"),
    "kb62": _dense("[32, 64, (5, 9)]"),
    "kb63": _dense("[16, 128, 3]"),
    "kb80": _Constructor(
        (
            *("in_channels", "out_channels", "kernel_size", "stride=1", "padding=(0, 0)", "dilation=(1, 1)"),
            *("bias=False", "*", "groups=1"),
        ),
        {"conv2d": "in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias"},
        "[32, 64, (5, 9), 1, (2, 4), (2, 3)]",
    ),
    "kb82": _Constructor(
        ("in_channels", "kernel_size", "stride=1", "padding=0", "bias=False"),
        {"conv2d": "in_channels, in_channels, kernel_size, stride, padding, groups=in_channels, bias=bias"},
        "[64, 3, 1, 0]",
    ),
    "kb83": _Constructor(
        ("in_channels", "kernel_size", "stride=1", "padding=0", "dilation=1", "bias=False"),
        {"conv2d": "in_channels, in_channels, (kernel_size, 1), stride, padding, dilation, in_channels, bias"},
        "[8, 3, 1, 0, 1]",
    ),
    "kb84": _Constructor(
        ("in_channels", "out_channels", "kernel_size", "stride=1", "padding=0", "bias=False"),
        {"conv2d": "in_channels, out_channels, kernel_size, stride, padding, groups=in_channels, bias=bias"},
        "[128, 128, 3, 1, 0]",
    ),
    "kb85": _Constructor(
        (
            *("in_channels", "out_channels", "kernel_size_h", "kernel_size_w", "stride_h=1", "stride_w=1"),
            *("padding_h=0", "padding_w=0", "dilation_h=1", "dilation_w=1", "groups=1", "bias=False"),
        ),
        {
            # KernelBench's module disregards `out_channels` and `groups`.
            "conv2d": "in_channels, in_channels, (kernel_size_h, kernel_size_w), (stride_h, stride_w), "
            "(padding_h, padding_w), (dilation_h, dilation_w), in_channels, bias"
        },
        "[128, 128, 3, 7, 1, 1, 0, 0, 1, 1, 128]",
    ),
    "kb86": _Constructor(
        ("in_channels", "out_channels", "kernel_size", "stride=1", "padding=0", "dilation=1", "bias=False"),
        {
            "depthwise": "in_channels, in_channels, kernel_size, stride, padding, dilation, in_channels, bias",
            "pointwise": "in_channels, out_channels, 1, bias=bias",
        },
        "[64, 128, 3, 1, 1, 1]",
    ),
    "kb87": _Constructor(
        ("in_channels", "out_channels", "bias=False"),
        {"conv1d": "in_channels, out_channels, 1, bias=bias"},
        "[64, 128]",
    ),
}
_SEPARABLE_OUTPUTS = 128
"""Output channels of the 1x1 convolution that follows in kb86."""


def named_model(name: str) -> Model:
    """The module of a named workload."""
    known = entries()
    if name not in known:
        raise ExportError(f"there is no Conv2d workload {name!r}; known are {', '.join(known)}")
    w = known[name]
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias")
    arguments = {key: w[key] for key in names if key != "in_channels"}
    model = conv2d_model(w["input"], in_channels=w["input"][1], **arguments)
    constructor = _KERNELBENCH.get(name)
    if constructor is None:
        return replace(model, title=f"{name}: {model.title}", command=name)
    problems = [model.layers[0].problem]
    if len(constructor.layers) == 2:
        first = problems[0]
        w_shape = (_SEPARABLE_OUTPUTS, first.out_channels, 1, 1)
        problems.append(Problem.make("fprop", first.y_shape, w_shape, bias=first.bias))
    layers = (
        Layer(attribute, text, problem)
        for (attribute, text), problem in zip(constructor.layers.items(), problems, strict=True)
    )
    return replace(
        model,
        title=f"KernelBench level 1, problem {name.removeprefix('kb')}",
        command=name,
        signature=constructor.signature,
        init_inputs=constructor.init_inputs,
        layers=tuple(layers),
    )


def conv2d_model(
    input: tuple[int, int, int, int],
    *,
    in_channels: int,
    out_channels: int,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    bias: bool = True,
    padding_mode: str = "zeros",
) -> Model:
    """A module that holds one ``nn.Conv2d``, with its constructor."""
    n, c, height, width = input
    if c != in_channels:
        raise ExportError(f"an input of {c} channels does not fit in_channels={in_channels}")
    if in_channels % groups or out_channels % groups:
        raise ExportError(
            f"{in_channels} input and {out_channels} output channels cannot be split into {groups} groups"
        )
    kernel = per_axis("kernel_size", kernel_size, 2)
    geometry: Geometry = normalise(kernel, stride, padding, dilation, groups, padding_mode)
    if padding_mode != "zeros" and min(geometry.padding) < 0:
        raise ExportError("negative padding can be exported with padding_mode='zeros' only")
    w_shape = (out_channels, in_channels // groups, *kernel)
    x_shape = (n, c, height, width)
    problem = Problem.make(
        "fprop",
        x_shape,
        w_shape,
        stride=geometry.stride,
        padding=geometry.padding,
        dilation=geometry.dilation,
        groups=groups,
        padding_mode=padding_mode,
        bias=bias,
    )
    if min(problem.y_shape) < 1:
        raise ExportError(f"nothing to compute: the output would have the shape {problem.y_shape}")
    values = {
        "in_channels": in_channels,
        "out_channels": out_channels,
        "kernel_size": _plain(kernel_size),
        "stride": _plain(stride),
        "padding": _plain(padding),
        "dilation": _plain(dilation),
        "groups": groups,
        "bias": bias,
        "padding_mode": padding_mode,
    }
    defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": True, "padding_mode": "zeros"}
    return Model(
        title=str(problem).removeprefix("fprop "),
        command=_command(x_shape, values, defaults),
        signature=tuple(f"{name}={_literal(defaults[name])}" if name in defaults else name for name in values),
        init_inputs=f"[{', '.join(map(_literal, values.values()))}]",
        inputs=x_shape,
        layers=(Layer("conv2d", ", ".join(values), problem),),
    )


def imported_model(name: str, input: tuple[int, int, int, int]) -> Model:
    """A ``Conv2d`` of the user's, or a ``Sequential`` of them, by where it is imported from: ``module:attribute``.

    A function or a class there is called without arguments.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ExportError(f"{name!r} names no attribute: write PACKAGE.MODULE:ATTRIBUTE")
    sys.path.insert(0, "")  # as for python -m: what lies in the current folder can be imported
    try:
        found: Any = operator.attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ExportError(f"{name} cannot be imported: {error}") from error
    finally:
        sys.path.remove("")
    made = found if isinstance(found, torch.nn.Module) else found() if callable(found) else found
    convolutions = dict(made.named_children()) if isinstance(made, torch.nn.Sequential) else {"conv2d": made}
    if not convolutions:
        raise ExportError(f"{name} is empty: a Conv2d, or a Sequential of them, can be exported")
    layers: list[Layer] = []
    n, c, height, width = input
    for number, (key, conv) in enumerate(convolutions.items()):
        if type(conv) not in (torch.nn.Conv2d, Conv2d):  # what a class of the user's computes is not known
            kind = type(conv).__name__
            raise ExportError(f"{name} holds a {kind}: a Conv2d, or a Sequential of them, can be exported")
        if getattr(conv, "activation", None) is not None:
            raise ExportError(f"{name} holds a Conv2d with the activation {conv.activation!r}: leave it to a module")
        arguments = {key: _plain(getattr(conv, key)) for key in _ARGUMENTS} | {"bias": conv.bias is not None}
        problem = conv2d_model((n, c, height, width), **arguments).layers[0].problem
        written = ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())
        layers.append(Layer(key if key.isidentifier() else f"conv{number}", written, problem))
        n, c, height, width = problem.y_shape
    return Model(
        title=f"{name}: {'; '.join(str(layer.problem).removeprefix('fprop ') for layer in layers)}",
        command=f"--from {name} --input {' '.join(map(str, input))}",
        signature=(),
        init_inputs="[]",
        inputs=input,
        layers=tuple(layers),
    )


def _plain(value: Any) -> Any:
    """A number, a string, or a tuple of numbers."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _command(x_shape: tuple[int, ...], values: dict[str, Any], defaults: dict[str, Any]) -> str:
    words = []
    for name, value in values.items():
        if name == "bias":
            words += [] if value else ["--no-bias"]
        elif name not in defaults or defaults[name] != value:
            numbers = value if isinstance(value, tuple) else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, numbers)]
    return " ".join([*words, "--input", *map(str, x_shape)])
