"""Arguments that mean the same in every subcommand, and how its help ends."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

from ..files import is_writable
from ..measure import workloads
from ..problem import Pass

T = TypeVar("T")

FILES, FOLDERS = "file", "directory"
"""What the shell completes an argument with."""
LARGEST = 2**42
"""Elements of a tensor: 16 TiB of float32, more than any device has. Plans of larger ones take for ever to weigh."""
WIDEST = 120
"""Columns of a paragraph in a window that has more."""


class UsageError(Exception):
    """The command line asks for what cannot be: printed as one line, exit status 2."""


class Help(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the width of the window. Lists, which are indented under a heading, keep their lines."""

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
    """End the command's help with command lines that work, after what else there is to say."""
    parser.formatter_class = Help
    heading = "example:" if len(examples) == 1 else "examples:"
    parser.epilog = "\n".join([*([about.rstrip(), ""] if about else []), heading, *(f"  {line}" for line in examples)])


def add_workloads_argument(parser: argparse._ActionsContainer, help: str, *, required: bool = False) -> None:
    """``WORKLOADS``: names and groups of them, separated by commas, as ``args.workloads``."""
    count = None if required else "?"
    action = parser.add_argument("workloads", metavar="WORKLOADS", nargs=count, type=_workloads, help=help)
    completes(action, _workload_names())


def add_pass_argument(parser: argparse.ArgumentParser) -> None:
    """``--pass``: some of the three passes, all by default, as ``args.passes``."""
    action = parser.add_argument(
        "--pass",
        dest="passes",
        metavar="PASSES",
        type=_passes,
        default=tuple(Pass),
        help="fprop, dgrad, wgrad, separated by commas (default: all)",
    )
    completes(action, [str(kind) for kind in Pass])


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
    """``--device``: where to run, or what to plan for, as ``args.device``."""
    parser.add_argument("--device", choices=list(choices), default=default, help=f"{help} (default: {default})")


def add_json_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """``--json``: a flag that prints JSON, and nothing else, on standard output."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")


def add_output_argument(
    parser: argparse.ArgumentParser, help: str, *, required: bool = False, folder: bool = False
) -> None:
    """``-o``, ``--output``: the file or folder to write, as ``args.output``."""
    metavar = "FOLDER" if folder else "FILE"
    action = parser.add_argument("-o", "--output", metavar=metavar, type=Path, required=required, help=help)
    completes(action, FOLDERS if folder else FILES)


def list_of(read: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Reads several, separated by commas, each once."""

    def values(text: str) -> tuple[T, ...]:
        return tuple(dict.fromkeys(read(part.strip()) for part in text.split(",") if part.strip()))

    return values


def positive(text: str) -> int:
    """A number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def check_writable(*paths: Path | None, devices: bool = False) -> None:
    """Refuse an output file that could not be written, before an hour of work is lost on it.

    Args:
        devices: whether it may be a pipe or a device, into which is written. Elsewhere a file is put in its place.
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
    """The same for a folder, which may have to be made."""
    if not is_writable(folder):
        raise UsageError(f"cannot write into {folder}: {advice}")


# ---- completion


def completes(action: argparse.Action, words: str | Sequence[str]) -> None:
    """What a shell offers for an argument: :data:`FILES`, :data:`FOLDERS`, or words of a list with commas."""
    action.complete = words if isinstance(words, str) else _comma_list(words)  # type: ignore[attr-defined]


def _comma_list(words: Sequence[str]) -> dict[str, Any]:
    """The shells' own ways to complete the last word of a list; ``shtab`` puts the functions into its script."""
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


def _passes(text: str) -> tuple[Pass, ...]:
    try:
        return tuple(dict.fromkeys(Pass(part.strip()) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(map(str, Pass))}") from None


def _workloads(text: str) -> str:
    """The names as they are, unless they can only be a file's: ``--json`` takes none, though one is often typed."""
    if text.endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is a file, no workload; to write what --json prints: --json > {text}"
        )
    return text


def _archs(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    for name in names:
        if not re.fullmatch(r"sm_\d+[af]?", name):
            raise argparse.ArgumentTypeError(f"{name!r} is not a GPU architecture: expected a name such as sm_70")
    if not names:
        raise argparse.ArgumentTypeError("no architecture is named: expected a name such as sm_70")
    return names
