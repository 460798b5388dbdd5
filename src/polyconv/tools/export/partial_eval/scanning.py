"""C++ text of this project, scanned: definitions, brackets, statements."""

from __future__ import annotations

import re
from collections.abc import Iterable

OPENING, CLOSING = "([{", ")]}"
_ANGLES_OF_OPERATORS = re.compile(r"(?<=\s)(?:<<?|>>?)=?(?=\s)|->")


def definitions(text: str) -> list[str]:
    """Split a text into its top-level definitions, each with the comment and the empty line above it."""
    found: list[str] = []
    block: list[str] = []
    for line in text.splitlines(keepends=True):
        block.append(line)
        code = re.sub(r"//.*", "", "".join(block)).strip()
        if code.startswith("#"):
            whole = code.count("#if") == code.count("#endif") and not line.endswith("\\\n")
        else:
            whole = (not code and line == "\n" and len(block) > 1) or (
                code.endswith((";", "}")) and code.count("{") == code.count("}")
            )
        if whole:
            found.append("".join(block))
            block = []
    return [*found, "".join(block)] if block else found


def name_of(definition: str) -> str | None:
    """Name of what a definition defines, or None if it has none (a comment, say)."""
    code = re.sub(r"//.*", "", definition).strip()
    code = re.sub(r"^template <.*?>\s*\n", "", code, flags=re.DOTALL)
    found = (
        re.match(r"(?:struct|enum class|using|#define) (\w+)", code)
        or re.match(r"#if.*\n#define (\w+)", code)
        or re.match(r"enum : \w+ \{ (\w+)", code)
        or re.match(r"(?:static )?constexpr \w+ (\w+)", code)
        or re.match(r"[\w\s:<>*&,()\"]*?[\s*&](\w+)\((?!\d)", code)
    )
    return found.group(1) if found else None


def identifiers(text: str) -> set[str]:
    return set(re.findall(r"\w+", re.sub(r"//.*", "", text)))


def reachable(found: Iterable[str], roots: Iterable[str]) -> list[str]:
    """Definitions that the names in ``roots`` need, transitively, in their original order."""
    listed = list(found)
    names = [name_of(definition) for definition in listed]
    wanted, kept = set(roots), set[int]()
    while True:
        more = {i for i, name in enumerate(names) if name in wanted} - kept
        if not more:
            break
        kept |= more
        wanted = wanted.union(*(identifiers(listed[i]) for i in more))
    found, apart = [], ""  # the empty line above a dropped definition moves to the next kept one
    for i, definition in enumerate(listed):
        apart = apart or definition[: definition.startswith("\n")]
        if i in kept:
            found.append(apart + definition.lstrip("\n"))
            apart = ""
    return found


def closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at ``opening``."""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] in OPENING) - (text[at] in CLOSING)
        if depth == 0:
            return at
    raise ValueError(f"unbalanced: {text[opening : opening + 80]!r}")


def angle(text: str, opening: int) -> int:
    """Index of the ``>`` that closes the template argument list at ``opening``."""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] in "<(") - (text[at] in ">)")
        if depth == 0:
            return at
    raise ValueError(f"unbalanced: {text[opening : opening + 80]!r}")


def split(text: str, separator: str = ",") -> list[str]:
    """Split at separators outside brackets. Arrows and ``<``, ``>`` between spaces are operators, not brackets."""
    operators = {at for found in _ANGLES_OF_OPERATORS.finditer(text) for at in range(*found.span())}
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(text):
        if at not in operators:
            depth = max(0, depth + (character in "<([{") - (character in ">)]}"))
        if character == separator and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    return [*parts, text[begin:].strip()]


def statement(text: str, begin: int) -> int:
    """Index behind the statement that starts at ``begin``."""
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    if text[begin] == "{":
        return closing(text, begin) + 1
    head = re.compile(r"(?:UNROLL )?(?:for|while|if(?: constexpr)?) \(").match(text, begin)
    if head:
        end = statement(text, closing(text, head.end() - 1) + 1)
        other = re.compile(r"\s*else\b").match(text, end) if " if" in f" {head.group()}" else None
        return statement(text, other.end()) if other else end
    at = begin
    while text[at] != ";":
        at = closing(text, at) if text[at] in OPENING else at
        at += 1
    return at + 1
