"""``polyconv completion``: shell completion script for commands, options and workloads."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from ..util.console import print_json
from ._options import add_examples, add_json_argument

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")
    add_json_argument(parser, "shell and script")
    add_examples(
        parser,
        "polyconv completion bash > ~/.local/share/bash-completion/completions/polyconv",
        "polyconv completion zsh > ~/.zfunc/_polyconv",
        "polyconv completion fish > ~/.config/fish/completions/polyconv.fish",
    )


def run(args: argparse.Namespace) -> int:
    from . import complete_parser

    try:
        shtab: Any = import_module("shtab")
    except ImportError:
        print("polyconv completion: needs shtab, which is not installed: pip install 'polyconv[cli]'", file=sys.stderr)
        return 1
    script = shtab.complete(complete_parser(), shell=args.shell)
    if args.json:
        print_json({"shell": args.shell, "script": script})
    else:
        print(script)
    return 0
