"""``polyconv export``: one Python file with a convolution and its CUDA kernels that needs only torch."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from ..cuda.planner import DEVICES
from ..measure.workloads import catalogue
from ..problem import Pass
from ..selection import PlanError
from ..util.console import print_json
from . import _options
from ._options import UsageError, option

if TYPE_CHECKING:
    from ..tools.export import Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    workload = parser.add_argument(
        "workload", nargs="?", metavar="WORKLOAD", help="a named convolution: kb80 is KernelBench's problem 80"
    )
    _options.completes(workload, list(catalogue()))
    _options.add_output_argument(parser, "the file to write; - for standard output")
    _options.add_device_argument(parser, sorted(DEVICES), "v100", "choose kernels for this GPU")
    parser.add_argument(
        "--from",
        dest="module",
        metavar="PACKAGE.MODULE:ATTRIBUTE",
        help="a Conv1d, Conv2d or Conv3d of yours, a Sequential of them, or a function that makes one; with --input",
    )
    parser.add_argument(
        "--simple", action="store_true", help="a Conv2d in at most 350 lines to read: one kernel for all passes, slower"
    )
    parser.add_argument(
        "--board", action="store_true", help="a submission to gpu-mode's problem conv2d_v2; with --device of its GPUs"
    )
    parser.add_argument("--forward-only", action="store_true", help="leave the gradients out")
    parser.add_argument(
        "--tensor-cores",
        action=argparse.BooleanOptionalAction,
        help="at FP32 accuracy, where the plan says so; the default, except for a V100",
    )
    _options.add_arch_argument(
        parser, help="compile for these (sm_70,sm_80) if TORCH_CUDA_ARCH_LIST does not say what for"
    )
    parser.add_argument("--class-name", default="ModelNew", metavar="NAME", help="of the module; default: ModelNew")
    parser.add_argument("--list", action="store_true", help="print the named convolutions and exit")
    _options.add_json_argument(parser, "what was written, or the named convolutions,")
    _options.add_examples(
        parser,
        "polyconv export kb80 -o model.py",
        "polyconv export kb80 --simple -o model.py",
        "polyconv export --board --device h100 -o submission.py",
        "polyconv export --from package.module:attribute --input 8 32 512 512 --forward-only -o model.py",
        "polyconv export --in-channels 32 --out-channels 64 --kernel-size 5 9 --input 8 32 512 512 -o model.py",
    )
    _options.add_convolution_arguments(parser, input="the input to choose kernels for")


def run(args: argparse.Namespace) -> int:
    from ..tools.export import ExportError

    if args.list:
        _list(args.json)
        return 0
    to_stdout = str(args.output) == "-"
    if args.output is None or (to_stdout and args.json):
        raise UsageError("-o FILE is needed" + (", because standard output is for JSON" if to_stdout else ""))
    _options.check_writable(None if to_stdout else args.output, devices=True)
    try:
        text = _text(args)
    except (ExportError, PlanError, RuntimeError, TypeError) as error:
        raise UsageError(str(error)) from error
    if to_stdout:
        sys.stdout.write(text)
        return 0
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {args.output}: {error.strerror}") from error
    lines, size = len(text.splitlines()), len(text.encode())
    if args.json:
        print_json({"file": str(args.output), "device": args.device, "lines": lines, "bytes": size})
    else:
        print(f"wrote {args.output}: {lines} lines, {size / 1000:.0f} kB", file=sys.stderr)
    return 0


def _text(args: argparse.Namespace) -> str:
    from ..tools.export import ExportError, board_file, exported_file, simple_file

    arch = ";".join(re.sub(r"sm_(\d+)(\d)", r"\1.\2", arch) for arch in args.archs or ())
    if args.board:
        if args.workload or args.module or args.simple or _options.given(args):
            raise ExportError("--board writes a whole file: of the other options, only --device and --arch go with it")
        return board_file(DEVICES[args.device], arch=arch)
    if not args.simple:
        options = {"forward_only": args.forward_only, "tensor_cores": args.tensor_cores}
        return exported_file(_model(args), DEVICES[args.device], arch=arch, class_name=args.class_name, **options)
    for name in ("forward_only", "tensor_cores"):
        if getattr(args, name):
            raise ExportError(f"--simple writes one FP32 kernel for all passes; leave out {option(name)}")
    return simple_file(_model(args), arch=arch, class_name=args.class_name)


def _list(as_json: bool) -> None:
    from ..tools.export import exportable, named_model

    titles = {name: named_model(name).title for name in exportable()}
    if as_json:
        print_json(titles)
    else:
        print("\n".join(f"{name:<18}{title}" for name, title in titles.items()))


def _model(args: argparse.Namespace) -> Model:
    from ..tools.export import ExportError, convolution_model, imported_model, named_model

    found = _options.given(args)
    if args.workload is not None:
        if found:
            raise ExportError(f"{args.workload} is a convolution already; leave out {option(found[0])}")
        return named_model(args.workload)
    if args.module is not None:
        if found != ["input"]:
            raise ExportError("--from names a convolution already: beside it only --input is given, and it is needed")
        return imported_model(args.module, tuple(args.input))
    values = _options.convolution(args)
    _options.problem_of(values, Pass.FPROP)  # for the error messages of polyconv plan
    return convolution_model(**values)
