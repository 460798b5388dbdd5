"""Partial evaluation of the kernels' C++ text for one geometry.

The device headers serve every geometry, through templates, parameters and branches. For the one geometry of an exported
file, template parameters with a single argument and parameters with a constant value are substituted, branches on
constants resolved, and unused definitions dropped. The compiler would do the same; this is for readers of the file.

There is no C++ parser: the rules rely on the text being this project's own, formatted by clang-format. The tests
compile and execute the output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_OPENING, _CLOSING = "([{", ")]}"
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


def words(text: str) -> set[str]:
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
        wanted = wanted.union(*(words(listed[i]) for i in more))
    found, apart = [], ""  # the empty line above a dropped definition moves to the next kept one
    for i, definition in enumerate(listed):
        apart = apart or definition[: definition.startswith("\n")]
        if i in kept:
            found.append(apart + definition.lstrip("\n"))
            apart = ""
    return found


# ---- scanning


def closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at ``opening``."""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] in _OPENING) - (text[at] in _CLOSING)
        if depth == 0:
            return at
    raise ValueError(f"unbalanced: {text[opening : opening + 80]!r}")


def _angle(text: str, opening: int) -> int:
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


def _statement(text: str, begin: int) -> int:
    """Index behind the statement that starts at ``begin``."""
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    if text[begin] == "{":
        return closing(text, begin) + 1
    head = re.compile(r"(?:UNROLL )?(?:for|while|if(?: constexpr)?) \(").match(text, begin)
    if head:
        end = _statement(text, closing(text, head.end() - 1) + 1)
        other = re.compile(r"\s*else\b").match(text, end) if " if" in f" {head.group()}" else None
        return _statement(text, other.end()) if other else end
    at = begin
    while text[at] != ";":
        at = closing(text, at) if text[at] in _OPENING else at
        at += 1
    return at + 1


# ---- constants


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


# ---- zeros and ones, single iterations, unused variables


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
            behind = _statement(text, found.end())
            body = re.sub(rf"(?<![\w.]){name}\b", str(begin), _unwrapped(text[found.end() : behind]))
            declared = set(re.findall(r"(?:^|;\s+)(?:const |float|int)[\w:<> ]*[ &*](\w+)(?: =|\[)", body))
            begin_of, end_of = text.rfind("__device__", 0, found.start()), text.find("__device__", behind)
            if not declared & words(
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


# ---- folding


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
        yes_end = _statement(text, end + 1)
        other = re.compile(r"\s*else\b").match(text, yes_end)
        no_end = _statement(text, other.end()) if other else yes_end
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
        depth += (character in _OPENING) - (character in _CLOSING)
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
            if before in _CLOSING:
                depth += 1
            elif before in _OPENING:
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
        if text[at] in _OPENING:
            at = closing(text, at)
        elif text[at] in _CLOSING:
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


# ---- templates

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
    return split(text[opening + 1 : _angle(text, opening)])


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
        end = _angle(text, found.end() - 1)
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
        for member in words(" ".join(re.findall(r"^  (?:int|u32) ([\w, ]+);", text, re.MULTILINE))):
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


# ---- parameters


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
        text = re.sub(rf"\bp\.{name}(?:\.divisor)?\b(?!\[|\.)", value, text)
    return text


def with_pragmas_in_line(text: str) -> str:
    return re.sub(r"#pragma unroll\n( *)for", r"\1UNROLL for", text)


def tidied(text: str) -> str:
    """Remove sums with 0, products with 1, and ``UNROLL`` of loops that are gone."""
    text = re.sub(r"\bUNROLL (?!for\b|_Pragma)", "", text)
    text = re.sub(r"(?<=[-+(\[,=] )\w+ % 1(?: \* (?:\w+|\([^()]*\)))*(?= [-+]|[)\],;])", "0", text)
    text = re.sub(r"(?<!\w)\((\d+(?: [-+*/%] \d+)*)\)", _computed, text)
    text = re.sub(r"\((\d+ [!=]= \d+)\)", _computed, text)
    text = re.sub(r"(?<=[-+*/=(\[] )\(([\w.]+)\)", r"\1", text)
    text = re.sub(r"(?:(?<=\()|(?<=return )|(?<=&& )|(?<=\|\| ))(?:0 \|\||1 &&) ", "", text)
    text = re.sub(r"\bceil_div\(([\w.]+), 1\)", r"\1", text)
    text = re.sub(r"(?:(?<=\()|(?<== )|(?<=&& ))(\d+) == \1 && ", "", text)
    text = re.sub(r" \* i64\(1\)(?! \*)", "", text)
    text = re.sub(r"\bi64\(0\)", "0", text)
    text = re.sub(r"(?<!\w)i64\(1\) \* ([\w.]+)(?![\w.(])", r"i64(\1)", text)
    text = re.sub(r"(?<=[=<\[] )(\d+(?: [-+*/%] \d+)+)(?=[,;)\]])", _computed, text)
    text = re.sub(r"(?<![\w.])(?<![/%] )0(?: [*/%] (?:[\w:.]+|\([^()]*\)))+", "0", text)
    text = re.sub(r" [*/] 1\b(?![.\w])", "", text)
    text = re.sub(r"(?<![\w.])(?<![/%] )1 \* ", "", text)
    text = re.sub(r" [-+] (?:[\w:.]+ \* )?0\b(?! [*/%]|[.\w])", "", text)
    text = re.sub(r"(?<![\w.])(?<![-*/%] )0 \+ ", "", text)
    return re.sub(r"\n{3,}", "\n\n", text)


def _computed(found: re.Match[str]) -> str:
    return str(evaluated(found.group(1), {}))


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
    text = re.sub(rf"^( +)((?:{names})\.\w+ = [^;]*);\n", rewritten, text, flags=re.MULTILINE)
    lines: list[str] = []
    for line in text.split("\n"):
        found = re.match(rf"( +)(?:{names})\.\w+ = ", line)
        more = f"{lines[-1][:-1]}, {line.lstrip()}" if lines else ""
        if found and re.match(rf"{found.group(1)}(?:{names})\.\w+ = .*;$", lines[-1]) and len(more) <= 120:
            lines[-1] = more  # merge the remaining assignments into full lines
        else:
            lines.append(line)
    return "\n".join(lines)


def joined(text: str, width: int = 120) -> str:
    """Append a continuation line to the one before it if both now fit into ``width`` columns."""
    lines: list[str] = []
    for line in text.split("\n"):
        last = lines[-1] if lines else ""
        deeper = len(line) - len(line.lstrip()) > len(last) - len(last.lstrip())
        alone = re.match(r" +(?! |UNROLL|for|if|[{#]).*;$", line)
        goes_on = re.search(r"[,+|&=(]$", last) and not re.search(r"//|^#|^template", last)
        controls = alone and re.match(r" +(?:UNROLL )?(?:for|if) .*\)$", last)
        if (goes_on or (deeper and controls)) and len(last) + 1 + len(line.lstrip()) <= width and "//" not in line:
            lines[-1] = last + ("" if last.endswith("(") else " ") + line.lstrip()
        else:
            lines.append(line)
    return "\n".join(lines)


def wrapped(text: str, width: int = 120) -> str:
    """Break lines that have become too long, after a comma or before an operator."""
    lines: list[str] = []
    carried = ""  # overflow of a comment, prepended to its next line
    for line in text.split("\n"):
        if carried:
            goes_on = re.match(r" *// (?=[\w(])", line)
            if goes_on:
                line = f"{goes_on.group()}{carried} {line[goes_on.end() :]}"
            else:
                lines.append(lines[-1][: lines[-1].index("//")] + f"// {carried}")
            carried = ""
        code, slashes, comment = line.partition("  //")
        if len(line) > width and slashes and code.strip() and len(code) <= width:
            lines.append(f"{code[: len(code) - len(code.lstrip())]}//{comment}")
            line = code
        if len(line) > width and re.match(r" *//", line):
            at = line.rfind(" ", 0, width + 1)
            line, carried = line[:at], line[at + 1 :]
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        while len(line) > width and not line.lstrip().startswith("//"):
            at = max(line.rfind(", ", 0, width), line.rfind(" + ", 0, width), line.rfind(" && ", 0, width))
            at = at if at > len(indent) + 8 else line.rfind(" ", 0, width)
            if at <= len(indent):
                break
            cut = at + 1 if line[at] == "," else at
            lines.append(line[:cut].rstrip())
            line = indent + line[cut:].lstrip()
        lines.append(line)
    return "\n".join(lines)
