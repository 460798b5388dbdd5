"""Integer constants of a text: which there are, their values, and putting these in place of their names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .scanning import name_of, split


def evaluated(expression: str, constants: Mapping[str, int]) -> int | None:
    """Value of an expression, or None if it is not constant."""
    expression = re.sub(r"//.*", "", expression).strip()
    for operator, decisive in (("||", 1), ("&&", 0)):
        operands = expression.split(f" {operator} ")
        if len(operands) > 1 and "?" not in expression and all(one.count("(") == one.count(")") for one in operands):
            if decisive in (evaluated(one, constants) for one in operands):
                return decisive
            break
    unknown = False

    def value(found: re.Match[str]) -> str:
        nonlocal unknown
        name = found.group()
        if name in ("true", "false"):
            return name.capitalize()
        unknown |= name not in constants
        return str(constants.get(name, 0))

    python = re.sub(r"(?<![\w.])[A-Za-z_][\w:.]*", value, expression)
    if unknown or re.search(r"[^\w\s+\-*/%()<>=!&|?:.]|\d\.", python) or not python.strip():
        return None
    if "?" in python:
        condition, rest = python.split("?", 1)
        yes, _, no = rest.partition(":")
        chosen = evaluated(condition, {})
        return None if chosen is None or "?" in yes else evaluated(yes if chosen else no, {})
    python = re.sub(r"!(?!=)", " not ", python.replace("&&", " and ").replace("||", " or ")).replace("/", "//")
    try:
        return int(eval(python.strip(), {"__builtins__": {}}))
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None


def is_constant(definition: str) -> bool:
    """Whether a definition is a global constant or enum."""
    code = re.sub(r"^//.*\n", "", definition.lstrip("\n"), flags=re.MULTILINE).lstrip("\n")
    return re.match(r"(?:constexpr|enum) ", code) is not None


def constants_of(text: str, known: Mapping[str, int]) -> dict[str, int]:
    """``known`` and the values of a text's ``constexpr`` and enum declarations that can be evaluated."""
    found = dict(known)
    for name, enumerators in re.findall(r"\benum class (\w+) \{ ([\w, ]+) \};", text):
        found |= {f"{name}::{each}": value for value, each in enumerate(split(enumerators))}
    found |= {name: int(value) for name, value in re.findall(r"\benum : int \{ (\w+) = (\d+) \};", text)}
    for declaration in re.finditer(r"\bconstexpr (?:int|bool) ([^;()]*(?:\([^;]*?\)[^;()]*)*);", text):
        for part in split(re.sub(r"//.*", "", declaration.group(1))):
            name, _, expression = part.partition("=")
            value = evaluated(expression, found) if expression else None
            if value is not None:
                found[name.strip()] = value
    return found


def constants_by_part(parts: list[str], known: Mapping[str, int]) -> list[dict[str, int]]:
    """Constants visible in each definition: global ones, its own, and those of structs by qualified name."""
    everywhere = dict(known)
    for part in parts:
        if is_constant(part):
            everywhere = constants_of(part, everywhere)
    for _ in range(2):  # a struct may use constants of one defined below it
        for part in parts:
            name = name_of(part)
            if re.search(r"^struct ", part, re.MULTILINE):
                own = {key: value for key, value in constants_of(part, everywhere).items() if key not in everywhere}
                everywhere |= {f"{name}::{key}": value for key, value in own.items()}
    return [constants_of(part, everywhere | _through_aliases(part, everywhere)) for part in parts]


def _through_aliases(part: str, constants: Mapping[str, int]) -> dict[str, int]:
    """Constants of templates, qualified by a part's aliases; they do not depend on the template arguments."""
    aliases = re.findall(r"\busing (\w+) = (\w+)<", part)
    return {
        f"{alias}::{name.removeprefix(f'{struct}::')}": value
        for alias, struct in aliases
        for name, value in constants.items()
        if name.startswith(f"{struct}::")
    }


def with_constant_arguments(text: str, constants: Mapping[str, int]) -> str:
    """Replace template arguments that name a constant by its value."""

    def value(found: re.Match[str]) -> str:
        return f"{found.group(1)}<{constants.get(found.group(2), found.group(2))}>"

    return re.sub(r"\b([a-z]\w*)<(k\w+)>", value, text)


def with_values(text: str, constants: Mapping[str, int], used: str) -> str:
    """Replace a struct's constants by numbers and drop those that the text ``used`` does not name."""
    lines: list[str] = []
    for line in text.split("\n"):
        flags = re.match(r"(\s+static constexpr bool )([^;]*);", line)
        if flags:
            named = split(flags.group(2))
            kept = [one for one in named if len(re.findall(rf"\b{one.partition(' =')[0]}\b", used)) > 1]
            if kept:
                lines.append(line if kept == named else f"{flags.group(1)}{', '.join(kept)};")
            continue
        found = re.fullmatch(r"(\s+)static constexpr int ([^;]*);(?:  //.*)?", line)
        parts = [part.partition(" = ")[::2] for part in split(found.group(2))] if found else []
        values = {name: evaluated(value, constants) for name, value in parts}
        if found is None or None in values.values():
            lines.append(line)
            continue
        left = [f"{name} = {value}" for name, value in values.items() if len(re.findall(rf"\b{name}\b", used)) > 1]
        if not left:
            continue
        more = f"{lines[-1][:-1]}, {', '.join(left)};" if lines else ""
        last = lines[-1] if lines else ""
        if re.match(rf"{found.group(1)}static constexpr int [^;]*;$", last) and len(more) <= 120:
            lines[-1] = more
        else:
            lines.append(f"{found.group(1)}static constexpr int {', '.join(left)};")
    return "\n".join(lines)


def with_functions_of_constants(texts: list[str]) -> list[str]:
    """Inline ``constexpr`` functions of one ``int`` whose body is a single expression."""
    for name, parameter, expression in re.findall(
        r"^__device__ constexpr int (\w+)\(int (\w+)\) \{\n  return ([^;]+);\n\}", "".join(texts), re.MULTILINE
    ):
        call = re.compile(rf"(?<== ){name}\(([\w *]+)\)(?=;)")
        inserted = re.sub(rf"\b{parameter}\b", r"\\1", expression)
        texts = [call.sub(inserted, text) for text in texts]
    return texts
