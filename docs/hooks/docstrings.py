"""Docstrings as the code has them, for readers of the site: a griffe extension.

The package writes ``:func:`polyconv.replace``` where it names something and ``Examples::`` before code, which every
Python programmer reads without a tool. mkdocstrings wants Markdown, so this turns the one into the other.
"""

from __future__ import annotations

import re
from textwrap import dedent, indent
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(?P<short>~?)(?P<name>[^`]+)`")
_LITERAL = re.compile(r"^(?P<lead>[^\n]*)::\n\n(?P<body>(?:[ \t]+[^\n]*\n|\n)+)", re.MULTILINE)
_SEVERAL = re.compile(r"^(?P<pad>[ ]{4,})(?P<names>\w+(?:, \w+)+): (?P<rest>.*(?:\n(?P=pad)[ ]+.*)*)$", re.MULTILINE)


def _code(match: re.Match[str]) -> str:
    """``Words::`` and an indented block: the words and a block of Python."""
    return f"{match['lead']}:\n\n```python\n{dedent(match['body']).strip()}\n```\n\n"


def _name(match: re.Match[str]) -> str:
    name = match["name"]
    return f"`{name.rpartition('.')[2] if match['short'] else name}`"


def _each(match: re.Match[str]) -> str:
    """``a, b: words`` in a list of arguments: an entry for each."""
    return "\n".join(indent(f"{name}: {match['rest']}", match["pad"]) for name in match["names"].split(", "))


def as_markdown(docstring: str) -> str:
    """The same words in Markdown."""
    text = docstring + "\n"
    for pattern, written in ((_ROLE, _name), (_LITERAL, _code), (_SEVERAL, _each)):
        text = pattern.sub(written, text)
    return text.strip()


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
