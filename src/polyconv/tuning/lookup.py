"""Which tuning files are in force, and what they say of a problem."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .. import settings
from ..once import warn_once
from .environment import Environment
from .file import Entry, Tuning, TuningError, load

_Signature = tuple[int, int, int, int]
"""Of a file's contents, as far as the file system tells: inode, size, times of the last change to them and to it."""
_loaded: dict[Path, tuple[_Signature, Tuning]] = {}


_NOTHING_THERE = (FileNotFoundError, NotADirectoryError, PermissionError)
"""What a system says of a file in a folder that was never made, or that this user has no part in."""


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, and the file that it comes from."""

    entry: Entry
    path: Path


def default_file() -> Path:
    """The file that ``polyconv tune`` writes unless it is told another one, and that is looked into last."""
    return settings.cache_folder() / "tuning.json"


def files() -> tuple[Path, ...]:
    """The files in force, in the order in which they are asked."""
    named = settings.current().tuning_file
    if named == () or settings.current().cache_dir is None:
        return named or ()
    return (*(named or ()), default_file())


def find(key: str, environment: Environment) -> Found | None:
    """What the first file that knows the problem says of it. A file that cannot be read is named in a warning, once."""
    for path in files():
        entry = contents(path).find(key, environment)
        if entry is not None:
            return Found(entry, path)
    return None


def contents(path: Path) -> Tuning:
    """What is in a file now; it is read again only if it changed. One that cannot be read counts as empty."""
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
