"""The settings, from the docstrings of their fields."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import griffe

from polyconv.settings import PREFIX, Settings

MIB = 2**20


def markdown() -> str:
    """A table: variable, what it does, default."""
    source = griffe.load("polyconv.settings.Settings", search_paths=[str(Path(__file__).parents[2] / "src")])
    lines = ["| variable | default | what it does |", "| --- | --- | --- |"]
    for field in fields(Settings):
        variable = PREFIX + field.name.upper()
        docstring = source.members[field.name].docstring
        words = " ".join((docstring.value if docstring else "").split())
        words = re.sub(rf"^`*{variable}`*[^:]*:\s*", "", words)
        lines.append(f"| `{variable}` | {_default(field)} | {words[:1].upper()}{words[1:]} |")
    return "\n".join(lines)


def _default(field: Field[Any]) -> str:
    value = field.default
    if value is MISSING or value is None:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value % MIB == 0:
        return f"{value // MIB} MiB"
    return str(value)
