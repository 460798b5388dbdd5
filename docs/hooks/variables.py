"""The settings, from the docstrings of their fields."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import griffe
from docstrings import as_markdown

from polyconv.settings import PREFIX, Settings

MIB = 2**20


def markdown() -> str:
    """A list: variable, default, what it does."""
    source = griffe.load("polyconv.settings.Settings", search_paths=[str(Path(__file__).parents[2] / "src")])
    entries = []
    for field in fields(Settings):
        variable = PREFIX + field.name.upper()
        docstring = source.members[field.name].docstring
        words = " ".join(as_markdown(docstring.value if docstring else "").split())
        words = re.sub(rf"^`*{variable}`*[^:]*:\s*", "", words)
        entries.append(f"`{variable}`{_default(field)}\n:   {words[:1].upper()}{words[1:]}")
    return "\n\n".join(entries)


def _default(field: Field[Any]) -> str:
    """In brackets; nothing where there is none that can be said in a word."""
    value = field.default
    if value is MISSING or value is None:
        return ""
    if isinstance(value, bool):
        return f" ({'on' if value else 'off'})"
    return f" ({value // MIB} MiB)" if isinstance(value, int) and value % MIB == 0 else f" ({value:g})"
