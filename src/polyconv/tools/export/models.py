"""Modules that can be exported: KernelBench's, with their constructors, and any Conv1d to Conv3d."""

from __future__ import annotations

import importlib
import operator
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...activation import Activation
from ...arguments import Geometry, normalise, per_axis
from ...measure.workloads import catalogue, entries
from ...nn import Conv1d, Conv2d, Conv3d
from ...problem import Pass, Problem, Shape
from .volumes import stacked

_ARGUMENTS = (
    *("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
)
_TAKEN = "a Conv1d, a Conv2d, a Conv3d, or a Sequential of them, can be exported"


_KNOWN = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, Conv1d, Conv2d, Conv3d)
"""Exact types that can be exported: a subclass may compute something else."""


class ExportError(ValueError):
    """The model or its arguments cannot be exported; the message gives the reason."""


@dataclass(frozen=True)
class Layer:
    """One convolution of a module."""

    attribute: str
    module: str
    """Class name in ``torch.nn``."""
    arguments: str
    """Arguments of that class, in terms of those of the model's constructor."""
    problem: Problem
    """Forward pass on the exported input; an input gradient if the convolution is transposed."""

    @property
    def picture(self) -> Problem:
        """2-D problem of one kernel call: a signal has height 1, a volume is lowered to stacked slices."""
        return stacked(self.problem) if self.problem.rank == 3 else self.problem.as_2d()


@dataclass(frozen=True)
class Model:
    """A module to export, as source text."""

    title: str
    command: str
    """Arguments of ``polyconv export`` that reproduce it."""
    signature: tuple[str, ...]
    """Parameters of the constructor with their defaults."""
    init_inputs: str
    inputs: Shape
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class _Constructor:
    """Constructor of a KernelBench problem: its parameters, and the arguments of each convolution by attribute."""

    signature: tuple[str, ...]
    layers: dict[str, str]
    init_inputs: str


def _dense(init_inputs: str, zero: str = "0", one: str = "1", attribute: str = "conv2d") -> _Constructor:
    parameters = ("in_channels", "out_channels", "kernel_size", f"stride={one}", f"padding={zero}", f"dilation={one}")
    return _Constructor(
        (*parameters, "groups=1", "bias=False"),
        {attribute: "in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias"},
        init_inputs,
    )


def _transposed(attribute: str, init_inputs: str, *options: str) -> _Constructor:
    """``options``: the constructor's parameters between ``kernel_size`` and ``bias``, with their defaults."""
    known = [option.partition("=")[0] for option in options]
    arguments = ["in_channels", "out_channels", "kernel_size", "stride", "padding"]
    arguments += [f"{name}={name}" for name in (*known[2:], "bias")]
    return _Constructor(
        ("in_channels", "out_channels", "kernel_size", *options, "bias=False"),
        {attribute: ", ".join(arguments)},
        init_inputs,
    )


_PLAIN = ("stride=1", "padding=0", "output_padding=0", "groups=1")
_DILATED = ("stride=1", "padding=0", "dilation=1")
_OF_PAIRS = ("stride=(1, 1)", "padding=(0, 0)", "dilation=(1, 1)", "groups=1")
_OF_THREE = ("stride=(1, 1, 1)", "padding=(0, 0, 0)", "output_padding=(0, 0, 0)", "groups=1")


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
            # KernelBench's module ignores `out_channels` and `groups`.
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
    "kb67": _dense("[64, 128, 3]", attribute="conv1d"),
    "kb76": _Constructor(
        ("in_channels", "out_channels", "kernel_size", "stride=1", "dilation=1", "bias=False"),
        {"conv1d": "in_channels, out_channels, kernel_size, stride, dilation=dilation, bias=bias"},
        "[64, 128, 3, 3, 4]",
    ),
    "kb57": _transposed("conv_transpose2d", "[64, 64, 3]", *_PLAIN),
    "kb65": _transposed("conv_transpose2d", "[64, 64, (3, 7)]", *_PLAIN),
    "kb69": _transposed(
        "conv_transpose2d", "[64, 128, (3, 5)]", *_OF_PAIRS[:2], "output_padding=(0, 0)", *_OF_PAIRS[2:]
    ),
    "kb71": _transposed("conv_transpose2d", "[32, 32, 3]", *_PLAIN),
    "kb75": _transposed("conv_transpose2d", "[32, 64, (3, 5), (2, 3), (1, 2), (2, 1), 4]", *_OF_PAIRS),
    "kb78": _transposed("conv_transpose2d", "[32, 32, (3, 7), (1, 1), (1, 3)]", *_OF_PAIRS[:2]),
    "kb81": _transposed("conv_transpose2d", "[32, 64, 3, 5, 1, 2]", *_DILATED),
    "kb64": _transposed("conv1d_transpose", "[128, 128, 3]", *_PLAIN),
    "kb74": _transposed("conv1d_transpose", "[32, 64, 5, 1, 0, 3]", *_DILATED),
    "kb79": _transposed("conv1d_transpose", "[32, 64, 3, 2, 1, 2]", *_DILATED),
    "kb54": _dense("[3, 64, 3]", attribute="conv3d"),
    "kb59": replace(
        _dense("[3, 64, 3]"),
        layers={
            "conv3d": "in_channels, out_channels, (kernel_size, kernel_size, 1), "
            "stride, padding, dilation, groups, bias"
        },
    ),
    "kb60": _dense("[3, 64, (3, 5, 7)]", attribute="conv3d"),
    "kb66": _dense("[3, 64, (3, 5, 7)]", "(0, 0, 0)", "(1, 1, 1)", attribute="conv3d"),
    "kb58": _transposed("conv_transpose3d", "[32, 16, (3, 5, 7)]", *_OF_THREE),
    "kb61": _transposed("conv_transpose3d", "[48, 48, 3]", *_PLAIN),
    "kb68": _transposed("conv_transpose3d", "[32, 64, (3, 5, 5)]", *_OF_THREE),
    "kb70": _transposed("conv_transpose3d", "[48, 24, 3]", *_PLAIN[:3], "dilation=1", "groups=1"),
    "kb72": _transposed("conv_transpose3d", "[32, 32, (3, 5, 7), (2, 2, 2), (1, 2, 3), (1, 1, 1), 4]", *_OF_THREE),
    # KernelBench's module ignores `output_padding`, which receives the number meant for `groups`.
    "kb73": replace(
        _transposed("conv_transpose3d", "[32, 32, 3, 2, 1, 4]", *_PLAIN),
        layers={
            "conv_transpose3d": "in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=bias"
        },
    ),
    "kb77": _transposed("conv_transpose3d", "[32, 64, 3, 2, 1, 2]", *_DILATED),
}
_SEPARABLE_OUTPUTS = 128
"""Output channels of kb86's second convolution, the 1x1 one."""


def named_model(name: str) -> Model:
    """Model of a named workload."""
    known = catalogue()
    name = next((one.id for one in known.values() if name == one.name), name)  # W1 is kb80
    if name not in known:
        raise ExportError(f"there is no workload {name!r}; known are {', '.join(known)}")
    constructor = _KERNELBENCH.get(name)
    if constructor is None:
        written = entries()[name]
        names = ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias")
        arguments = {key: written[key] for key in names}
        model = convolution_model(known[name].input, in_channels=known[name].input[1], **arguments)
        return replace(model, title=f"{name}: {model.title}", command=name)
    problems = [known[name].problem(Pass.FPROP)]
    if len(constructor.layers) == 2:
        first = problems[0]
        w_shape = (_SEPARABLE_OUTPUTS, first.out_channels, 1, 1)
        problems.append(Problem.make("fprop", first.y_shape, w_shape, bias=first.bias))
    return Model(
        title=f"KernelBench level 1, problem {name.removeprefix('kb')}",
        command=name,
        signature=constructor.signature,
        init_inputs=constructor.init_inputs,
        inputs=known[name].input,
        layers=tuple(
            Layer(attribute, known[name].module, text, problem)
            for (attribute, text), problem in zip(constructor.layers.items(), problems, strict=True)
        ),
    )


def exportable() -> list[str]:
    """Names of the workloads that can be exported: all of them."""
    return list(catalogue())


def convolution_model(
    input: Shape,
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
    """Model with one ``nn.Conv1d`` to ``nn.Conv3d``, by the rank of the input, and its constructor."""
    batch, channels, *size = input
    rank = len(size)
    if rank not in (1, 2, 3):
        raise ExportError(f"an input has a batch, channels and one to three axes; got {list(input)}")
    if rank == 3 and padding_mode != "zeros":
        raise ExportError(f"over three axes padding_mode='zeros' can be exported alone; got {padding_mode!r}")
    if channels != in_channels:
        raise ExportError(f"an input of {channels} channels does not fit in_channels={in_channels}")
    if in_channels % groups or out_channels % groups:
        raise ExportError(
            f"{in_channels} input and {out_channels} output channels cannot be split into {groups} groups"
        )
    kernel = per_axis("kernel_size", kernel_size, rank)
    geometry: Geometry = normalise(kernel, stride, padding, dilation, groups, padding_mode, rank=rank)
    if padding_mode != "zeros" and min(geometry.padding) < 0:
        raise ExportError("negative padding can be exported with padding_mode='zeros' only")
    problem = Problem.make(
        "fprop",
        (batch, channels, *size),
        (out_channels, in_channels // groups, *kernel),
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
    if rank == 3:  # only "zeros" is supported, checked above
        del values["padding_mode"]
    module = f"Conv{rank}d"
    return Model(
        title=str(problem).removeprefix("fprop "),
        command=_command(problem.x_shape, values, defaults),
        signature=tuple(f"{name}={_literal(defaults[name])}" if name in defaults else name for name in values),
        init_inputs=f"[{', '.join(map(_literal, values.values()))}]",
        inputs=problem.x_shape,
        layers=(Layer(module.lower(), module, ", ".join(values), problem),),
    )


def imported_model(name: str, input: Shape) -> Model:
    """Model of a user's convolution, or ``Sequential`` of them, imported from ``module:attribute``.

    A function or class found there is called without arguments.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ExportError(f"{name!r} names no attribute: write PACKAGE.MODULE:ATTRIBUTE")
    sys.path.insert(0, "")  # as for python -m: modules in the current folder can be imported
    try:
        found: Any = operator.attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ExportError(f"{name} cannot be imported: {error}") from error
    finally:
        sys.path.remove("")
    made = found if isinstance(found, torch.nn.Module) else found() if callable(found) else found
    several = isinstance(made, torch.nn.Sequential)
    convolutions: dict[str, Any] = dict(made.named_children()) if several else {"": made}
    if not convolutions:
        raise ExportError(f"{name} is empty: {_TAKEN}")
    layers: list[Layer] = []
    shape = input
    for number, (key, conv) in enumerate(convolutions.items()):
        kind = type(conv).__name__
        if type(conv) not in _KNOWN:
            raise ExportError(f"{name} holds a {kind}: {_TAKEN}")
        if getattr(conv, "fold", None) is not None:
            raise ExportError(f"{name} holds a {kind} with a folded normalisation: export the model before optimize")
        rank = len(conv.kernel_size)
        if len(shape) != rank + 2:
            raise ExportError(f"{name} holds a {kind}, whose --input has {rank + 2} numbers; got {len(shape)}")
        arguments = {key: _plain(getattr(conv, key)) for key in _ARGUMENTS} | {"bias": conv.bias is not None}
        (layer,) = convolution_model(shape, **arguments).layers
        attribute = key if key.isidentifier() else f"conv{number}" if key else layer.attribute
        written = ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())
        activation = Activation(getattr(conv, "activation", None) or "none")
        problem = replace(layer.problem, activation=activation)
        layers.append(replace(layer, attribute=attribute, arguments=written, problem=problem))
        shape = layer.problem.y_shape
    return Model(
        title=f"{name}: {'; '.join(str(layer.problem).removeprefix('fprop ') for layer in layers)}",
        command=f"--from {name} --input {' '.join(map(str, input))}",
        signature=(),
        init_inputs="[]",
        inputs=input,
        layers=tuple(layers),
    )


def _plain(value: Any) -> Any:
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
