"""A round of examinations on one screen: a line for each, then what went wrong, then what to do with it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from ..console import duration_text
from .examination import Result, Verdict
from .record import CONTENTS, Record, presentable

WIDTH = 118
NAME = 20
MOST = 8
"""Results of one verdict that have lines of their own; the file has all."""
MARKS = {Verdict.OK: "ok", Verdict.WARNING: "warning", Verdict.PROBLEM: "PROBLEM", Verdict.NOT_HERE: "not here"}
WORST = (Verdict.PROBLEM, Verdict.WARNING, Verdict.OK, Verdict.NOT_HERE)


def screen(record: Record, text_file: str) -> str:
    """The report for people."""
    lines = [*_head(record), "", *(_line(record.of(name)) for name in _names(record)), ""]
    for verdict, words in ((Verdict.PROBLEM, "What went wrong"), (Verdict.WARNING, "What is not as it should be")):
        if found := record.having(verdict):
            lines += [f"{words}:", *_listed(found), ""]
    lines += textwrap.wrap(_advice(record, text_file), WIDTH, break_long_words=False, break_on_hyphens=False)
    return str(presentable("\n".join(lines)))


def _head(record: Record) -> list[str]:
    about = ", ".join(f"{name} {value}" for name, value in record.about.items() if name != "GPU")
    seconds = sum(result.seconds for result in record.results)
    counts = (f"{len(record.having(verdict))} {MARKS[verdict].lower()}" for verdict in WORST if record.having(verdict))
    found = [finding for finding in record.findings if finding["state"] != "ok"]
    return [
        f"{record.about.get('GPU', 'no GPU')}: {', '.join(counts)}; {duration_text(seconds)}",
        *textwrap.wrap(about, WIDTH),
        *(_cut(f"{finding['state']}: {finding['name']}: {finding['text']}") for finding in found),
    ]


def _names(record: Record) -> Iterable[str]:
    return dict.fromkeys(result.examination for result in record.results)


def _line(results: list[Result]) -> str:
    """One examination: the worst of its verdicts, how many parts are right, and what there is to say of them."""
    verdicts = {result.verdict for result in results}
    worst = next(verdict for verdict in WORST if verdict in verdicts)
    examined = [result for result in results if result.verdict is not Verdict.NOT_HERE]
    right = sum(result.verdict is Verdict.OK for result in examined)
    count = f"{right} of {len(examined)}" if examined else ""
    return _cut(f"{MARKS[worst]:<9}{results[0].examination:<{NAME}}{count:>11}  {_said(results, worst)}")


def _said(results: list[Result], worst: Verdict) -> str:
    """Of one part what it says, of many the largest error; of what went wrong, the first."""
    if worst is not Verdict.OK:
        first = next(result for result in results if result.verdict is worst)
        return f"{first.part}: {first.words}" if first.part else first.words
    errors = [result.figures["error"] for result in results if "error" in result.figures]
    said = [result.words for result in results if result.words and result.verdict is Verdict.OK]
    return f"largest error {max(errors):.1e}" if errors else "; ".join(said)


def _listed(results: list[Result]) -> list[str]:
    lines = []
    for result in results[:MOST]:
        lines.append(_cut(f"  {result}"))
        lines += [_cut(f"    {line}") for line in result.sanitizer.splitlines()[:3]]
    more = len(results) - MOST
    return [*lines, *([f"  and {more} more, which are in the file"] if more > 0 else [])]


def _advice(record: Record, text_file: str) -> str:
    files = f"{text_file} and {record.path}"
    if record.ok and not record.having(Verdict.WARNING):
        return (
            f"All is well. {files} hold {CONTENTS}. Sent to polyconv's maintainers they help to make it faster there."
        )
    return f"Please open an issue of polyconv's and attach {files}. They hold {CONTENTS}."


def _cut(text: str) -> str:
    """On one line."""
    text = text.replace("\n", " ")
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 4]} ..."
