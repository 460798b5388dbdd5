"""``polyconv export``: one Python file with a convolution and its CUDA kernels, which needs nothing but torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..arguments import PADDING_MODES
from ..bench.workloads import entries
from ..export import ExportError, Model, conv2d_model, exported_file, named_model
from ..plan import DEVICES, PlanError

_REQUIRED = ("in_channels", "out_channels", "kernel_size", "input")
_OPTIONAL = {"stride": [1], "padding": ["0"], "dilation": [1], "groups": 1, "bias": True, "padding_mode": "zeros"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        "examples:\n"
        "  polyconv export kb80 -o model.py\n"
        "  polyconv export --in-channels 32 --out-channels 64 --kernel-size 5 9 --input 8 32 512 512 -o model.py"
    )
    parser.add_argument(
        "workload", nargs="?", metavar="WORKLOAD", help="a named convolution: kb80 is KernelBench's problem 80"
    )
    parser.add_argument("-o", "--output", required=True, type=Path, help="the file to write; - for standard output")
    parser.add_argument("--gpu", choices=sorted(DEVICES), default="v100", help="choose kernels for it (default: v100)")
    parser.add_argument("--list", action=_List, nargs=0, help="print the named convolutions and exit")
    conv = parser.add_argument_group("a convolution by its arguments, those of torch.nn.Conv2d")
    conv.add_argument("--in-channels", type=int, metavar="N")
    conv.add_argument("--out-channels", type=int, metavar="N")
    conv.add_argument("--kernel-size", type=int, nargs="+", metavar="N", help="one number, or height and width")
    conv.add_argument("--stride", type=int, nargs="+", metavar="N")
    conv.add_argument(
        "--padding", nargs="+", metavar="N", help="one number, height and width, four sides (top, bottom, left, right)"
    )
    conv.add_argument("--dilation", type=int, nargs="+", metavar="N")
    conv.add_argument("--groups", type=int, metavar="N")
    conv.add_argument("--bias", action=argparse.BooleanOptionalAction, default=None, help="default: with a bias")
    conv.add_argument("--padding-mode", choices=PADDING_MODES)
    conv.add_argument(
        "--input", type=int, nargs=4, metavar=("N", "C", "H", "W"), help="the input to choose kernels for"
    )


def run(args: argparse.Namespace) -> int:
    try:
        text = exported_file(_model(args), DEVICES[args.gpu])
    except (ExportError, PlanError, RuntimeError, TypeError) as error:
        print(f"polyconv export: {error}", file=sys.stderr)
        return 2
    if str(args.output) == "-":
        sys.stdout.write(text)
    else:
        args.output.write_text(text, encoding="utf-8")
        print(
            f"wrote {args.output}: {len(text.splitlines())} lines, {len(text.encode()) / 1000:.0f} kB", file=sys.stderr
        )
    return 0


def _model(args: argparse.Namespace) -> Model:
    given = [name for name in (*_REQUIRED, *_OPTIONAL) if getattr(args, name) is not None]
    if args.workload is not None:
        if given:
            raise ExportError(f"{args.workload} is a convolution already; leave out --{given[0].replace('_', '-')}")
        return named_model(args.workload)
    missing = [f"--{name.replace('_', '-')}" for name in _REQUIRED if name not in given]
    if missing:
        raise ExportError(f"name a workload, or give a convolution's arguments; missing are {', '.join(missing)}")
    values: dict[str, Any] = {
        name: getattr(args, name) if name in given else default for name, default in _OPTIONAL.items()
    }
    padding = values["padding"]
    values["padding"] = padding[0] if padding[0] in ("same", "valid") else _numbers([_integer(p) for p in padding])
    for name in ("stride", "dilation"):
        values[name] = _numbers(values[name])
    return conv2d_model(
        tuple(args.input),
        in_channels=args.in_channels,
        out_channels=args.out_channels,
        kernel_size=_numbers(args.kernel_size),
        **values,
    )


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ExportError(f"--padding takes numbers, 'same' or 'valid'; got {text!r}") from None


def _numbers(values: list[int]) -> int | tuple[int, ...]:
    return values[0] if len(values) == 1 else tuple(values)


class _List(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for name in entries():
            print(f"{name:<18}{named_model(name).title}")
        parser.exit()
