"""The commands, as their own parsers describe them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from importlib import import_module

from polyconv.cli import COMMANDS


def markdown() -> str:
    """A section for each command: what it is for, its usage, its arguments, and what its help ends with."""
    return "\n\n".join("\n\n".join(_section(name, line)) for name, line in COMMANDS.items())


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser that the command line would use."""
    parser = argparse.ArgumentParser(prog=f"polyconv {command}", description=COMMANDS[command])
    import_module(f"polyconv.cli.{command}").add_arguments(parser)
    return parser


def _section(command: str, line: str) -> Iterator[str]:
    parser = parser_of(command)
    yield f"## polyconv {command}"
    yield f"{line[:1].upper()}{line[1:]}."
    yield f"```text\n{_usage(parser)}\n```"
    for group in parser._action_groups:
        rows = [_row(action) for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if rows:
            title = {"positional arguments": "", "options": ""}.get(group.title or "", group.title)
            yield (f"{title[:1].upper()}{title[1:]}:\n\n" if title else "") + "\n".join(
                ["| argument | what it does |", "| --- | --- |", *rows]
            )
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```"


def _usage(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=88)  # type: ignore[assignment]
    return re.sub(r"^usage: ", "", parser.format_usage().strip())


def _row(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or action.metavar or action.dest
    value = ""
    if action.option_strings and action.nargs != 0:
        shown = action.metavar or (
            "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        )
        value = " " + (" ".join(shown) if isinstance(shown, tuple) else str(shown))
    text = (action.help or "") % {"default": action.default, "prog": "polyconv"} if action.help else ""
    return f"| `{names}{value}` | {text} |".replace("|", "\\|").replace("\\|", "|", 1)[:-2] + "|"
