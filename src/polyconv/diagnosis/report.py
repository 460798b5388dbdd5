"""The diagnosis as JSON: for programs, and as a file that can be attached to a bug report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import replace_whole
from ..version import __version__
from .correctness import Outcome
from .findings import Finding, State
from .record import presentable
from .speed import Contest

CONTENTS = "versions, devices, settings, what was found, and the self-test's figures; no user or host name"


@dataclass
class Report:
    """Everything that was found out."""

    findings: Sequence[Finding] = ()
    device: str = ""
    """What the self-test ran on; empty if there was none."""
    outcomes: Sequence[Outcome] = ()
    contests: list[Contest] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing is broken. What is merely slow is not broken."""
        sound = all(finding.state is not State.PROBLEM for finding in self.findings)
        return sound and not self.failures

    @property
    def failures(self) -> list[Outcome | Contest]:
        every: list[Outcome | Contest] = [*self.outcomes, *self.contests]
        return [one for one in every if not one.ok]

    def as_json(self) -> dict[str, Any]:
        """Home folders are shortened to ``~``: they hold the user's name."""
        found: dict[str, Any] = {
            "polyconv": __version__,
            "contents": CONTENTS,
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
