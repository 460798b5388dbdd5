"""``polyconv warmup``: compile kernels ahead of time, without a GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from .. import settings
from ..cuda.jit.bundle import Bundle
from ..cuda.jit.bundle_writer import BundleWriter
from ..cuda.jit.cache import KernelCache
from ..cuda.jit.compile import in_threads
from ..cuda.jit.store import Store
from ..cuda.planner import KernelSpec
from ..measure import workloads
from ..model.aot import Wanted, every_kernel, wanted_by, wanted_by_name
from ..problem import Pass, Problem
from ..util.console import Progress, print_json, print_table, progress, size_text
from . import _options

ABOUT = """\
A model is named as MODULE:ATTRIBUTE, an import path and a name in it: a torch.nn.Module, or a class or a function that
makes one when called without arguments. It is called on tensors without data, its convolutions replaced by
polyconv's, and plans for all its convolutions are made for every GPU of the architecture that is known. Which kernels a
GPU chooses depends on its clocks and sizes, so those of plans that come close are compiled, too.

Without -o the kernels go to this machine's cache. With it they go to a folder (a bundle) that can be copied; a program
uses it with POLYCONV_KERNELS=FOLDER, and with POLYCONV_JIT=off it never runs a compiler.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_workloads_argument(
        parser, "workloads or groups of them, separated by commas; or a model, MODULE:ATTRIBUTE"
    )
    add_shape_argument(parser)
    names = _options.list_of(str)
    parser.add_argument("--kernels", metavar="NAMES", type=names, help="kernels by name, separated by commas")
    parser.add_argument("--all-kernels", action="store_true", help="every kernel that a plan can name")
    _options.add_arch_argument(
        parser, help="GPU architectures, separated by commas: sm_70,sm_80,sm_90 (default: of the GPUs in this machine)"
    )
    _options.add_pass_argument(parser)
    _options.add_output_argument(parser, "write a bundle for other machines, or add to one", folder=True)
    _options.add_json_argument(parser, "what was compiled")
    _options.add_examples(
        parser,
        "polyconv warmup W1,W2 --arch sm_70,sm_80,sm_90 --pass fprop -o kernels/",
        "polyconv warmup torchvision.models:resnet50 --input-shape 8,3,224,224 --arch sm_80 -o kernels/",
        "polyconv warmup --all-kernels --arch sm_70",
        about=ABOUT,
    )


def run(args: argparse.Namespace) -> int:
    _check(args)
    archs = args.archs or archs_here()
    wanted = _wanted(args, archs)
    # Compile regardless of POLYCONV_JIT.
    cache = KernelCache(jit=True)
    _options.check_folder(args.output or cache.directory, "name a folder with -o, or set POLYCONV_CACHE_DIR")
    writer = BundleWriter(args.output, cache) if args.output else None
    with settings.use(kernels="off"), progress() as shown:
        sizes = _compile(wanted, writer.add if writer else cache.get, shown)
    if writer:
        writer.finish([_asked(args, arch) for arch in archs])
    folder = (writer.folder if writer else Store.of_cache(cache.directory).path).resolve()
    digest = Bundle(folder).digest if writer else None
    if args.json:
        print_json(_as_json(folder, wanted, sizes, digest))
    else:
        _print(folder, wanted, sizes, digest)
    return 0


# ---- selection


def _check(args: argparse.Namespace) -> None:
    given = [name for name in ("workloads", "kernels", "all_kernels") if getattr(args, name)]
    if len(given) != 1:
        raise _options.UsageError("name one thing to compile: workloads, a model, --kernels or --all-kernels")
    is_model = args.workloads is not None and ":" in args.workloads
    if is_model and not args.input_shape:
        raise _options.UsageError(
            f"--input-shape is needed: what runs in {args.workloads} depends on the shape of its input"
        )
    if args.input_shape and not is_model:
        raise _options.UsageError("--input-shape is for a model, MODULE:ATTRIBUTE")


def _wanted(args: argparse.Namespace, archs: Sequence[str]) -> list[Wanted]:
    if args.all_kernels:
        return [every_kernel(arch) for arch in archs]
    if args.kernels:
        return [wanted_by_name(args.kernels, arch) for arch in archs]
    if ":" in args.workloads:
        problems = model_problems(args.workloads, args.input_shape, args.passes)
    else:
        tolerance = settings.current().tolerance
        found = workloads.find(args.workloads)
        problems = [replace(w.problem(kind).as_2d(), tolerance=tolerance) for w in found for kind in args.passes]
    return [wanted_by(problems, arch) for arch in archs]


def model_problems(name: str, shapes: Sequence[tuple[int, ...]], passes: Sequence[Pass]) -> list[Problem]:
    """Convolutions of a model named by ``MODULE:ATTRIBUTE``, on inputs of these shapes."""
    import torch

    from ..model import replace as model_replace
    from ..model.explain import problems_of

    model = load_model(name)
    inputs: list[Any] = list(shapes)
    if not any(parameter.is_floating_point() for parameter in model.parameters()):
        inputs = [torch.empty(shape) for shape in shapes]
    model_replace.replace(model, policy="own")  # PyTorch's flags may be others where the kernels run
    try:
        problems = problems_of(model, *inputs)
    except Exception as error:  # the model's code can raise anything
        sizes = " ".join(",".join(map(str, shape)) for shape in shapes)
        raise _options.UsageError(f"{name} cannot be called with inputs of shape {sizes}: {error}") from error
    if not problems:
        raise _options.UsageError(f"{name} makes no convolution that polyconv could run")
    return [problem for problem in problems if problem.kind in passes]


def load_model(name: str) -> Any:
    """Model named by ``MODULE:ATTRIBUTE``, called without arguments if it is a class or a function."""
    import torch

    module_name, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` would
    try:
        found: Any = import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        model = found if isinstance(found, torch.nn.Module) else found()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise _options.UsageError(f"no model can be had from {name}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise _options.UsageError(f"{name} gives a {type(model).__name__}, not a torch.nn.Module")
    return model


def archs_here() -> tuple[str, ...]:
    from ..cuda import CudaError, driver
    from ..cuda.device import describe

    try:
        count = driver.call("cuDeviceGetCount")
        return tuple(dict.fromkeys(describe(index).arch for index in range(count)))
    except CudaError as error:
        raise _options.UsageError(
            f"--arch is needed, because this machine has no GPU to compile for: {error}"
        ) from error


# ---- compiling


def _compile(
    wanted: Sequence[Wanted], get: Callable[[KernelSpec, str], bytes], shown: Progress
) -> list[dict[str, int]]:
    """Compile the kernels. Returns symbol -> size of the binary [bytes], for each architecture."""
    shown.expect(sum(len(each.kernels) for each in wanted))

    def sizes_for(each: Wanted) -> dict[str, int]:
        def one(spec: KernelSpec) -> int:
            size = len(get(spec, each.arch))
            shown.step(f"compiled {spec.symbol} for {each.arch}")
            return size

        kernels = list(each.kernels)
        return dict(zip((spec.symbol for spec in kernels), in_threads(one, kernels), strict=True))

    return [sizes_for(each) for each in wanted]


def _asked(args: argparse.Namespace, arch: str) -> str:
    """Description of the request, for the manifest."""
    if args.all_kernels:
        return f"every kernel for {arch}"
    if args.kernels:
        return f"{','.join(args.kernels)} for {arch}"
    shapes = "".join(f" {','.join(map(str, shape))}" for shape in args.input_shape or ())
    return f"{args.workloads}{shapes}, {','.join(map(str, args.passes))}, for {arch}"


# ---- output


def _print(folder: Path, wanted: Sequence[Wanted], sizes: Sequence[dict[str, int]], digest: str | None) -> None:
    rows = [
        [each.arch, str(len(found)), size_text(sum(found.values()))] for each, found in zip(wanted, sizes, strict=True)
    ]
    print_table(f"Kernels in {folder}", ("arch", "kernels", "size"), rows, left=1)
    for each in wanted:
        for problem, why in each.skipped.items():
            print(f"no kernel for {each.arch}: {problem}: {why}", file=sys.stderr)
    if digest is not None:
        print(f"use it with POLYCONV_KERNELS={folder}, and without a compiler with POLYCONV_JIT=off")
        print(f"where others can write it, or it is reached by links: POLYCONV_KERNELS={folder}#{digest}")


def _as_json(
    folder: Path, wanted: Sequence[Wanted], sizes: Sequence[dict[str, int]], digest: str | None
) -> dict[str, Any]:
    return {
        "folder": str(folder),
        **({} if digest is None else {"digest": digest}),
        "archs": {
            each.arch: {"kernels": found, "skipped": each.skipped} for each, found in zip(wanted, sizes, strict=True)
        },
    }


# ---- arguments


def add_shape_argument(parser: argparse.ArgumentParser, about: str = "") -> None:
    """``--input-shape``: shapes of a model's inputs, as ``args.input_shape``."""
    parser.add_argument(
        "--input-shape",
        metavar="SHAPE",
        type=_shape,
        action="append",
        help=f"{about}shape of the model's input: 8,3,224,224; once for each input",
    )


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1 or prod(shape) > _options.LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: expected numbers such as 8,3,224,224")
    return shape
