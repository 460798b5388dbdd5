"""Python text around an exported file's CUDA sources: templates filled, lines wrapped as ruff formats them."""

from __future__ import annotations

import ast
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping
from keyword import iskeyword
from pathlib import Path

from .models import ExportError, Layer, Model


def filled(template: Path, parts: Mapping[str, str]) -> str:
    """A template with its ``@PLACEHOLDERS@`` replaced."""
    text = template.read_text(encoding="utf-8")
    return re.sub(r"@([A-Z_]+)@", lambda found: parts[found.group(1)], text)


def with_class_name(template: Path, parts: Mapping[str, str], name: str) -> str:
    """A template with its placeholders and ``@CLASS@`` replaced; :class:`ExportError` if the name cannot be used."""
    plain_name = unicodedata.normalize("NFKC", name)  # as Python normalises identifiers
    if not name.isidentifier() or iskeyword(plain_name) or plain_name.startswith("__"):
        raise ExportError(f"{name!r} is no name for a class")
    if plain_name in _names(filled(template, {**parts, "CLASS": "_"})):
        raise ExportError(f"the file itself uses the name {name!r} for something else: choose another one")
    return filled(template, {**parts, "CLASS": name})


def _names(text: str) -> set[str]:
    """Names that a program reads, writes, defines or imports, except attributes."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return found


def module_parts(model: Model, *, sourced: bool) -> dict[str, str]:
    """Placeholders of the module class that both kinds of file have.

    ``sourced``: a layer's first argument is the name of its sources.
    """
    forward = "x"
    for layer in model.layers:
        forward = f"self.{layer.attribute}({forward})"
    return {
        "INPUTS": ", ".join(map(str, model.inputs)),
        "SIGNATURE": _signature(model),
        "LAYERS": "\n".join(_layer(layer, sourced) for layer in model.layers),
        "FORWARD": forward,
        "INIT": model.init_inputs,
    }


def default_arch(arch: str) -> str:
    """Line that sets ``TORCH_CUDA_ARCH_LIST`` where it is unset, if there is such a default."""
    return f'\nos.environ.setdefault("TORCH_CUDA_ARCH_LIST", "{arch}")\n' if arch else ""


def wrapped(text: str) -> str:
    return textwrap.fill(text, 117, break_on_hyphens=False, break_long_words=False)


def source_name(layer: Layer) -> str:
    return layer.attribute.upper()


def _signature(model: Model) -> str:
    head, tail = "    def _make(", "):"
    return _fitted(head, ("self", *model.signature), tail).removeprefix(head).removesuffix(tail)


def _layer(layer: Layer, sourced: bool) -> str:
    arguments = (*([source_name(layer)] if sourced else []), *re.split(r", (?![^(]*\))", layer.arguments))
    return _fitted(f"        self.{layer.attribute} = {layer.module}(", arguments, ")")


def _fitted(opening: str, items: Iterable[str], closing: str) -> str:
    """Format as ruff does: all on one line, the items on a line of their own, or one item per line."""
    listed = list(items)
    joined = ", ".join(listed)
    indent = " " * (len(opening) - len(opening.lstrip()))
    if len(opening + joined + closing) <= 120:
        return opening + joined + closing
    if len(indent + joined) + 4 <= 120:
        return f"{opening}\n{indent}    {joined}\n{indent}{closing}"
    lines = "".join(f"{indent}    {item},\n" for item in listed)
    return f"{opening}\n{lines}{indent}{closing}"
