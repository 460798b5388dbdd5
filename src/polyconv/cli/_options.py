"""Arguments shared by the subcommands, their completion, and the format of the help."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

from ..measure import environment, workloads
from ..problem import PaddingMode, Pass, Problem, Word
from ..util.atomic_files import is_writable

T = TypeVar("T")

FILES, FOLDERS = "file", "directory"
"""Completions of an argument by the shell."""
LARGEST = 2**42
"""Maximum elements of a tensor: 16 TiB of float32, more than any device has. Planning larger ones takes too long."""
WIDEST = 120
"""Maximum columns of a help paragraph."""


class UsageError(Exception):
    """Invalid command line: printed as one line, exit status 2."""


class Help(argparse.RawDescriptionHelpFormatter):
    """Wraps paragraphs to the terminal's width. Lists, indented under a heading, keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(_filled(paragraph, min(width, WIDEST)) for paragraph in text.split("\n\n"))


def _filled(paragraph: str, width: int) -> str:
    lines = paragraph.splitlines()
    margins = {line[: len(line) - len(line.lstrip())] for line in lines}
    if len(margins) != 1:
        return "\n".join(lines)
    (margin,) = margins
    return fill(
        " ".join(line.strip() for line in lines),
        width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def add_examples(parser: argparse.ArgumentParser, *examples: str, about: str = "") -> None:
    """End the command's help with ``about`` and example command lines."""
    parser.formatter_class = Help
    heading = "example:" if len(examples) == 1 else "examples:"
    parser.epilog = "\n".join([*([about.rstrip(), ""] if about else []), heading, *(f"  {line}" for line in examples)])


def add_workloads_argument(parser: argparse._ActionsContainer, help: str, *, required: bool = False) -> None:
    """``WORKLOADS``: names and groups, separated by commas, as ``args.workloads``."""
    count = None if required else "?"
    action = parser.add_argument("workloads", metavar="WORKLOADS", nargs=count, type=_workloads, help=help)
    completes(action, _workload_names())


def add_pass_argument(parser: argparse.ArgumentParser) -> None:
    """``--pass``: passes, separated by commas, as ``args.passes``."""
    add_words_argument(parser, "--pass", "passes", Pass, default=tuple(Pass))


def add_words_argument(
    parser: argparse.ArgumentParser,
    option: str,
    name: str,
    words: type[Word],
    *,
    default: Sequence[Word] | None = None,
    about: str = "",
    without: str = "all",
) -> None:
    """Option that takes some of the words, separated by commas, as ``args.<name>``. ``about`` begins its help, and
    ``without`` says what happens without the option."""
    every = ", ".join(map(str, words))

    def read(text: str) -> tuple[Word, ...]:
        try:
            found = list_of(words)(text)
        except ValueError:
            found = ()
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {every}")
        return found

    text = f"{about}{every}, separated by commas (default: {without})"
    action = parser.add_argument(option, dest=name, metavar=name.upper(), type=read, default=default, help=text)
    completes(action, [str(word) for word in words])


def add_arch_argument(parser: argparse.ArgumentParser, *, default: str | None = None, help: str | None = None) -> None:
    """``--arch``: GPU architectures, separated by commas, as ``args.archs``."""
    action = parser.add_argument(
        "--arch",
        dest="archs",
        metavar="ARCHS",
        type=_archs,
        default=None if default is None else _archs(default),
        help=help or f"GPU architectures, separated by commas: sm_70,sm_80 (default: {default})",
    )
    completes(action, ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])


def add_device_argument(parser: argparse.ArgumentParser, choices: Iterable[str], default: str, help: str) -> None:
    """``--device``: device to run on or to plan for, as ``args.device``."""
    parser.add_argument("--device", choices=list(choices), default=default, help=f"{help} (default: {default})")


def add_json_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """``--json``: print JSON, and nothing else, on standard output."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def add_output_argument(
    parser: argparse.ArgumentParser, help: str, *, required: bool = False, folder: bool = False
) -> None:
    """``-o``, ``--output``: the file or folder to write, as ``args.output``."""
    metavar = "FOLDER" if folder else "FILE"
    action = parser.add_argument("-o", "--output", metavar=metavar, type=Path, required=required, help=help)
    completes(action, FOLDERS if folder else FILES)


def list_of(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Parser of comma-separated values, without duplicates."""

    def values(text: str) -> tuple[T, ...]:
        return tuple(dict.fromkeys(read(part.strip()) for part in text.split(",") if part.strip()))

    return values


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def check_writable(*paths: Path | None, devices: bool = False) -> None:
    """Raise :class:`UsageError` for an output file that cannot be written, before long work is lost.

    Args:
        devices: whether pipes and devices are allowed, which are written in place; other files are replaced.
    """
    for path in paths:
        if path is None:
            continue
        if path.is_dir() or (path.exists() and not path.is_file() and not devices):
            raise UsageError(f"cannot write {path}: it is {'a directory' if path.is_dir() else 'not a file'}")
        folder = path.resolve().parent
        if not folder.is_dir():
            raise UsageError(f"cannot write {path}: {folder} is not a directory")
        check_folder(folder, "name another file with -o")


def check_folder(folder: Path, advice: str) -> None:
    """Raise :class:`UsageError` for a folder that cannot be written or created."""
    if not is_writable(folder):
        raise UsageError(f"cannot write into {folder}: {advice}")


# ---- completion


def completes(action: argparse.Action, words: str | Sequence[str]) -> None:
    """Set the completion of an argument: :data:`FILES`, :data:`FOLDERS`, or words of a comma-separated list."""
    action.complete = words if isinstance(words, str) else _comma_list(words)  # type: ignore[attr-defined]


def _comma_list(words: Sequence[str]) -> dict[str, Any]:
    """Shell functions that complete the last word of a list; ``shtab`` embeds them in its script."""
    function = "_polyconv_" + re.sub(r"\W", "_", "_".join(words[:2])) + f"_{len(words)}"
    joined = " ".join(words)
    return {
        "bash": function,
        "zsh": function,
        "fish": f"({function})",
        "preamble": {
            "bash": (
                f"{function}() {{\n"
                '  local head=""\n'
                '  case "$1" in *,*) head="${1%,*}," ;; esac\n'
                f'  compgen -P "$head" -W "{joined}" -- "${{1##*,}}"\n'
                "}"
            ),
            "zsh": f"{function}() {{\n  _values -s , word {joined}\n}}",
            "fish": (
                f"function {function}\n"
                "  set -l head (string replace -rf '^(.*,)[^,]*$' '$1' -- (commandline -ct))\n"
                f"  for word in {joined}\n"
                '    echo "$head$word"\n'
                "  end\n"
                "end"
            ),
        },
    }


def _workload_names() -> list[str]:
    known = workloads.catalogue().values()
    return list(dict.fromkeys([*workloads.GROUPS, *(w.name for w in known), *(w.id for w in known)]))


# ---- values


def _workloads(text: str) -> str:
    """Reject file names, a common mistake after ``--json``, which takes no value."""
    if text.endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a file, no workload; to write what --json prints: --json > {text}"
        )
    return text


def _archs(text: str) -> tuple[str, ...]:
    names = list_of(str)(text)
    for name in names:
        if not re.fullmatch(r"sm_\d+[af]?", name):
            raise argparse.ArgumentTypeError(f"{name!r} is not a GPU architecture: expected a name such as sm_70")
    if not names:
        raise argparse.ArgumentTypeError("no architecture is named: expected a name such as sm_70")
    return names


def add_isa_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--isa",
        choices=list(environment.ISAS),
        help="limit PyTorch and polyconv to this instruction set, as on a processor that has no better one",
    )


def set_up(command: str, variables: Mapping[str, str], isa: str | None) -> None:
    """Restart the command if variables must be set before PyTorch is loaded; then limit our kernels to ``isa``."""
    if variables and sys.argv[1:2] == [command]:  # not if main() was called by another program
        environment.start_anew(variables)
    limits = {name: value for name, value in variables.items() if name != environment.HUGE_PAGES}
    if limits:
        setting = " ".join(f"{name}={value}" for name, value in limits.items())
        raise UsageError(f"--isa {isa} has to be known before PyTorch is loaded; set {setting} and start again")
    from ..cpu import native

    if isa is not None and native.is_available():
        native.instruction_set(isa)


REQUIRED = ("in_channels", "out_channels", "kernel_size", "input")
_OPTIONAL = {"stride": [1], "padding": ["0"], "dilation": [1], "groups": 1, "bias": True, "padding_mode": "zeros"}


def add_convolution_arguments(parser: argparse.ArgumentParser, *, input: str) -> None:
    """``--in-channels`` etc. ``input``: start of the help of ``--input``."""
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
    """Names of the convolution arguments on the command line."""
    return [name for name in (*REQUIRED, *_OPTIONAL) if getattr(args, name) is not None]


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def convolution(args: argparse.Namespace) -> dict[str, Any]:
    """Convolution arguments by name, with Conv2d's defaults. Raises :class:`UsageError` if some are missing."""
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
    """One pass of the convolution on dense tensors."""
    from ..arguments import normalise, per_axis  # lazy: imports torch

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
