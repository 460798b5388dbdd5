"""What was examined so far, in a file that is whole after every answer: who is interrupted goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from .. import documents
from ..documents import DocumentError, Value
from ..files import read_file, replace_whole
from .examination import Result, Verdict

KIND, SCHEMA = "doctor", 1
LARGEST = 2**24
"""Bytes of such a file that are read at most; an answer takes some 300."""
CONTENTS = "versions, devices, settings, and the answers of each examination; no user or host name"


@dataclass
class Record:
    """The results of a round of examinations."""

    path: Path
    about: Mapping[str, str]
    """What was examined, with what. A record of anything else is not gone on with."""
    findings: Sequence[Mapping[str, Any]] = ()
    results: list[Result] = field(default_factory=list)
    complete: list[str] = field(default_factory=list)
    """Examinations that need not be gone on with."""

    @property
    def ok(self) -> bool:
        """Nothing is broken. What is merely slow, or could not be examined, is not broken."""
        found = [str(finding["state"]) for finding in self.findings]
        return "problem" not in found and not self.having(Verdict.PROBLEM)

    def having(self, verdict: Verdict) -> list[Result]:
        return [result for result in self.results if result.verdict is verdict]

    def of(self, examination: str) -> list[Result]:
        return [result for result in self.results if result.examination == examination]

    def note(self, result: Result) -> None:
        self.results.append(result)
        self.write()

    def close(self, examination: str) -> None:
        """Nothing of this examination is missing."""
        self.complete.append(examination)
        self.write()

    def go_on(self) -> str:
        """Take over what the file has, if it is a record of the same; gives why it is not, if there is a file."""
        try:
            found = documents.parse_versioned(read_file(self.path, LARGEST), str(self.path), KIND, SCHEMA)
            if found.member("about").object() != self.about:
                return f"{self.path} is of another GPU, installation or kind of round"
            self.results = [_result(each) for each in found.member("results").items()]
            self.complete = [name.text() for name in found.member("complete").items()]
        except FileNotFoundError:
            return ""
        except (DocumentError, OSError) as error:
            return str(error)
        return ""

    def as_json(self) -> dict[str, Any]:
        """Home folders are shortened to ``~``: they hold the user's name."""
        found: dict[str, Any] = presentable(
            {
                "format": f"polyconv {KIND}",
                "schema": SCHEMA,
                "contents": CONTENTS,
                "ok": self.ok,
                "about": dict(self.about),
                "findings": list(self.findings),
                "complete": self.complete,
                "results": [result.as_json() for result in self.results],
            }
        )
        return found

    def write(self) -> None:
        text = json.dumps(self.as_json(), indent=1, ensure_ascii=False, allow_nan=False)
        replace_whole(self.path, (text + "\n").encode(errors="replace"))


def _result(value: Value) -> Result:
    found = value.members()
    try:
        verdict = Verdict(found["verdict"].text())
        texts = {name: str(found[name].found) for name in ("words", "sanitizer") if name in found}
        figures = found["figures"].object() if "figures" in found else {}
        seconds = found["seconds"].number()
        part = found["part"].text() if "part" in found else ""
        return Result(found["examination"].text(), part, verdict, figures=figures, seconds=seconds, **texts)
    except (KeyError, ValueError) as error:
        raise value.wrong(f"expected a result: {error}") from error


def presentable(value: Any) -> Any:
    """For a file that is sent to somebody: no home folder, and no number that JSON has no word for."""
    if isinstance(value, dict):
        return {key: presentable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [presentable(inner) for inner in value]
    if isinstance(value, str):
        home = os.path.expanduser("~")
        return value.replace(home, "~") if home not in ("", "/", "~") else value
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value
