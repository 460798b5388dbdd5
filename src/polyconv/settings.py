"""Every setting of polyconv, typed, in one place.

A setting has a default, can be changed for the process by an environment variable that starts with ``POLYCONV_`` (read
at first use, not at import), and for a block of code by :func:`use`. Nothing else in the package reads the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Lock
from typing import Any

from .problem import DEFAULT_TOLERANCE

PREFIX = "POLYCONV_"


class SettingsError(ValueError):
    """An environment variable whose value cannot be read. The message names both."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The values in force. Frozen: a changed setting is a new object, so a plan can remember its own."""

    cache_dir: Path
    """``POLYCONV_CACHE_DIR``: compiled kernels. Default: ``polyconv`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    workspace_bytes: int = 64 * 2**20
    """``POLYCONV_WORKSPACE_BYTES``: most scratch memory that one convolution may take on the device."""
    tolerance: float = DEFAULT_TOLERANCE
    """``POLYCONV_TOLERANCE``: the error, relative to the output's scale, that a fast algorithm may be expected to make.
    With 0, only direct summation runs."""
    tuning_file: tuple[Path, ...] | None = None
    """``POLYCONV_TUNING_FILE``: measured choices that replace the cost model's. Several files are separated by ``:``
    and asked in that order, then the one that ``polyconv tune`` writes by itself (``tuning.json`` in the cache's
    folder), which is the default. ``off``: none at all, the model decides."""
    jit: bool = True
    """``POLYCONV_JIT``: ``off`` never runs the CUDA compiler; a kernel that is nowhere on disk is an error then."""
    kernels: Path | None = None
    """``POLYCONV_KERNELS``: a folder of compiled kernels from ``polyconv warmup -o``, looked into before the cache."""
    allow_low_precision: bool = False
    """``POLYCONV_ALLOW_LOW_PRECISION``: see :func:`allow_low_precision`. ``on`` or ``off``."""

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
                raise SettingsError(f"cannot read {variable}={text!r}: {error}") from None
        return cls(**found)

    def as_variables(self) -> dict[str, str]:
        """Every setting as the environment variable that would set it; empty where there is none."""
        return {PREFIX + f.name.upper(): _as_text(getattr(self, f.name)) for f in fields(self)}

    def __str__(self) -> str:
        return "\n".join(f"{variable}={text}" for variable, text in self.as_variables().items())


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return os.pathsep.join(map(str, value)) or "off"
    return "" if value is None else str(value)


def _switch(text: str) -> bool:
    answer = {"on": True, "1": True, "true": True, "off": False, "0": False, "false": False}.get(text.lower())
    if answer is None:
        raise ValueError("expected on or off")
    return answer


def _byte_count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError("a number of bytes is not negative")
    return count


def _tuning_files(text: str) -> tuple[Path, ...]:
    if text.lower() == "off":
        return ()
    return tuple(Path(part).expanduser() for part in text.split(os.pathsep) if part)


def checked_tolerance(tolerance: float | str) -> float:
    """The tolerance as a float, if it is one."""
    number = float(tolerance)
    if not number >= 0:
        raise ValueError(f"a tolerance is a number from 0 (direct summation only) up; got {tolerance!r}")
    return number


_READERS: dict[str, Callable[[str], Any]] = {
    "cache_dir": Path,
    "workspace_bytes": _byte_count,
    "tolerance": checked_tolerance,
    "tuning_file": _tuning_files,
    "jit": _switch,
    "kernels": Path,
    "allow_low_precision": _switch,
}

_current: Settings | None = None
_initial: Settings | None = None


@dataclass(slots=True, eq=False)
class _Block:
    """A ``with`` block that is being run."""

    changed: dict[str, Any]
    settings: Settings
    """In force in it: those of the block that was entered before, and what this one changed."""


_blocks: list[_Block] = []
"""In the order in which they were entered; the first is the process itself."""
_lock = Lock()
"""Held while settings change. ``torch.compile`` cannot look into what takes it, and is not meant to: it would write the
change down for the end of the graph, and the convolutions in the graph would not see it. So the graph breaks there."""

changes = ""
"""What the program itself has set that a compiled graph depends on, as text; empty while the environment's word holds.
Text, because ``torch.compile`` guards on text by value, and would make a variable of a number that changes."""


def current() -> Settings:
    """The settings in force now."""
    global _current, _initial
    if _current is None:
        _current = _initial = Settings.from_environment(os.environ)
    return _current


def _set(**changed: Any) -> Settings:
    """Change settings for the rest of the block that was entered last, or of the process."""
    with _lock:
        now = replace(current(), **changed)
        if _blocks:
            _blocks[-1].changed.update(changed)
            _blocks[-1].settings = now
        _change_to(now)
    return now


def _change_to(settings: Settings) -> None:
    global _current, changes
    _current = settings
    text = _in_graphs(settings)
    changes = "" if text == _in_graphs(_initial or settings) else text


def _in_graphs(settings: Settings) -> str:
    return f"tolerance={settings.tolerance} allow_low_precision={settings.allow_low_precision}"


@contextmanager
def use(**changed: Any) -> Iterator[Settings]:
    """Change settings inside a ``with`` block: ``with settings.use(workspace_bytes=0): ...``.

    The change holds for the whole process, not for one thread: the backward pass runs in threads of autograd's own, and
    must see what the forward pass saw. Of blocks that threads enter at the same time, the one that was entered last has
    its way; each takes back only what it changed, in whatever order they end. In a function that is compiled, a block
    breaks the graph; the arguments of a call and the attributes of a module do not.
    """
    with _lock:
        block = _Block(changed, replace(current(), **changed))
        if not _blocks:
            _blocks.append(_Block({}, current()))
        _blocks.append(block)
        _change_to(block.settings)
    try:
        yield block.settings
    finally:
        with _lock:
            place = _blocks.index(block)
            del _blocks[place]
            for outer, inner in zip(_blocks[place - 1 :], _blocks[place:], strict=False):
                inner.settings = replace(outer.settings, **inner.changed)
            _change_to(_blocks[-1].settings)


def set_tolerance(tolerance: float) -> float:
    """Set the error budget of every convolution that has none of its own; gives the one that held before.

    The budget is the largest error of any output element that may be expected of a fast algorithm, relative to the
    output's scale (see docs/accuracy.md). A larger one lets algorithms run that multiply less; 0 allows direct
    summation only. A call's own argument and a module's come before this.
    """
    before = current().tolerance
    _set(tolerance=checked_tolerance(tolerance))
    return before


@contextmanager
def tolerance(value: float) -> Iterator[None]:
    """:func:`set_tolerance` for a ``with`` block. A forward pass in it settles the budget of its backward pass, too."""
    with use(tolerance=checked_tolerance(value)):
        yield


class _Until:
    """Takes a change back at the end of a ``with`` block; the change is made already."""

    def __init__(self, **before: Any) -> None:
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _set(**self._before)


def allow_low_precision(allow: bool = True) -> AbstractContextManager[None]:
    """Let half precision mean what it means elsewhere in torch: for the process, or, as a context, for a block.

    By default a convolution computes in float32 and gives float32, also under ``torch.autocast``, and half-precision
    CUDA tensors are refused. Once allowed, autocast's dtype is followed, and such tensors are taken: on the CPU
    PyTorch's own convolution runs in that dtype; on a GPU the tensors are widened, the kernels compute in float32 as
    ever, and the result is rounded once::

        polyconv.allow_low_precision()
        with polyconv.allow_low_precision(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = conv(x)  # bfloat16
    """
    before = current().allow_low_precision
    _set(allow_low_precision=bool(allow))
    return _Until(allow_low_precision=before)
