"""Which tuning files are in force, and what they say of a problem."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from .. import settings
from .environment import Environment
from .file import Entry, Tuning, TuningError, load

_Signature = tuple[int, int, int]
"""Of a file's contents, as far as the file system tells: inode, size, time of the last change."""

_loaded: dict[Path, tuple[_Signature, Tuning]] = {}


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
    except OSError as error:
        if path in (settings.current().tuning_file or ()):
            _once(path, (0, 0, 0), f"{path} cannot be read: {error}")
        return Tuning()
    signature = (status.st_ino, status.st_size, status.st_mtime_ns)
    known = _loaded.get(path)
    if known is None or known[0] != signature:
        try:
            known = _loaded[path] = (signature, load(path))
        except (TuningError, OSError) as error:
            _once(path, signature, str(error))
            return Tuning()
    return known[1]


def _once(path: Path, signature: _Signature, problem: str) -> None:
    known = _loaded.get(path)
    if known is None or known[0] != signature:
        _loaded[path] = (signature, Tuning())
        warnings.warn(
            f"polyconv ignores a tuning file: {problem}. The cost model decides instead; set POLYCONV_TUNING_FILE to a "
            "file that `polyconv tune` wrote, or to off",
            RuntimeWarning,
            stacklevel=2,
        )
