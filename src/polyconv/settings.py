"""Every setting of polyconv, typed, in one place.

A setting has a default, can be changed for the process by an environment variable that starts with ``POLYCONV_`` (read
at first use, not at import), and for a block of code by :func:`use`. Nothing else in the package reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

PREFIX = "POLYCONV_"


@dataclass(frozen=True, slots=True)
class Settings:
    """The values in force. Frozen: a changed setting is a new object, so a plan can remember its own."""

    cache_dir: Path
    """``POLYCONV_CACHE_DIR``: compiled kernels. Default: ``polyconv`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    workspace_bytes: int = 64 * 2**20
    """``POLYCONV_WORKSPACE_BYTES``: most scratch memory that one convolution may take on the device."""
    tolerance: float = 1e-4
    """``POLYCONV_TOLERANCE``: the expected error, relative to the output's scale, that a fast algorithm may have."""
    tuning_file: Path | None = None
    """``POLYCONV_TUNING_FILE``: measured choices that replace the cost model's. Default: none, the model decides."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Defaults, overridden by the variables that are set. A value that cannot be read is an error."""
        base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        found: dict[str, Any] = {"cache_dir": base / "polyconv"}
        for name, read in _READERS.items():
            variable = PREFIX + name.upper()
            text = environ.get(variable, "").strip()
            if not text:
                continue
            try:
                found[name] = read(text)
            except ValueError as error:
                raise ValueError(f"cannot read {variable}={text!r}: {error}") from None
        return cls(**found)

    def __str__(self) -> str:
        return "\n".join(f"{PREFIX}{f.name.upper()}={getattr(self, f.name)}" for f in fields(self))


def _byte_count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError("a number of bytes is not negative")
    return count


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise ValueError("a tolerance is greater than zero")
    return number


_READERS: dict[str, Callable[[str], Any]] = {
    "cache_dir": Path,
    "workspace_bytes": _byte_count,
    "tolerance": _positive,
    "tuning_file": Path,
}

_current: Settings | None = None


def current() -> Settings:
    """The settings in force now."""
    global _current
    if _current is None:
        _current = Settings.from_environment(os.environ)
    return _current


@contextmanager
def use(**changes: Any) -> Iterator[Settings]:
    """Change settings inside a ``with`` block: ``with settings.use(workspace_bytes=0): ...``.

    The change holds for the whole process, not for one thread: the backward pass runs in threads of autograd's own, and
    must see what the forward pass saw.
    """
    global _current
    before = current()
    _current = replace(before, **changes)
    try:
        yield _current
    finally:
        _current = before
