"""The ``polyconv`` command.

Each subcommand is a module of this package with ``add_arguments(parser)`` and ``run(args) -> int``, listed in
:data:`COMMANDS`. Modules are imported lazily, and none imports torch before ``run``, so that help and completion are
fast (:mod:`polyconv_cli`, the entry point, imports this package without torch).

Exit statuses: 0, success; 1, a check failed or something is missing; 2, usage error; 130, interrupted; 141, broken
pipe.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from shutil import get_terminal_size
from textwrap import fill

INTERRUPTED, CLOSED_PIPE = 130, 141

COMMANDS: dict[str, str] = {
    "doctor": "what this installation can do here, what is wrong with it and what to do; tests it, quickly or fully",
    "plan": "what would run for a named workload on a GPU or on this CPU, and why",
    "bench": "time and error of named workloads, layers and whole networks on this machine, next to PyTorch",
    "tune": "measure which kernels are the fastest here, for named workloads, and write it down",
    "calibrate": "measure this processor, so that what runs is chosen rightly on it; a minute",
    "warmup": "compile CUDA kernels ahead of time, for this machine or into a folder for others; needs no GPU",
    "inspect": "registers, spills and occupancy of kernels, and what a V100 or an A100 would spend on them, counted",
    "export": "write one Python file with a convolution and its CUDA kernels, which needs nothing but torch",
    "cache": "the compiled kernels on this machine: where, how many, whether they are whole; clear them",
    "bundle": "a folder of compiled kernels as a wheel, which machines install; its digest",
    "completion": "print a script that completes polyconv's commands in bash, zsh or fish",
}
"""Command, which is also the module's name -> its line in ``polyconv --help``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("polyconv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Redirect standard output to the null device, so that the interpreter's final flush does not fail as well.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def command_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"polyconv {command}", description=COMMANDS[command])
    import_module(f".{command}", __package__).add_arguments(parser)
    return parser


def complete_parser() -> argparse.ArgumentParser:
    """One parser with all commands, for the completion scripts."""
    parser = _frame()
    commands = parser.add_subparsers(dest="command")
    for command, line in COMMANDS.items():
        module = import_module(f".{command}", __package__)
        module.add_arguments(commands.add_parser(command, help=line, description=line))
    return parser


def _run(words: list[str]) -> int:
    parser = _frame()
    if not words or words[0].startswith("-"):
        parser.parse_args(words)  # --help, --version, or an error
        parser.print_help()
        return 0
    command, *rest = words
    if command not in COMMANDS:
        parser.error(_unknown(command))
    try:
        args = command_parser(command).parse_args(rest)
        return int(import_module(f".{command}", __package__).run(args))
    except Exception as error:
        status = _status_of(error)
        if status is None:
            raise
        print(f"polyconv {command}: {_in_words(error)}", file=sys.stderr)
        return status


def _status_of(error: Exception) -> int | None:
    """Exit status of an error whose message is for the user; None for a bug."""
    from ..autotune.tuning_file import TuningError
    from ..cpu.profiles import ProfileError
    from ..cuda.errors import CudaError
    from ..cuda.jit.store import EntryError
    from ..measure.workloads import WorkloadError
    from ..model.aot import WarmupError
    from ..selection import PlanError
    from ..settings import SettingsError
    from ..tools.inspect import CountingError, InspectionError
    from ._options import UsageError

    if isinstance(error, (UsageError, WorkloadError, SettingsError, WarmupError)):
        return 2
    if isinstance(error, BrokenPipeError):
        return None
    broken = (CudaError, PlanError, EntryError, OSError, TuningError, ProfileError, InspectionError, CountingError)
    return 1 if isinstance(error, broken) else None


def _in_words(error: Exception) -> str:
    """Message of an error; for an OSError, file and reason without the errno."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    return str(error)


def _frame() -> argparse.ArgumentParser:
    """Parser without subcommands: help and version."""
    width = get_terminal_size().columns - 2
    parser = argparse.ArgumentParser(
        prog="polyconv",
        usage="polyconv COMMAND ...",
        description="torch's convolutions on kernels of its own",
        epilog="\n".join(
            [
                "commands:",
                *(fill(f"  {name:<12}{line}", width, subsequent_indent=" " * 14) for name, line in COMMANDS.items()),
                "",
                "polyconv COMMAND --help says more, with examples.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    return parser


def _unknown(command: str) -> str:
    close = get_close_matches(command, COMMANDS, n=1)
    meant = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(COMMANDS)}"
    return f"no command is called {command!r}{meant}"


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ..version import __version__

        print(f"polyconv {__version__}")
        parser.exit()
