"""Findings and results so far, in a file that is replaced atomically after every result, for a session to resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from ...util import checked_json
from ...util.atomic_files import read_file, replace_whole
from ...util.checked_json import DocumentError, Value
from .check import Result, Verdict
from .environment import Finding

KIND, SCHEMA = "doctor", 1
LARGEST = 2**24
"""Maximum size of a file that is read [bytes]; a result takes about 300."""
CONTENTS = "versions, devices, settings, findings and the results of each check; no user or host name"
SELF_TEST = "self-test"
SELF_TEST_KEYS = {"correctness": "every pass", "speed": "workloads"}
"""Checks of the self-test, by their keys in its own part of the JSON file."""


@dataclass
class Journal:
    """Results of a session."""

    path: Path
    about: Mapping[str, str]
    """Device, versions and selection of checks (:func:`~.session.about`). A file with other values is not resumed."""
    findings: Sequence[Finding] = ()
    results: list[Result] = field(default_factory=list)
    complete: list[str] = field(default_factory=list)
    """Names of finished checks."""

    @property
    def ok(self) -> bool:
        """True if there are no problems. Warnings and checks that cannot run here do not count."""
        states = [finding.state for finding in self.findings]
        return Verdict.PROBLEM not in states and not self.having(Verdict.PROBLEM)

    def having(self, verdict: Verdict) -> list[Result]:
        return [result for result in self.results if result.verdict is verdict]

    def of(self, check: str) -> list[Result]:
        return [result for result in self.results if result.check == check]

    def add(self, result: Result) -> None:
        self.results.append(result)
        self.write()

    def close(self, check: str) -> None:
        self.complete.append(check)
        self.write()

    def resume(self) -> str:
        """Load the file's results if it matches :attr:`about`. Returns the reason for a refusal, or an empty text."""
        try:
            found = checked_json.parse_versioned(read_file(self.path, LARGEST), str(self.path), KIND, SCHEMA)
            if found.member("about").object() != presentable(dict(self.about)):
                return f"{self.path} is of another device, installation or selection of checks"
            results = [_result(each) for each in found.member("results").items()]
            complete = [name.text() for name in found.member("complete").items()]
        except FileNotFoundError:
            return ""
        except (DocumentError, OSError) as error:
            return str(error)
        self.results, self.complete = results, complete  # both or, if one of them is damaged, neither
        return ""

    def as_json(self) -> dict[str, Any]:
        """Home directories are shortened to ``~`` because they contain the user name."""
        found: dict[str, Any] = {
            "format": f"polyconv {KIND}",
            "schema": SCHEMA,
            "contents": CONTENTS,
            "ok": self.ok,
            "about": dict(self.about),
            "findings": [finding.as_json() for finding in self.findings],
            "complete": self.complete,
            "results": [result.as_json() for result in self.results],
        }
        if self.results and self.about.get("checks") == SELF_TEST:
            found["self_test"] = {
                "device": next(iter(self.about.values())),
                **{key: [_figures(result) for result in self.of(check)] for key, check in SELF_TEST_KEYS.items()},
            }
        return presentable(found)  # type: ignore[no-any-return]

    def write(self) -> None:
        text = json.dumps(self.as_json(), indent=1, ensure_ascii=False, allow_nan=False)
        replace_whole(self.path, (text + "\n").encode(errors="replace"))


def _figures(result: Result) -> dict[str, Any]:
    return {"case": result.part, **result.figures, "ok": result.verdict is Verdict.OK, "failure": result.words}


def _result(value: Value) -> Result:
    found = value.members()
    try:
        verdict = Verdict(found["verdict"].text())
        texts = {name: str(found[name].found) for name in ("words", "sanitizer", "row") if name in found}
        figures = found["figures"].object() if "figures" in found else {}
        seconds = found["seconds"].number()
        part = found["part"].text() if "part" in found else ""
        return Result(found["examination"].text(), part, verdict, figures=figures, seconds=seconds, **texts)
    except (KeyError, ValueError) as error:
        raise value.wrong(f"expected a result: {error}") from error


def presentable(value: Any) -> Any:
    """JSON value safe to publish: home directories become ``~``, infinities and NaN become strings."""
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
