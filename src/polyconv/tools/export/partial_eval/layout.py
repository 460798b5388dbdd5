"""Layout of a text after partial evaluation: arithmetic that is left over, and full lines."""

from __future__ import annotations

import re

from .constants import evaluated


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


_DECLARATION = re.compile(r"( *(?:static )?const(?:expr)? (?:bool|float|int|i64|u32)| +u32) (\w[^;{]*);$")


def compacted(text: str, width: int = 120, constants: int = 100) -> str:
    """Declare neighbouring ``constants`` and counts of one type together, and write functions of one short statement,
    and loops around another loop, in one line."""
    lines: list[str] = []
    for line in text.split("\n"):
        last = lines[-1] if lines else ""
        before, here = _DECLARATION.match(last), _DECLARATION.match(line)
        if before and here and before.group(1) == here.group(1):
            more, limit = f"{last[:-1]}, {here.group(2)};", constants
        elif re.match(r" *}$", line) and len(lines) > 1 and re.match(r" +(?!//)[^/{}]*;$", last):
            more, limit = f"{lines[-2]} {last.strip()} }}" if _opens_function(lines[-2]) else "", width
            if more and len(more) <= limit:
                lines.pop()
        else:
            more, limit = "", 0
        if more and len(more) <= limit:
            lines[-1] = more
        else:
            lines.append(line)
    return "\n".join(lines)


def _opens_function(line: str) -> bool:
    return re.match(r" *(?:static|constexpr|DEVICE|__device__|__host__)\b.*\) (?:const )?{$", line) is not None
