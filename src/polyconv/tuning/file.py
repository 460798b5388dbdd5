"""The tuning file: JSON for people and for version control.

::

    {"format": "polyconv tuning", "schema": 1, "sections": [
      {"environment": {"device": "cpu", "name": "Intel(R) Xeon(R)", "instruction_set": "avx512", "threads": 8, ...},
       "entries": {"fprop x 8x32x512x512 w 64x32x5x9, stride 1x1, ...": {
         "choice": "F(4,5) x F(4,9), tile lanes",
         "seconds": {"F(4,5) x F(4,9), tile lanes": 0.021, ...}, "torch_seconds": 0.083,
         "measured": "2026-11-15T11:05:00Z"}}}]}

A section of another environment is skipped by readers and carried along by writers, whatever is in it. Writers merge
into what is there and replace the file whole, under a lock.

A file holds no code: it names candidates, and one that does not exist or does not keep the tolerance is not run. The
worst that a stranger's file can do is to make calls slow, so it may be anybody's, and is read through links.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from typing import Any

from .. import documents
from ..documents import DocumentError, Value
from ..files import Folder, read_file
from ..version import __version__
from .environment import Environment

KIND = "tuning"
SCHEMA = 1
"""Raise it when an entry comes to mean something else."""
LARGEST = 2**24
"""Bytes of a file that are read at most: some twenty thousand entries."""

Json = Mapping[str, Any]


class TuningError(ValueError):
    """A file that is not a tuning file, or one of a version that this one cannot read. The message names it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured for one problem, and what should run."""

    choice: str
    """The candidate, as the planner calls it."""
    seconds: Mapping[str, float]
    """Best time of one call, by candidate."""
    torch_seconds: float | None
    """The same of PyTorch's convolution, called as a program without polyconv would; None where it was not timed, as in
    a race on a GPU."""
    measured: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
    """When, in UTC."""

    @classmethod
    def of(cls, entry: Value) -> Entry:
        """As a file has it; :class:`~polyconv.documents.DocumentError` if a value is not what it should be."""
        seconds = {name: value.number() for name, value in entry.member("seconds").members().items()}
        theirs = entry.member("torch_seconds").number() if "torch_seconds" in entry.object() else None
        return cls(entry.member("choice").text(), seconds, theirs, entry.member("measured").text())

    def as_json(self) -> dict[str, Any]:
        return {
            "choice": self.choice,
            "seconds": {
                name: _rounded(self.seconds[name]) for name in sorted(self.seconds, key=self.seconds.__getitem__)
            },
            **({} if self.torch_seconds is None else {"torch_seconds": _rounded(self.torch_seconds)}),
            "measured": self.measured,
        }


def _rounded(seconds: float) -> float:
    """As many digits as a measurement has."""
    return float(f"{seconds:.4g}")


@dataclass(frozen=True, slots=True)
class Section:
    """Entries of one environment, both as the file has them: a later version may write what this one does not know."""

    environment: Json
    entries: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The contents of a file, at most one section per environment."""

    sections: tuple[Section, ...] = ()

    @classmethod
    def of(cls, environment: Environment, entries: Mapping[str, Entry]) -> Tuning:
        return cls((Section(environment.as_json(), {key: entry.as_json() for key, entry in entries.items()}),))

    def find(self, key: str, environment: Environment) -> Entry | None:
        """What was measured for a problem in exactly this environment."""
        asked = environment.as_json()
        for section in self.sections:
            if section.environment == asked and key in section.entries:
                return Entry.of(Value(section.entries[key], "a tuning file"))
        return None

    def __len__(self) -> int:
        return sum(len(section.entries) for section in self.sections)

    def __str__(self) -> str:
        entries, sections = len(self), len(self.sections)
        return (
            f"{entries} {'entry' if entries == 1 else 'entries'} "
            f"in {sections} {'section' if sections == 1 else 'sections'}"
        )

    def text(self) -> str:
        """As it is written: sorted, so that version control sees only what changed."""
        sections = sorted(self.sections, key=lambda section: _canonical(section.environment))
        listed = [
            {"environment": dict(s.environment), "entries": {k: s.entries[k] for k in sorted(s.entries)}}
            for s in sections
        ]
        return json.dumps({"format": f"polyconv {KIND}", "schema": SCHEMA, "sections": listed}, indent=1) + "\n"


def parse(data: bytes, name: str) -> Tuning:
    """The contents of a file that is called ``name`` in messages."""
    try:
        found = documents.parse_versioned(data, name, KIND, SCHEMA)
        sections = [_section(section) for section in found.member("sections").items()]
    except DocumentError as error:
        raise TuningError(str(error)) from None
    return merge(Tuning((section,)) for section in sections)


def _section(section: Value) -> Section:
    """Entries are checked if this version wrote them; those of another one may be anything."""
    environment, entries = section.member("environment").object(), section.member("entries").members()
    if environment.get("polyconv") == __version__:
        for entry in entries.values():
            Entry.of(entry)
    return Section(environment, {key: entry.object() for key, entry in entries.items()})


def load(path: Path) -> Tuning:
    """The contents of a file; :class:`TuningError` if they cannot be read, ``FileNotFoundError`` if there are none."""
    try:
        data = read_file(path, LARGEST)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TuningError(f"{path} cannot be read: {error}") from None
    return parse(data, str(path))


def merge(tunings: Iterable[Tuning]) -> Tuning:
    """All sections and entries. Of two entries for one problem the later stays, of two of one time the faster.

    The result does not depend on the order.
    """
    environments: dict[str, Json] = {}
    entries: dict[str, dict[str, Json]] = {}
    for tuning in tunings:
        for section in tuning.sections:
            place = _canonical(section.environment)
            environments.setdefault(place, section.environment)
            there = entries.setdefault(place, {})
            for key, entry in section.entries.items():
                there[key] = max(entry, there[key], key=_rank) if key in there else entry
    return Tuning(tuple(Section(environments[place], entries[place]) for place in sorted(environments)))


def update(path: Path, tuning: Tuning) -> Tuning:
    """Merge into a file, or make it; gives what it holds then. Processes that do so at once all get their part in.

    A file that cannot be read as a tuning file is left alone: :class:`TuningError`.
    """
    # A link that leads to a file goes on leading to it; to make one elsewhere is refused below.
    path = path.resolve() if path.exists() else path.absolute()
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # the cache's folder, maybe: others must not write it
    with Folder(path.parent) as folder, folder.locked() as alone:
        try:
            there = parse(folder.read(path.name, LARGEST), str(path))
        except FileNotFoundError:
            there = Tuning()
        except (TuningError, OSError) as error:
            raise TuningError(f"{error}. It was not overwritten: move it away, or name another file") from None
        merged = merge((there, tuning))
        folder.replace(path.name, merged.text().encode(), alone=alone)
    return merged


def _rank(entry: Json) -> tuple[str, float, str]:
    seconds, choice = entry.get("seconds"), entry.get("choice")
    best = seconds.get(choice, inf) if isinstance(seconds, Mapping) and isinstance(choice, str) else inf
    return str(entry.get("measured", "")), -best if isinstance(best, (int, float)) else -inf, _canonical(entry)


def _canonical(value: Json) -> str:
    return json.dumps(value, sort_keys=True)
