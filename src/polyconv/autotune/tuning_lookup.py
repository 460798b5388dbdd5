"""Lookup of problems in the active tuning files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .. import settings
from ..runtime.warn_once import warn_once
from ..tuning_key import Environment
from .tuning_file import Entry, Tuning, TuningError, load

_Signature = tuple[int, int, int, int]
"""Version of a file: inode, size, mtime [ns], ctime [ns]."""
_loaded: dict[Path, tuple[_Signature, Tuning]] = {}


_NOTHING_THERE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors for a default file that does not exist or is not accessible to this user: no warning."""


@dataclass(frozen=True, slots=True)
class Found:
    """An entry and its file."""

    entry: Entry
    path: Path


def default_file() -> Path:
    """Default output of ``polyconv tune``, looked up last."""
    return settings.cache_folder() / "tuning.json"


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


def contents(path: Path) -> Tuning:
    """Contents of a file, cached until it changes. An unreadable file counts as empty."""
    try:
        status = os.stat(path)
        signature = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    except OSError as error:
        if path in (settings.current().tuning_file or ()) or not isinstance(error, _NOTHING_THERE):
            _ignore(f"{path} cannot be read: {error}")
        return Tuning()
    known = _loaded.get(path)
    if known is None or known[0] != signature:
        try:
            known = (signature, load(path))
        except (TuningError, OSError) as error:
            _ignore(str(error))
            known = (signature, Tuning())
        _loaded[path] = known
    return known[1]


def _ignore(problem: str) -> None:
    warn_once(
        f"polyconv ignores a tuning file: {problem}. The cost model decides instead; set POLYCONV_TUNING_FILE to a "
        "file that `polyconv tune` wrote, or to off"
    )
