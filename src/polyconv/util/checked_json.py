"""Untrusted JSON files, which may be edited or damaged: read with limits, and checked value by value.

Every defect raises a :class:`DocumentError` with its position, and nothing else is raised: nesting that would exhaust
the stack, numbers that no float holds, a duplicate key, text that cannot be encoded.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite
from typing import Any

DEEPEST = 32
"""Most levels of objects and lists; polyconv's files have five. The parser's own limit is that of the interpreter's
stack, or higher if a program has raised the recursion limit."""
LONGEST_NUMBER = 40
"""Most characters of a number; those that Python writes have at most 24."""
LARGEST_WHOLE = 2**63
"""Bound on integers, so that a float and every other program can hold them."""

_BRACKETS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(_BRACKETS)))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class DocumentError(ValueError):
    """Invalid contents of a file. The message names the file and the position in it."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value in a file and its position. Each method returns it as the expected type, or raises."""

    found: Any
    file: str
    """Name of the file in messages."""
    where: str = ""
    """Position such as ``sections[0].entries``; empty for the whole file."""

    def members(self) -> dict[str, Value]:
        """Values of an object by name."""
        return {name: Value(each, self.file, self.where + _step(name)) for name, each in self.object().items()}

    def member(self, name: str) -> Value:
        """A required value of an object."""
        found = self.object()
        if name not in found:
            raise self.wrong(f'it has no "{name}"')
        return Value(found[name], self.file, self.where + _step(name))

    def optional(self, name: str, default: Any) -> Value:
        """An optional value of an object."""
        return self.member(name) if name in self.object() else Value(default, self.file, self.where + _step(name))

    def items(self) -> list[Value]:
        """Values of a list."""
        self._expect(list, "a list")
        return [Value(each, self.file, f"{self.where}[{place}]") for place, each in enumerate(self.found)]

    def object(self) -> Mapping[str, Any]:
        """An object, with unchecked values."""
        self._expect(dict, "an object")
        return self.found  # type: ignore[no-any-return]

    def text(self) -> str:
        """A printable text: without control characters, which a terminal would obey."""
        self._expect(str, "a text")
        if not self.found.isprintable():
            raise self.wrong("expected a text without control characters")
        return str(self.found)

    def number(self) -> float:
        self._expect((int, float), "a number")
        return float(self.found)

    def is_whole(self, number: int) -> bool:
        """Whether it is this integer. ``true`` is not 1."""
        return type(self.found) is int and self.found == number

    def wrong(self, problem: str) -> DocumentError:
        """The error to raise for this value."""
        place = self.where.removeprefix(".")
        return DocumentError(f"{self.file} is damaged: {place + ': ' if place else ''}{problem}")

    def _expect(self, kind: type | tuple[type, ...], expected: str) -> None:
        if not isinstance(self.found, kind) or isinstance(self.found, bool):
            raise self.wrong(f"expected {expected}, found {_kind(self.found)}")


def parse(data: bytes, file: str) -> Value:
    """Parse the contents of a file, called ``file`` in messages."""
    if data.startswith(b"\xef\xbb\xbf"):
        raise DocumentError(f"{file} begins with a byte order mark: save it as UTF-8 without one")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(f"{file} is not UTF-8 text: {error}") from None
    if _depth(text) > DEEPEST:
        raise DocumentError(f"{file} is nested more than {DEEPEST} levels deep")
    try:
        found = json.loads(
            text, object_pairs_hook=_object, parse_int=_whole, parse_float=_real, parse_constant=_constant
        )
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise DocumentError(f"{file} is not JSON: half of a surrogate pair stands for no character") from None
    except ValueError as error:
        raise DocumentError(f"{file} is not JSON: {error}") from None
    return Value(found, file)


def parse_versioned(data: bytes, file: str, kind: str, schema: int) -> Value:
    """Parse a file with a schema and a format, ``"format": "polyconv tuning"`` for the kind ``tuning``."""
    found = parse(data, file)
    if not isinstance(found.found, dict) or found.found.get("format") != f"polyconv {kind}":
        raise DocumentError(f'{file} is not a {kind} file of polyconv\'s: it has no "format": "polyconv {kind}"')
    version = found.member("schema")
    if not version.is_whole(schema):
        raise DocumentError(f"{file} has schema {version.number():g}; this version of polyconv reads {schema}")
    return found


def _depth(text: str) -> int:
    """Nesting depth of brackets outside strings. Exact for as much of the text as the parser would read."""
    without_escapes = text.replace("\\\\", "").replace('\\"', "")
    outside = "".join(without_escapes.split('"')[::2])
    brackets = outside.encode().translate(None, delete=_NO_BRACKETS)
    return max(accumulate(_BRACKETS[bracket] for bracket in brackets), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has {_quoted(twice)} twice")
    return found


def _whole(text: str) -> int:
    number = int(text) if len(text) <= LONGEST_NUMBER else LARGEST_WHOLE
    if abs(number) >= LARGEST_WHOLE:
        raise ValueError(f"the number {text[:LONGEST_NUMBER]} is too large")
    return number


def _real(text: str) -> float:
    number = float(text) if len(text) <= LONGEST_NUMBER else float("inf")
    if not isfinite(number):
        raise ValueError(f"the number {text[:LONGEST_NUMBER]} is too large")
    return number


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")


def _step(name: str) -> str:
    return f".{name}" if _NAME.fullmatch(name) and len(name) <= 40 else f"[{_quoted(name)}]"


def _quoted(name: str) -> str:
    return json.dumps(name if len(name) <= 60 else f"{name[:60]}...")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return kinds.get(type(value), "a number")
