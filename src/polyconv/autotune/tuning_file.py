"""Tuning file: JSON, readable and suited to version control.

::

    {"format": "polyconv tuning", "schema": 2, "sections": [
      {"environment": {"device": "cpu", "name": "Intel(R) Xeon(R)", "instruction_set": "avx512", "threads": 8, ...},
       "entries": {"fprop x 8x32x512x512 w 64x32x5x9, stride 1x1, ...": {
         "choice": "F(4,5) x F(4,9), tile lanes",
         "seconds": {"F(4,5) x F(4,9), tile lanes": 0.021, ...}, "torch_seconds": 0.083,
         "measured": "2026-11-15T11:05:00Z"}}}]}

Readers skip sections of other environments, and writers preserve them unread. Writers merge into the existing contents
and replace the file atomically, under a lock.

A file holds no code, only names of candidates; one that does not exist or exceeds the tolerance is not run. A malicious
file can therefore only make calls slow, so the owner is not checked and links are followed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from typing import Any

from ..tuning_key import Environment
from ..util import checked_json
from ..util.atomic_files import Folder, read_file
from ..util.checked_json import DocumentError, Value
from ..version import __version__

KIND = "tuning"
SCHEMA = 2
"""To be raised when the meaning of an entry changes."""
LARGEST = 2**24
"""Largest file that is read [bytes]: about twenty thousand entries."""

Json = Mapping[str, Any]


class TuningError(ValueError):
    """A file that is not a tuning file, or has an unsupported schema. The message names the file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Measurements of one problem, and the choice."""

    choice: str
    seconds: Mapping[str, float]
    """Best time of one call by candidate [s]."""
    torch_seconds: float | None
    """Best time of ATen's convolution without polyconv [s]; None if not timed, as in online autotuning on a GPU."""
    measured: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
    """Time of the measurement [UTC]."""

    @classmethod
    def of(cls, entry: Value) -> Entry:
        """Entry from JSON. Raises :class:`~polyconv.util.checked_json.DocumentError` for an invalid value."""
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
    return float(f"{seconds:.4g}")


@dataclass(frozen=True, slots=True)
class Section:
    """Entries of one environment as raw JSON, so that fields of later versions are preserved."""

    environment: Json
    entries: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Contents of a file: at most one section per environment."""

    sections: tuple[Section, ...] = ()

    @classmethod
    def of(cls, environment: Environment, entries: Mapping[str, Entry]) -> Tuning:
        return cls((Section(environment.as_json(), {key: entry.as_json() for key, entry in entries.items()}),))

    def find(self, key: str, environment: Environment) -> Entry | None:
        """Entry of a problem in exactly this environment, or None."""
        asked = environment.as_json()
        for section in self.sections:
            if section.environment == asked and key in section.entries:
                return Entry.of(Value(section.entries[key], "a tuning file"))
        return None

    def choices(self, environment: Environment) -> dict[str, str]:
        """All choices in an environment, by key."""
        asked = environment.as_json()
        here = (section.entries for section in self.sections if section.environment == asked)
        return {key: entry["choice"] for entries in here for key, entry in entries.items()}

    def __len__(self) -> int:
        return sum(len(section.entries) for section in self.sections)

    def __str__(self) -> str:
        entries, sections = len(self), len(self.sections)
        return (
            f"{entries} {'entry' if entries == 1 else 'entries'} "
            f"in {sections} {'section' if sections == 1 else 'sections'}"
        )

    def text(self) -> str:
        """Serialised form, sorted for minimal diffs in version control."""
        sections = sorted(self.sections, key=lambda section: _canonical(section.environment))
        listed = [
            {"environment": dict(s.environment), "entries": {k: s.entries[k] for k in sorted(s.entries)}}
            for s in sections
        ]
        return json.dumps({"format": f"polyconv {KIND}", "schema": SCHEMA, "sections": listed}, indent=1) + "\n"


def parse(data: bytes, name: str) -> Tuning:
    """Parse a file that is called ``name`` in messages. Raises :class:`TuningError`."""
    try:
        found = checked_json.parse_versioned(data, name, KIND, SCHEMA)
        sections = [_section(section) for section in found.member("sections").items()]
    except DocumentError as error:
        raise TuningError(str(error)) from None
    return merge(Tuning((section,)) for section in sections)


def _section(section: Value) -> Section:
    """Parse a section. Entries are validated only if this version wrote them."""
    environment, entries = section.member("environment").object(), section.member("entries").members()
    if environment.get("polyconv") == __version__:
        for entry in entries.values():
            Entry.of(entry)
    return Section(environment, {key: entry.object() for key, entry in entries.items()})


def load(path: Path) -> Tuning:
    """Read a file. Raises :class:`TuningError` if it is unreadable or invalid, ``FileNotFoundError`` if missing."""
    try:
        data = read_file(path, LARGEST)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TuningError(f"{path} cannot be read: {error}") from None
    return parse(data, str(path))


def merge(tunings: Iterable[Tuning]) -> Tuning:
    """Union of all entries, independent of the order. Of two entries for one problem the later one wins; of two with
    one timestamp, the faster."""
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
    """Merge into a file, creating it if needed; safe for concurrent processes. Returns the merged contents. Raises
    :class:`TuningError`, without writing, if the file is not a tuning file."""
    # A link to an existing file is preserved; a dangling one is refused below.
    path = path.resolve() if path.exists() else path.absolute()
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # not writable by others: it may be the cache folder
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
