"""The ``polyconv`` command.

Each subcommand is a module of this package with ``add_arguments(parser)`` and ``run(args) -> int``, listed in
:data:`COMMANDS`. A module is imported only when its command is the one that was typed, so that none pays for what
another one needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

COMMANDS: dict[str, str] = {
    "bench": "time and error of named workloads on this machine, next to PyTorch at its best",
    "export": "write one Python file with a convolution and its CUDA kernels, which needs nothing but torch",
    "inspect": "registers, spills and occupancy of kernels, and what a V100 would spend on them, counted",
    "plan": "what would run for a named workload on a GPU or on this CPU, and why",
}
"""Command -> the one line that ``polyconv --help`` shows. The module has the command's name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    arguments = _Arguments(argv)
    if arguments.command is None:
        arguments.parser.print_help()
        return 0
    module = import_module(f".{arguments.command}", __package__)
    parser = argparse.ArgumentParser(prog=f"polyconv {arguments.command}", description=COMMANDS[arguments.command])
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments.rest)))


class _Arguments:
    """The first word of the command line, checked; the rest is the subcommand's."""

    def __init__(self, argv: Sequence[str] | None) -> None:
        self.parser = argparse.ArgumentParser(
            prog="polyconv",
            description="torch.nn.Conv2d on kernels of its own",
            epilog="\n".join(f"  {name:<12}{line}" for name, line in COMMANDS.items()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
        self.parser.add_argument("command", nargs="?", choices=sorted(COMMANDS) or None, help="see below")
        self.parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        parsed = self.parser.parse_args(argv)
        self.command: str | None = parsed.command
        self.rest: list[str] = parsed.rest
        if self.command is not None and self.command not in COMMANDS:
            self.parser.error(f"unknown command {self.command!r}; this version has none yet")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ..version import __version__

        print(f"polyconv {__version__}")
        parser.exit()
