"""Lookup of problems in the active tuning files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .. import settings
from ..runtime.warn_once import warn_once
from ..tuning_key import Environment
from .tuning_file import Entry, Tuning, TuningError, load

_Signature = tuple[int, int, int, int]
"""Version of a file: inode, size, mtime [ns], ctime [ns]."""


class _Loaded(NamedTuple):
    """A file that was read."""

    signature: _Signature
    tuning: Tuning
    at_any_width: frozenset[str]
    """Its entries by :func:`_without_width`."""

    @classmethod
    def of(cls, signature: _Signature, tuning: Tuning) -> _Loaded:
        keys = (key for section in tuning.sections for key in section.entries)
        return cls(signature, tuning, frozenset(map(_without_width, keys)))


_loaded: dict[Path, _Loaded] = {}
_NOTHING = _Loaded((0, 0, 0, 0), Tuning(), frozenset())

_NOTHING_THERE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors for a default file that does not exist or is not accessible to this user: no warning."""


@dataclass(frozen=True, slots=True)
class Found:
    """An entry and its file."""

    entry: Entry
    path: Path


def default_file() -> Path:
    """Default output of ``polyconv tune``, looked up last."""
    return settings.cache_file("tuning.json")


def files() -> tuple[Path, ...]:
    """Active tuning files, in lookup order."""
    named = settings.current().tuning_file
    if named == () or settings.current().cache_dir is None:
        return named or ()
    return (*(named or ()), default_file())


def find(key: str, environment: Environment) -> Found | None:
    """Entry of the first file that has one, None if no file has. An unreadable file is reported once, as a warning."""
    for path in files():
        entry = contents(path).find(key, environment)
        if entry is not None:
            return Found(entry, path)
    return None


def has_any_width(key: str) -> bool:
    """Whether a file has an entry for any pass of the problem or of one that differs from it in the width alone,
    whatever the environment."""
    asked = _without_width(key)
    return any(asked in loaded.at_any_width for loaded in map(_read, files()))


def _without_width(key: str) -> str:
    """Shapes of a problem, by its key, without the width: ``8x32x512 w 64x32x5x9``."""
    shape, _, others = key.partition(" w ")
    return f"{shape.rpartition(' ')[2].rpartition('x')[0]} w {others.partition(',')[0]}"


def contents(path: Path) -> Tuning:
    """Contents of a file, cached until it changes. An unreadable file counts as empty."""
    return _read(path).tuning


def _read(path: Path) -> _Loaded:
    try:
        status = os.stat(path)
        signature = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    except OSError as error:
        if path in (settings.current().tuning_file or ()) or not isinstance(error, _NOTHING_THERE):
            _ignore(f"{path} cannot be read: {error}")
        return _NOTHING
    known = _loaded.get(path)
    if known is None or known.signature != signature:
        try:
            known = _Loaded.of(signature, load(path))
        except (TuningError, OSError) as error:
            _ignore(str(error))
            known = _Loaded.of(signature, Tuning())
        _loaded[path] = known
    return known


def _ignore(problem: str) -> None:
    warn_once(
        f"polyconv ignores a tuning file: {problem}. The cost model decides instead; set POLYCONV_TUNING_FILE to a "
        "file that `polyconv tune` wrote, or to off"
    )
