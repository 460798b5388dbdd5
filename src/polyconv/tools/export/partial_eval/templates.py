"""Template parameters, aliases and struct members that have one value in the whole text."""

from __future__ import annotations

import re

from .scanning import angle, identifiers, name_of, split

_TEMPLATE = re.compile(r"^template <(.*?)>\s*\n", re.MULTILINE | re.DOTALL)


def without_settled_parameters(texts: list[str], types: set[str]) -> list[str]:
    """Substitute template parameters with one argument in all uses. Names in ``types`` are not template parameters."""
    types = types | {name for text in texts if (name := name_of(text)) is not None}
    while True:
        texts = _without_members([without_aliases(text, types) for text in texts], types)
        for number, text in enumerate(texts):
            head = _TEMPLATE.search(text)
            name = name_of(text) if head else None
            if head is None or name is None:
                continue
            parameters = [part.split() for part in split(head.group(1))]
            named = [other for other in texts if f"{name}<" in other]
            uses = [_arguments(other, use.end() - 1) for other in named for use in _uses(name, other)]
            for i, (*_, parameter) in enumerate(parameters):
                given = {use[i] if i < len(use) else None for use in uses}
                argument = next(iter(given)) if len(given) == 1 else None
                if argument is not None and _is_closed(argument, types):
                    texts = _settled(texts, number, name, i, parameter, argument)
                    break
            else:
                continue
            break
        else:
            return texts


def _is_closed(argument: str, types: set[str]) -> bool:
    """Whether an argument has one meaning in every scope: it names no template parameter."""
    named = re.findall(r"(?<!::)\b[A-Za-z_]\w*", argument)
    return set(named) <= types | {"true", "false"}


def _uses(name: str, text: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"\b{name}<", text))


def _arguments(text: str, opening: int) -> list[str]:
    return split(text[opening + 1 : angle(text, opening)])


def _settled(texts: list[str], number: int, name: str, i: int, parameter: str, argument: str) -> list[str]:
    head = _TEMPLATE.search(texts[number])
    assert head is not None
    rest = [part for n, part in enumerate(split(head.group(1))) if n != i]
    before, after = texts[number][: head.start()], texts[number][head.end() :]
    after = "\n".join(
        re.sub(rf"(?<![\w.:]){parameter}\b", argument, code) + slashes + comment
        for code, slashes, comment in (line.partition("//") for line in after.split("\n"))
    )
    if not rest:
        after = re.sub(r"\btypename |(?<=::)template ", "", after)
    texts = [*texts]
    texts[number] = before + (f"template <{', '.join(rest)}>\n" if rest else "") + after
    return [_without_argument(text, name, i) if f"{name}<" in text else text for text in texts]


def _without_argument(text: str, name: str, i: int) -> str:
    at = 0
    pattern = re.compile(rf"\b{name}<")
    while found := pattern.search(text, at):
        end = angle(text, found.end() - 1)
        left = [part for n, part in enumerate(_arguments(text, found.end() - 1)) if n != i]
        text = text[: found.end() - 1] + (f"<{', '.join(left)}>" if left else "") + text[end + 1 :]
        at = found.end() - 1
    return text


def _without_members(texts: list[str], types: set[str]) -> list[str]:
    """Substitute ``Struct::Name`` if the struct declares ``using Name = Type;`` with a closed type."""
    for number, text in enumerate(texts):
        name = name_of(text)
        if _TEMPLATE.search(text) or not re.search(rf"^struct {name}\b", text, re.MULTILINE):
            continue
        for alias, named in re.findall(r"^  using (\w+) = ([\w<>, ]+);\n", text, re.MULTILINE):
            if _is_closed(named, types):
                own = re.sub(rf"(?<![\w.:])(?<!using ){alias}\b", named, texts[number])
                texts = [re.sub(rf"\b(?:typename )?{name}::{alias}\b", named, other) for other in texts]
                texts[number] = own
                if not any(re.search(rf"::{alias}\b", other) for other in texts):
                    texts[number] = re.sub(rf"^  using {alias} = .*\n", "", own, flags=re.MULTILINE)
    return texts


def without_aliases(text: str, types: set[str]) -> str:
    """Substitute ``using Name = Type;`` inside a function if the type is closed."""
    inside = " +" if not re.search(r"^struct \w", text, re.MULTILINE) else "    +"
    for found in re.findall(rf"^{inside}using (\w+) = ([\w<>, ]+);\n", text, re.MULTILINE):
        alias, named = found
        if _is_closed(named, types):
            text = re.sub(rf"^{inside}using {alias} = .*\n", "", text, flags=re.MULTILINE)
            text = re.sub(rf"(?<![\w.]){alias}\b", named, text)
    return text


def without_zero_members(texts: list[str]) -> list[str]:
    """Replace struct members that are only ever assigned 0 by 0."""
    for number, text in enumerate(texts):
        declared = re.findall(r"^  (?:int|u32) ([\w, ]+);", text, re.MULTILINE)
        for member in identifiers(" ".join(declared)):
            changes = re.findall(rf"\b{member} [-+*/|&^]?=(?!=)[^;]*;|\b{member}(?:\+\+|--)", text)
            if {*changes} == {f"{member} = 0;"}:
                own = re.sub(rf"^ +{member} = 0;\n", "", texts[number], flags=re.MULTILINE)
                own = re.sub(rf"(?<=[ ,]){member}, |, {member}(?=;)|^  \w+ {member};\n", "", own, flags=re.MULTILINE)
                own = re.sub(rf"(?<![\w.]){member}\b", "0", own)
                texts = [*texts[:number], own, *texts[number + 1 :]]
                texts = [_without_member(other, name_of(text), member) for other in texts]
    return texts


def _without_member(text: str, struct: str | None, member: str) -> str:
    named = re.findall(rf"\b{struct}(?:<[\w, ]+>)?&? (\w+)(?=[(,)])", text)
    objects = "|".join([rf"{struct}\(\w+\)", *named])
    return re.sub(rf"\b(?:{objects})\.{member}\b", "0", text)
