"""Branches, loops and variables that constants settle."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .constants import evaluated
from .scanning import CLOSING, OPENING, closing, identifiers, split, statement


def simplified(text: str, constants: Mapping[str, int]) -> str:
    """Substitute constants equal to 0 or 1, and remove loops of one iteration and dimensions of size 1."""
    for name, value in constants.items():
        if "::" in name and value in (0, 1):
            text = re.sub(rf"\b{name}\b", str(value), text)
    inside = "    " if re.search("^struct ", text, re.MULTILINE) else "  "
    for kind, declared in re.findall(
        rf"^{inside} *(const(?:expr)?) (?:int|bool|i64|u32) (\w[^;{{]*);", text, re.MULTILINE
    ):
        for part in split(declared):
            name, _, expression = part.partition(" = ")
            if (
                kind == "const"
                and expression in "01"
                and {*re.findall(rf"\b{name} =\s+([^,;]*)", text)} == {expression}
            ):
                text = _without_constant(text, name, int(expression))
            elif kind == "constexpr" and constants.get(name) in (0, 1) and not expression.isdigit():
                text = _without_constant(text, name, constants[name])
    return _without_unit_dimensions(_without_single_turns(text, constants))


def _without_constant(text: str, name: str, value: int) -> str:
    lines = (line.partition("//") for line in _without_declaration(text, name).split("\n"))
    uses = re.compile(rf"(?<![\w.:]){name}\b")
    return "\n".join(uses.sub(str(value), code) + slashes + comment for code, slashes, comment in lines)


def _without_declaration(text: str, name: str) -> str:
    value = r"(?:[^,;()]|\([^()]*\))*"
    text = re.sub(rf"^ +(?:static )?const(?:expr)? \w+ {name} = {value};.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(rf"(const(?:expr)? \w+ ){name} = {value},\s+", r"\1", text)
    return re.sub(rf"(?<=,)(\s+){name} = {value},\s+", r"\1", re.sub(rf",\s+{name} = {value}(?=;)", "", text))


def _without_single_turns(text: str, constants: Mapping[str, int]) -> str:
    """Replace loops of one iteration by their body."""
    head = re.compile(
        r"(?:#pragma unroll \d+(?: +//.*)?\n *|UNROLL )?for \(int (\w+) = ([^;]+); \1 < ([^;]+); \1\+\+\)\s*"
    )
    at = 0
    while found := head.search(text, at):
        name, first, last = found.groups()
        last, _, condition = last.partition(" && ")
        begin, end = evaluated(first, constants), evaluated(last, constants)
        if condition and evaluated(condition.removeprefix("(").removesuffix(")"), constants) != 1:
            end = None
        at = found.start() + 1
        if begin is not None and end is not None and end - begin == 1:
            behind = statement(text, found.end())
            body = re.sub(rf"(?<![\w.]){name}\b", str(begin), _unwrapped(text[found.end() : behind]))
            declared = set(re.findall(r"(?:^|;\s+)(?:const |float|int)[\w:<> ]*[ &*](\w+)(?: =|\[)", body))
            begin_of, end_of = text.rfind("__device__", 0, found.start()), text.find("__device__", behind)
            if not declared & identifiers(
                text[max(begin_of, 0) : found.start()] + text[behind : end_of if end_of > 0 else None]
            ):
                indent = "  " if text[found.start()] == "#" else ""
                before = text[: found.start()]
                if before.rstrip()[-1] == ")" and ";\n" in body:  # the loop was the unbraced body of a statement
                    space = before[before.rindex("\n") :]
                    before, body = before.rstrip() + " {" + space, body + space[:-2] + "}"
                text = before + indent + body + text[behind:]
    return text


def _without_unit_dimensions(text: str) -> str:
    for name, dimensions in re.findall(r"\bfloat (\w+)((?:\[[^\]]+\])+)(?: = \{\})?;", text):
        sizes = re.findall(r"\[([^\]]+)\]", dimensions)
        uses = [re.findall(r"\[([^\[\]]+)\]", use) for use in re.findall(rf"\b{name}((?:\[[^\[\]]+\])+)", text)]
        if len(uses) < len(re.findall(rf"\b{name}\b", text)):  # also used without subscripts
            continue
        for i, size in reversed(list(enumerate(sizes))):
            if size == "1" and all(use == sizes or use[i : i + 1] == ["0"] for use in uses):
                text = re.sub(rf"\b({name}(?:\[[^\[\]]+\]){{{i}}})\[[01]\]", r"\1", text)
    return text


def without_unused(text: str, everything: str) -> str:
    """Drop variables without further uses in the function, and struct members without uses in ``everything``."""
    kinds = r"(?:const |static )*(?:float[24]?|int|bool|i64|u32)\*? (?:const )?"
    declared = re.compile(rf"^ +{kinds}(\w+)(?:\[[^;]*\])?(?: = [^;{{]*)?;.*\n", re.MULTILINE)
    scope = re.sub(r"//.*", "", everything if re.search(r"^struct ", text, re.MULTILINE) else text)

    def kept(found: re.Match[str]) -> str:
        return found.group() if len(re.findall(rf"\b{found.group(1)}\b", scope)) > 1 else ""

    text = declared.sub(kept, text)
    made = re.search(r"\n\n  const \w+ (\w+)\(p\);\n\}\n$", text)  # constructed at the end of a function, hence unused
    text = text[: made.start()] + "\n}\n" if made else text
    for several in re.findall(r"^ +const (?:int|i64|u32) (\w[^;{]*,[^;{]*);", text, re.MULTILINE):
        for part in split(several):
            name = part.partition(" = ")[0]
            if len(re.findall(rf"\b{name}\b", scope)) == 1:
                text = _without_declaration(text, name)
    return text


_COPY = re.compile(r"(?<=\n) +const (?:int|u32) (?:\w[^;{]*, )?(\w+) = ([a-z]\w*)(?=[,;])")


def without_copies(text: str) -> str:
    """Substitute ``const`` integers that copy another variable, if neither it nor the sign of the type can matter."""
    at = 0
    while found := _COPY.search(text, at):
        name, original = found.groups()
        rest = _rest_of_block(text[found.start() :])
        block = text[found.start() : len(text) - len(rest)]
        code = re.sub(r"//.*", "", block)
        variable = rf"(?<![\w.]){original}\b"
        changes = (
            rf"{variable} (?:[-+*/%|&^]|<<|>>)?=(?!=)|{variable}(?:\+\+|--)|(?:\+\+|--){original}\b|^ +\w+\(.*\);$"
        )
        signed = rf"(?:[/%<>]=?|>>) {name}\b|\b{name} (?:[/%<>]=?|>>)|(?:i64|float|double)\({name}\b"
        if re.search(rf"{changes}|{signed}", code, re.MULTILINE):
            at = found.end()
            continue
        block = re.sub(rf"(?<![\w.]){name}\b", original, _without_declaration(block, name))
        text, at = text[: found.start()] + block + rest, found.start()
    return text


def folded(text: str, constants: Mapping[str, int]) -> str:
    """Resolve branches on constants and drop static assertions."""
    text = _without_assertions(text)
    at = 0
    head = re.compile(r"\bif (?:constexpr )?\(")
    while found := head.search(text, at):
        end = closing(text, found.end() - 1)
        outcome = evaluated(text[found.end() : end], constants)
        if outcome is None:
            at = found.end()
            continue
        yes_end = statement(text, end + 1)
        other = re.compile(r"\s*else\b").match(text, yes_end)
        no_end = statement(text, other.end()) if other else yes_end
        taken = text[end + 1 : yes_end] if outcome else text[other.end() : no_end] if other else ""
        before, after = text[: found.start()], text[no_end:]
        if taken.strip().startswith("return"):  # the rest of the block is unreachable
            after = "\n" + _rest_of_block(after)
        if not taken.strip():
            before, after = before.rstrip(" "), re.sub(r"^[^\n]*\n", "", after)
        text = before + _unwrapped(taken) + after
        at = len(before)
    return _choices(text, constants)


def _rest_of_block(text: str) -> str:
    """The text from the bracket on, with its indentation, that closes the block in which the text starts."""
    depth = 0
    for at, character in enumerate(text):
        depth += (character in OPENING) - (character in CLOSING)
        if depth < 0:
            return text[text.rfind("\n", 0, at) + 1 :]
    raise ValueError("not in a block")


def _without_assertions(text: str) -> str:
    while found := re.search(r"^ *static_assert\(", text, re.MULTILINE):
        end = closing(text, found.end() - 1) + 1
        text = text[: found.start()] + re.sub(r"^;[^\n]*\n", "", text[end:])
    return text


def _unwrapped(taken: str) -> str:
    """A branch in place of the whole ``if``: without its braces, one level less indented."""
    taken = taken.strip()
    if not taken.startswith("{"):
        return taken
    body = taken[1:-1].strip("\n")
    lines = [line.removeprefix("  ") for line in body.rstrip().split("\n")]
    return "\n".join(lines).lstrip()


def _choices(text: str, constants: Mapping[str, int]) -> str:
    """Resolve ``constant ? a : b``."""
    at = 0
    while (mark := text.find(" ? ", at)) >= 0:
        begin = mark
        depth = 0
        while begin > 0:
            before = text[begin - 1]
            if before in CLOSING:
                depth += 1
            elif before in OPENING:
                if depth == 0:
                    break
                depth -= 1
            elif depth == 0 and (
                before in ",;?" or re.search(r"(?:[^=!<>]= |return |: )$", text[max(0, begin - 8) : begin])
            ):
                break
            begin -= 1
        outcome = evaluated(text[begin:mark], constants)
        if outcome is None:
            at = mark + 3
            continue
        yes_end = _until(text, mark + 3, ":")
        no_end = _until(text, yes_end + 1, ",;:")
        kept = text[mark + 3 : yes_end] if outcome else text[yes_end + 1 : no_end]
        lead = text[begin:mark][: len(text[begin:mark]) - len(text[begin:mark].lstrip())]
        text = text[:begin] + lead + kept.strip() + text[no_end:]
        at = begin
    return text


def _until(text: str, at: int, ends: str) -> int:
    """End of an operand: one of ``ends`` outside brackets (``::`` is not a ``:``), or the bracket that closes it."""
    nested = 0
    while at < len(text):
        if text[at] in OPENING:
            at = closing(text, at)
        elif text[at] in CLOSING:
            return at
        elif text[at : at + 2] == "::":
            at += 1
        elif text[at] == "?":
            nested += 1
        elif text[at] in ends:
            if text[at] != ":" or nested == 0:
                return at
            nested -= 1
        at += 1
    return at
