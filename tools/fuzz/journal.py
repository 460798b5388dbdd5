"""The journal of a run on disk, so that it can be resumed, and a crash names its case.

One file of JSON lines per part. The line of a case is written before the case runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any


@dataclass(frozen=True)
class Found:
    """A recorded failure."""

    index: int
    kind: str
    words: str
    path: tuple[int, ...] = ()
    """Simplifications that still fail."""
    alone: bool = True
    """True if it fails in a fresh worker."""
    after: tuple[int, ...] = ()
    """Otherwise: earlier cases of its worker."""

    @property
    def likeness(self) -> str:
        """Kind of a failure: the first line of its text, numbers aside."""
        lines = self.words.splitlines() or [""]
        return f"{self.kind}: {re.sub(r'[-+]?[0-9][0-9.e+-]*', '#', lines[0])}"


class JournalError(Exception):
    """A folder that cannot be resumed from."""


@dataclass
class PartJournal:
    """The journal of one part. Thread-safe."""

    folder: Path
    part: str
    seed: int
    cases: int = 0
    seconds: float = 0.0
    failures: list[Found] = field(default_factory=list)
    _next: int = 0
    _lock: Lock = field(default_factory=Lock)
    _open: set[int] = field(default_factory=set)
    """Cases begun but not finished when the run was stopped: they run again."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            self._read()
        else:
            self._write({"part": self.part, "seed": self.seed})

    @property
    def file(self) -> Path:
        return self.folder / f"{self.part}.jsonl"

    def script(self, index: int) -> Path:
        return self.folder / f"{self.part}-{index}.py"

    def begin(self, index: int | None = None) -> int:
        """Index of the next case, unless one is given; written before it runs."""
        with self._lock:
            if index is not None:
                self._next = max(self._next, index + 1)
            elif self._open:
                index = self._open.pop()
            else:
                index, self._next = self._next, self._next + 1
            self.cases += 1
            self._write({"begin": index, "seconds": round(self.seconds, 1)})
        return index

    def stop(self, index: int) -> None:
        """A case interrupted from outside: no result, and it runs again."""
        with self._lock:
            self.cases -= 1
            self._open.add(index)
            self._write({"stopped": index})

    def spend(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds

    def found(self, failure: Found) -> None:
        with self._lock:
            self.failures.append(failure)
            self._write({"failure": asdict(failure)})

    def close(self) -> None:
        with self._lock:
            self._write({"seconds": round(self.seconds, 1)})

    def alike(self) -> dict[str, list[Found]]:
        """Failures by kind, in order of appearance."""
        groups: dict[str, list[Found]] = {}
        for failure in self.failures:
            groups.setdefault(failure.likeness, []).append(failure)
        return groups

    def _write(self, line: dict[str, object]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _read(self) -> None:
        first, *lines = list(_lines(self.file)) or [{}]
        if first.get("seed") != self.seed:
            raise JournalError(
                f"{self.file} was begun with --seed {first.get('seed')}, not {self.seed}: give that seed, or another "
                "--journal"
            )
        for line in lines:
            self.seconds = float(line.get("seconds", self.seconds))
            if "begin" in line:
                self.cases += 1
                self._next = max(self._next, line["begin"] + 1)
                self._open.discard(line["begin"])
            elif "stopped" in line:
                self.cases -= 1
                self._open.add(line["stopped"])
            elif "failure" in line:
                kept = line["failure"]
                self.failures.append(Found(**{**kept, "path": tuple(kept["path"]), "after": tuple(kept["after"])}))


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # cut off when the run was killed
            continue
