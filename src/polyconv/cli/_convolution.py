"""A convolution by its arguments, those of ``torch.nn.Conv1d`` to ``Conv3d``, on a command line."""

from __future__ import annotations

import argparse
from math import prod
from typing import Any

from ..problem import PaddingMode, Pass, Problem
from ._options import LARGEST, UsageError

REQUIRED = ("in_channels", "out_channels", "kernel_size", "input")
_OPTIONAL = {"stride": [1], "padding": ["0"], "dilation": [1], "groups": 1, "bias": True, "padding_mode": "zeros"}


def add_convolution_arguments(parser: argparse.ArgumentParser, *, input: str) -> None:
    """``--in-channels`` and the others; ``input``: what the shape of the input is wanted for."""
    conv = parser.add_argument_group(
        "a convolution by its arguments, those of the torch.nn.Conv1d, Conv2d or Conv3d that takes the input"
    )
    conv.add_argument("--in-channels", type=int, metavar="N")
    conv.add_argument("--out-channels", type=int, metavar="N")
    conv.add_argument("--kernel-size", type=int, nargs="+", metavar="N", help="one number, or one per axis")
    conv.add_argument("--stride", type=int, nargs="+", metavar="N")
    conv.add_argument(
        "--padding", nargs="+", metavar="N", help="one number, one per axis, or all sides (top, bottom, left, right)"
    )
    conv.add_argument("--dilation", type=int, nargs="+", metavar="N")
    conv.add_argument("--groups", type=int, metavar="N")
    conv.add_argument("--bias", action=argparse.BooleanOptionalAction, default=None, help="default: with a bias")
    conv.add_argument("--padding-mode", choices=[str(mode) for mode in PaddingMode])
    conv.add_argument("--input", type=int, nargs="+", metavar="N", help=f"{input}: N C H W, N C L, or N C D H W")


def given(args: argparse.Namespace) -> list[str]:
    """The names of those arguments that are there."""
    return [name for name in (*REQUIRED, *_OPTIONAL) if getattr(args, name) is not None]


def option(name: str) -> str:
    """An argument as it is written: ``--in-channels``."""
    return f"--{name.replace('_', '-')}"


def convolution(args: argparse.Namespace) -> dict[str, Any]:
    """All arguments by name, with Conv2d's defaults; an error that names those that are missing."""
    found = given(args)
    missing = [option(name) for name in REQUIRED if name not in found]
    if missing:
        raise UsageError(f"name a workload, or give a convolution's arguments; missing are {', '.join(missing)}")
    if len(args.input) not in (3, 4, 5):
        raise UsageError(f"--input takes batch, channels, and one to three axes; got {len(args.input)} numbers")
    for name in REQUIRED:
        value = getattr(args, name)
        numbers = value if isinstance(value, list) else [value]
        if min(numbers) < 1:
            raise UsageError(f"{option(name)} takes numbers from 1 up; got {' '.join(map(str, numbers))}")
    values: dict[str, Any] = {
        name: getattr(args, name) if name in found else default for name, default in _OPTIONAL.items()
    }
    padding = values["padding"]
    values["padding"] = padding[0] if padding[0] in ("same", "valid") else _numbers([_integer(p) for p in padding])
    for name in ("stride", "dilation"):
        values[name] = _numbers(values[name])
    return {
        "input": tuple(args.input),
        "in_channels": args.in_channels,
        "out_channels": args.out_channels,
        "kernel_size": _numbers(args.kernel_size),
        **values,
    }


def problem_of(values: dict[str, Any], kind: Pass) -> Problem:
    """One pass of the convolution, on dense tensors."""
    from ..arguments import normalise, per_axis  # here, because it imports torch

    (batch, channels, *size), outputs, groups = values["input"], values["out_channels"], values["groups"]
    if channels != values["in_channels"]:
        raise UsageError(f"an input of {channels} channels does not fit --in-channels {values['in_channels']}")
    if groups < 1 or channels % groups or outputs % groups:
        raise UsageError(f"{channels} input and {outputs} output channels cannot be split into {groups} groups")
    try:
        kernel = per_axis("kernel_size", values["kernel_size"], len(size))
        how = values["stride"], values["padding"], values["dilation"], groups, values["padding_mode"]
        geometry = normalise(kernel, *how, rank=len(size))
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    problem = Problem.make(
        kind,
        (batch, channels, *size),
        (outputs, channels // groups, *kernel),
        stride=geometry.stride,
        padding=geometry.padding,
        dilation=geometry.dilation,
        groups=groups,
        padding_mode=geometry.padding_mode,
        bias=values["bias"] and kind is not Pass.DGRAD,
    )
    if min(problem.y_shape) < 1:
        raise UsageError(f"nothing to compute: the output would have the shape {problem.y_shape}")
    for shape in (problem.x_shape, problem.w_shape, problem.y_shape):
        if prod(shape) > LARGEST:
            size = "x".join(map(str, shape))
            raise UsageError(f"no device holds a tensor of {size}: at most {LARGEST} elements are planned for")
    return problem


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--padding takes numbers, 'same' or 'valid'; got {text!r}") from None


def _numbers(values: list[int]) -> int | tuple[int, ...]:
    return values[0] if len(values) == 1 else tuple(values)
