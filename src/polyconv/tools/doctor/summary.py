"""The report as JSON, which can be attached to a bug report, and as text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...util.atomic_files import replace_whole
from ...util.console import duration_text
from ...version import __version__
from .check import Result, Verdict
from .environment import Finding, State
from .journal import CONTENTS, Record, presentable
from .quick.correctness import Outcome
from .quick.speed import Contest

QUICK_CONTENTS = "versions, devices, settings, what was found, and the self-test's figures; no user or host name"


@dataclass
class Report:
    findings: Sequence[Finding] = ()
    device: str = ""
    """Device of the self-test; empty if it did not run."""
    outcomes: Sequence[Outcome] = ()
    contests: list[Contest] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing is broken. Being slow is not broken."""
        sound = all(finding.state is not State.PROBLEM for finding in self.findings)
        return sound and not self.failures

    @property
    def failures(self) -> list[Outcome | Contest]:
        every: list[Outcome | Contest] = [*self.outcomes, *self.contests]
        return [one for one in every if not one.ok]

    def as_json(self) -> dict[str, Any]:
        """Home directories are shortened to ``~`` because they contain the user name."""
        found: dict[str, Any] = {
            "polyconv": __version__,
            "contents": QUICK_CONTENTS,
            "ok": self.ok,
            "findings": [finding.as_json() for finding in self.findings],
        }
        if self.device:
            found["self_test"] = {
                "device": self.device,
                "correctness": [outcome.as_json() for outcome in self.outcomes],
                "speed": [contest.as_json() for contest in self.contests],
            }
        return presentable(found)  # type: ignore[no-any-return]

    def write(self, path: Path) -> None:
        replace_whole(path, (json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n").encode())


WIDTH = 118
NAME = 20
MOST = 8
"""Listed results per verdict; the JSON file has all."""
MARKS = {Verdict.OK: "ok", Verdict.WARNING: "warning", Verdict.PROBLEM: "PROBLEM", Verdict.NOT_HERE: "not here"}
WORST = (Verdict.PROBLEM, Verdict.WARNING, Verdict.OK, Verdict.NOT_HERE)


def screen(record: Record, text_file: str) -> str:
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
    """One check: worst verdict, number of correct parts, comment."""
    verdicts = {result.verdict for result in results}
    worst = next(verdict for verdict in WORST if verdict in verdicts)
    examined = [result for result in results if result.verdict is not Verdict.NOT_HERE]
    right = sum(result.verdict is Verdict.OK for result in examined)
    count = f"{right} of {len(examined)}" if examined else ""
    return _cut(f"{MARKS[worst]:<9}{results[0].examination:<{NAME}}{count:>11}  {_said(results, worst)}")


def _said(results: list[Result], worst: Verdict) -> str:
    """Comment on a check: its first failure, else the largest error, else the words of its parts."""
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
    text = text.replace("\n", " ")
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 4]} ..."
