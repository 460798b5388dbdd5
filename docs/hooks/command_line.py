"""The commands, as their own parsers describe them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import groupby
from textwrap import dedent, wrap

from polyconv.cli import COMMANDS, command_parser

WIDTH = 84
"""Characters that a page shows without scrolling."""
UNTITLED = ("positional arguments", "options")
"""argparse's own names of groups, which say nothing on a page."""


def markdown() -> str:
    """A section for each command: what it is for, its usage, its arguments, and what its help ends with."""
    return "\n\n".join("\n\n".join(_section(name, line)) for name, line in COMMANDS.items())


def _section(command: str, line: str) -> Iterator[str]:
    parser = command_parser(command)
    yield f"## polyconv {command}"
    yield f"{line[:1].upper()}{line[1:]}."
    yield f"```text\n{_usage(parser)}\n```"
    yield from _arguments(parser._action_groups)
    about, _, examples = (parser.epilog or "").partition("examples:\n")
    if about.strip():
        yield f"```text\n{_reflowed(about.strip())}\n```"
    if examples.strip():
        yield f"```bash\n{dedent(examples).strip()}\n```"


def _usage(parser: argparse.ArgumentParser) -> str:
    formatter = argparse.HelpFormatter(parser.prog, width=WIDTH)
    formatter.add_usage(None, parser._actions, parser._mutually_exclusive_groups, prefix="")
    return formatter.format_help().strip()


def _reflowed(text: str) -> str:
    """Lines that are too wide for a page, folded together with those of the same paragraph and indent."""
    folded: list[str] = []
    for indent, lines in groupby(text.splitlines(), key=lambda line: line[: len(line) - len(line.lstrip())]):
        for blank, run in groupby(lines, key=lambda line: not line.strip()):
            part = list(run)
            if not blank and max(map(len, part)) > WIDTH:
                words = " ".join(line.strip() for line in part)
                part = wrap(words, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
            folded += part
    return "\n".join(folded)


def _arguments(groups: list[argparse._ArgumentGroup]) -> Iterator[str]:
    """One table for what argparse sorts into its own groups, one for each group with a title."""
    tables: dict[str, list[str]] = {"": []}
    for group in groups:
        title = "" if group.title in UNTITLED else group.title or ""
        shown = [a for a in group._group_actions if a.help is not argparse.SUPPRESS and a.dest != "help"]
        tables.setdefault(title, []).extend(map(_row, shown))
    for title, rows in tables.items():
        if title:
            yield f"{title[:1].upper()}{title[1:]}:"
        if rows:
            yield "\n".join(["| argument | what it does |", "| --- | --- |", *rows])


def _row(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    words = (action.help or "") % {"default": action.default, "prog": "polyconv"}
    return f"| `{_cell(names + _value(action))}` | {_cell(words)} |"


def _value(action: argparse.Action) -> str:
    """What stands behind an option."""
    if not action.option_strings or action.nargs == 0:
        return ""
    if action.metavar is not None:
        return " " + (" ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar)
    return " {" + ",".join(map(str, action.choices)) + "}" if action.choices else f" {action.dest.upper()}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
