"""The settings, from the docstrings of their fields."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path

import griffe

from polyconv.settings import PREFIX, Settings


def markdown() -> str:
    """A table: variable, what it does, default."""
    source = griffe.load("polyconv.settings.Settings", search_paths=[str(Path(__file__).parents[2] / "src")])
    lines = ["| variable | setting | default | what it does |", "| --- | --- | --- | --- |"]
    for field in fields(Settings):
        docstring = source.members[field.name].docstring
        words = " ".join((docstring.value if docstring else "").split())
        words = re.sub(rf"^`*{PREFIX}{field.name.upper()}`*:\s*", "", words)
        default = "see there" if field.default is MISSING else str(field.default)
        lines.append(f"| `{PREFIX}{field.name.upper()}` | `{field.name}` | {default} | {words} |")
    return "\n".join(lines)
