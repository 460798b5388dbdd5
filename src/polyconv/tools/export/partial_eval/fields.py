"""Launch parameters with a fixed value, in kernels and host functions."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .layout import wrapped
from .scanning import closing, split


def with_fixed_parameters(text: str, fixed: Mapping[str, str]) -> str:
    """Replace ``p.field`` by its value; a ``quotient()`` becomes a division, or the dividend if the divisor is 1."""
    for name, value in fixed.items():
        if value == "1":
            divisor = rf"p\.{name}\.divisor"
            text = re.sub(rf"[\w.]+ - (?:\w+ \* {divisor}|int\(\w+ \* {divisor}\)|\w+ \* int\({divisor}\))", "0", text)
        at = 0
        call = re.compile(rf"\bp\.{name}\.quotient\(")
        while found := call.search(text, at):
            end = closing(text, found.end() - 1)
            dividend = text[found.end() : end]
            quotient = dividend if value == "1" else f"u32({dividend}) / {value}"
            text = text[: found.start()] + quotient + text[end + 1 :]
            at = found.start()
        text = re.sub(rf"\bint\(p\.{name}\.divisor\)", value, text)
        text = re.sub(rf"\bp\.{name}\[\w+\]", value, text)  # a table of one element
        text = re.sub(rf"\bp\.{name}(?:\.divisor)?\b(?!\[|\.)", value, text)
    return text


def without_assignments(text: str, fixed: Mapping[str, Mapping[str, str]]) -> str:
    """A host function without its assignments to fixed parameters."""
    structs = {name: kind for kind, name in re.findall(r"\b(\w+Params) (\w+)(?:\{[^;]*\};|\))", text)}

    def stays(target: str) -> bool:
        variable, _, field = target.strip().partition(".")
        return re.sub(r"\W.*", "", field) not in fixed.get(structs.get(variable, ""), {})

    def rewritten(found: re.Match[str]) -> str:
        space, body = found.groups()
        parts = []
        for part in split(body):
            *targets, value = part.split(" = ")
            if left := [target for target in targets if stays(target)]:
                parts.append(" = ".join([*left, value]))
        return wrapped(f"{space}{', '.join(parts)};\n") if parts else ""

    if not structs:
        return text
    names = "|".join(structs)
    text = re.sub(rf"^( +)((?:{names})\.\w+(?:\[\w+\])? = [^;]*);\n", rewritten, text, flags=re.MULTILINE)
    text = re.sub(r"^ +for \([^{}]*\{\n +\}\n", "", text, flags=re.MULTILINE)
    lines: list[str] = []
    for line in text.split("\n"):
        found = re.match(rf"( +)(?:{names})\.\w+ = ", line)
        more = f"{lines[-1][:-1]}, {line.lstrip()}" if lines else ""
        if found and re.match(rf"{found.group(1)}(?:{names})\.\w+ = .*;$", lines[-1]) and len(more) <= 120:
            lines[-1] = more  # merge the remaining assignments into full lines
        else:
            lines.append(line)
    return "\n".join(lines)
