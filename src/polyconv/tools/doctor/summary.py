"""The journal as text that fits on a screen."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from ...util.console import duration_text
from .check import Result, Verdict
from .environment import Finding
from .journal import CONTENTS, Journal, presentable

WIDTH = 118
NAME = 27
MOST = 8
"""Listed results per verdict; the JSON file has all."""
MARKS = {Verdict.OK: "ok", Verdict.WARNING: "warning", Verdict.PROBLEM: "PROBLEM", Verdict.NOT_HERE: "not here"}
WORST = (Verdict.PROBLEM, Verdict.WARNING, Verdict.OK, Verdict.NOT_HERE)


def findings_text(findings: Sequence[Finding], columns: int) -> str:
    """All findings with their advice, folded to a width."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        head = f"{MARKS[finding.state]:<8}{finding.name:<{width}}  "
        body = finding.text + (f" -> {finding.advice}" if finding.advice else "")
        folded = textwrap.wrap(body, columns - len(head), break_long_words=False, break_on_hyphens=False) or [""]
        lines.append(head + f"\n{' ' * len(head)}".join(folded))
    return "\n".join(lines)


def summary(journal: Journal, text_file: str) -> str:
    lines = [*_head(journal), ""]
    for check in dict.fromkeys(result.check for result in journal.results):
        results = journal.of(check)
        lines.append(_line(check, results))
        for row in dict.fromkeys(result.row for result in results if result.row):
            lines.append(_line(f"  {row}", [replace(result, row="") for result in results if result.row == row]))
    lines.append("")
    for verdict, words in ((Verdict.PROBLEM, "What went wrong"), (Verdict.WARNING, "What is not as it should be")):
        if found := journal.having(verdict):
            lines += [f"{words}:", *_listed(found), ""]
    lines += textwrap.wrap(_advice(journal, text_file), WIDTH, break_long_words=False, break_on_hyphens=False)
    return str(presentable("\n".join(lines)))


def _head(journal: Journal) -> list[str]:
    device, *about = journal.about.items()
    seconds = sum(result.seconds for result in journal.results)
    found = {verdict: len(journal.having(verdict)) for verdict in WORST}
    counts = (f"{count} {MARKS[verdict].lower()}" for verdict, count in found.items() if count)
    return [
        f"{device[1]}: {', '.join(counts)}; {duration_text(seconds)}",
        *textwrap.wrap(", ".join(f"{name} {value}" for name, value in about), WIDTH),
        *(_cut(f"{one.state}: {one.name}: {one.text}") for one in journal.findings if one.state is not Verdict.OK),
    ]


def _line(name: str, results: list[Result]) -> str:
    """One check, or one row of it: worst verdict, number of correct parts, comment."""
    verdicts = {result.verdict for result in results}
    worst = next(verdict for verdict in WORST if verdict in verdicts)
    checked = [result for result in results if result.verdict is not Verdict.NOT_HERE]
    right = sum(result.verdict is Verdict.OK for result in checked)
    count = f"{right} of {len(checked)}" if checked else ""
    return _cut(f"{MARKS[worst]:<9}{name:<{NAME}}{count:>11}  {_said(results, worst)}")


def _said(results: list[Result], worst: Verdict) -> str:
    """Comment on a check: its first failure, else the largest error, else the words of its parts."""
    if worst is not Verdict.OK:
        first = next(result for result in results if result.verdict is worst)
        return f"{first.part}: {first.words}" if first.part else first.words
    errors = [result.figures["error"] for result in results if "error" in result.figures]
    said = [result.words for result in results if result.words and result.verdict is Verdict.OK and not result.row]
    return f"largest error {max(errors):.1e}" if errors else "; ".join(said)


def _listed(results: list[Result]) -> list[str]:
    lines = []
    for result in results[:MOST]:
        lines.append(_cut(f"  {result}"))
        lines += [_cut(f"    {line}") for line in result.sanitizer.splitlines()[:3]]
    more = len(results) - MOST
    return [*lines, *([f"  and {more} more, which are in the file"] if more > 0 else [])]


def _advice(journal: Journal, text_file: str) -> str:
    files = f"{text_file} and {journal.path}"
    if journal.ok and not journal.having(Verdict.WARNING):
        return (
            f"All is well. {files} hold {CONTENTS}. Sent to polyconv's maintainers they help to make it faster there."
        )
    return f"Please open an issue of polyconv's and attach {files}. They hold {CONTENTS}."


def _cut(text: str) -> str:
    text = text.replace("\n", " ")
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 4]} ..."
