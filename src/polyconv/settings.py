"""Every setting of polyconv, typed, in one place.

A setting has a default, can be changed for the process by an environment variable that starts with ``POLYCONV_`` (read
at first use, not at import), and for a block of code by :func:`use`. Nothing else in the package reads the environment.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from operator import iadd
from pathlib import Path
from typing import Any, Literal

from . import epoch
from .blocks import Block, Entry, Stack
from .forking import whole
from .once import warn_once
from .problem import DEFAULT_TOLERANCE

PREFIX = "POLYCONV_"
INSTRUCTION_SETS = ("avx512", "avx2", "sse4")
"""Of the native CPU kernels, the best first."""
OTHER_VARIABLES = {"BUILD_DIR", "BUILD_NATIVE", "CAMPAIGN_SECONDS", "CI_TORCH", "NIGHTLY"}
"""Read when polyconv is built or tested: no settings, and no misspelt ones."""


class SettingsError(ValueError):
    """An environment variable whose value cannot be read. The message names both."""


NO_CACHE = (
    "no folder is known for polyconv's cache: this process has no home directory (HOME is not set, and its user has no "
    "entry in the system's list of users). Set POLYCONV_CACHE_DIR to a folder that can be written"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The values in force. Frozen: a changed setting is a new object, so a plan can remember its own."""

    cache_dir: Path | None = None
    """``POLYCONV_CACHE_DIR``: compiled kernels. Default: ``polyconv`` under ``$XDG_CACHE_HOME`` or ``~/.cache``; none
    where a process has no home."""
    workspace_bytes: int = 64 * 2**20
    """``POLYCONV_WORKSPACE_BYTES``: most scratch memory that one convolution may take on the device."""
    tolerance: float = DEFAULT_TOLERANCE
    """``POLYCONV_TOLERANCE``: the error, relative to the output's scale, that a fast algorithm may be expected to make.
    With 0, only direct summation runs."""
    tuning_file: tuple[Path, ...] | None = None
    """``POLYCONV_TUNING_FILE``: measured choices that replace the cost model's. Several files are separated by ``:``
    and asked in that order, then the one that ``polyconv tune`` writes by itself (``tuning.json`` in the cache's
    folder), which is the default. ``off``: none at all, the model decides."""
    profile: Path | Literal["off"] | None = None
    """``POLYCONV_PROFILE``: what ``polyconv calibrate`` measured of this processor. Default: ``profile.json`` in the
    cache's folder, if it is there; behind it stand the profiles that are shipped. ``off``: none at all, the cost model
    is believed as it is."""
    jit: bool = True
    """``POLYCONV_JIT``: ``off`` never runs the CUDA compiler; a kernel that is nowhere on disk is an error then."""
    kernels: Path | None = None
    """``POLYCONV_KERNELS``: a folder of compiled kernels from ``polyconv warmup -o``, looked into before the cache."""
    allow_low_precision: bool = False
    """``POLYCONV_ALLOW_LOW_PRECISION``: see :func:`allow_low_precision`. ``on`` or ``off``."""
    benchmark: bool = False
    """``POLYCONV_BENCHMARK``: see :func:`benchmark`. ``on`` or ``off``."""
    output_pool: int = 2**30
    """``POLYCONV_OUTPUT_POOL``: memory of freed outputs that the CPU kernels keep for the next ones, at most; in bytes,
    or as ``256M``. The system takes longer to clear new memory than a large convolution takes to compute. 0 keeps none;
    ``with settings.use(output_pool=0): pass`` gives all of it back."""
    instruction_set: Literal["avx512", "avx2", "sse4"] | None = None
    """``POLYCONV_INSTRUCTION_SET``: the best instruction set that the CPU kernels may use, ``avx512``, ``avx2`` or
    ``sse4``. Default: the processor's own. PyTorch's kernels have variables of their own, see below."""
    strict: bool = False
    """``POLYCONV_STRICT``: ``on`` raises where a CUDA kernel cannot be compiled, loaded or launched; else a warning
    says what to report, and the next best kernel runs."""

    def __post_init__(self) -> None:
        if self.instruction_set not in (None, *INSTRUCTION_SETS):
            raise ValueError(f"expected one of {', '.join(INSTRUCTION_SETS)}; got {self.instruction_set!r}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Defaults, overridden by the variables that are set. A value that cannot be read is an error."""
        found: dict[str, Any] = {}
        for name, read in _READERS.items():
            variable = PREFIX + name.upper()
            text = environ.get(variable, "").strip()
            if not text:
                continue
            try:
                found[name] = read(text)
            except (ValueError, RuntimeError) as error:
                raise SettingsError(f"cannot read {variable}={text!r}: {error}") from None
        if "cache_dir" not in found:
            found["cache_dir"] = _default_cache_dir(environ)
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


def _default_cache_dir(environ: Mapping[str, str]) -> Path | None:
    base = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "polyconv"
    except RuntimeError:  # no HOME, and a user whom the system does not know
        return None


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


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:I?B)?", text.upper())
    if found is None:
        raise ValueError("expected a number of bytes, or one such as 256M or 1G")
    return int(found[1]) << 10 * " KMGT".index(found[2] or " ")


def _one_of_the_sets(text: str) -> str:
    return str(Settings(instruction_set=text.lower()).instruction_set)  # type: ignore[arg-type]


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _tuning_files(text: str) -> tuple[Path, ...]:
    if text.lower() == "off":
        return ()
    return tuple(_path(part) for part in text.split(os.pathsep) if part)


def checked_tolerance(tolerance: float | str) -> float:
    """The tolerance as a float, if it is one."""
    number = float(tolerance)
    if not number >= 0:
        raise ValueError(f"a tolerance is a number from 0 (direct summation only) up; got {tolerance!r}")
    return number


_READERS: dict[str, Callable[[str], Any]] = {
    "cache_dir": _path,
    "workspace_bytes": _byte_count,
    "tolerance": checked_tolerance,
    "tuning_file": _tuning_files,
    "profile": lambda text: "off" if text.lower() == "off" else _path(text),
    "jit": _switch,
    "kernels": _path,
    "allow_low_precision": _switch,
    "benchmark": _switch,
    "output_pool": _size,
    "instruction_set": _one_of_the_sets,
    "strict": _switch,
}

_current: Settings | None = None
_process: Settings | None = None
"""Without the blocks that are being run."""
_initial: Settings | None = None


class _Change:
    """What a ``with`` block changes."""

    __slots__ = ("below", "changed", "holds_changes", "settings")

    def __init__(self, changed: Mapping[str, Any], *, holds_changes: bool = True) -> None:
        self.changed = changed
        self.holds_changes = holds_changes
        """Whether what is set in the block ends with it."""
        self.settings = replace(current(), **changed)
        """In force in the block."""
        self.below: Settings | None = None
        """What they were made of: in force in the block that was entered before, or in the process."""


changes = ""
"""What the program itself has set that a compiled graph depends on, as text; empty while the environment's word holds.
Text, because ``torch.compile`` guards on text by value, and would make a variable of a number that changes."""


@epoch.follow
def current() -> Settings:
    """The settings in force now."""
    global _current, _process, _initial
    if _current is None:
        _warn_of_misspelt(os.environ)
        _initial = _process = Settings.from_environment(os.environ)
        _current = _initial
        for apply in _observers:
            apply(_initial)
    return _current


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Name the variables that look like settings and are none, each with the one that it resembles most."""
    known = sorted(name.upper() for name in _READERS)
    for variable, value in environ.items():
        name = variable.removeprefix(PREFIX)
        if name == variable or not value or name in known or name in OTHER_VARIABLES:
            continue
        close = get_close_matches(name, known, n=1)
        meant = f"did you mean {PREFIX}{close[0]}?" if close else f"there are {', '.join(map(PREFIX.__add__, known))}"
        warn_once(f"{variable} is set, but polyconv has no such setting: {meant}")


_observers: list[Callable[[Settings], None]] = []


def observe(apply: Callable[[Settings], None]) -> None:
    """Call a function with the settings in force and after every change: for what native code holds itself.

    It is called now if the environment has been read, else when that is: this alone reads nothing.
    """
    _observers.append(apply)
    if _current is not None:
        apply(_current)


def cache_folder() -> Path:
    """The folder of the cache, for who cannot do without one."""
    folder = current().cache_dir
    if folder is None:
        raise SettingsError(NO_CACHE)
    return folder


def _set(**changed: Any) -> None:
    """Change settings for the rest of the block that was entered last, or of the process."""
    # torch.compile cannot look into what takes a lock, and is not meant to: it would write the change down for the end
    # of the graph, and the convolutions in the graph would not see it. So the graph breaks here.
    with whole:
        _set_among(_changes.entries, changed)


def _set_among(entries: tuple[Entry[_Change], ...], changed: Mapping[str, Any]) -> None:
    """The same for the last of these blocks that changes end with; for the process, if there is none."""
    global _process
    epoch.changed()
    blocks = [entry.value for entry in entries if entry.value.holds_changes]
    if blocks:
        blocks[-1].changed = {**blocks[-1].changed, **changed}
        blocks[-1].below = None
    else:
        _process = replace(_process or current(), **changed)
    _settle()
    epoch.changed()


def _settle() -> None:
    """Work out what is in force, in ``with whole``. Whoever is interrupted may do it again."""
    global _current, changes
    while True:
        entries = _changes.entries
        found = _process or current()
        for entry in entries:
            change = entry.value
            if change.below is not found:
                change.settings = replace(found, **change.changed)
                change.below = found
            found = change.settings
        text = _in_graphs(found)
        text = "" if text == _in_graphs(_initial or found) else text
        if _changes.entries is entries:  # else a forgotten block ended meanwhile, in this thread
            _current, changes = found, text
            for apply in _observers:
                apply(found)
            return


def _in_graphs(settings: Settings) -> str:
    return f"tolerance={settings.tolerance} allow_low_precision={settings.allow_low_precision}"


_changes: Stack[_Change] = Stack(_settle)


class _Use(Block[_Change, None]):
    """What :func:`use` gives."""

    def __init__(self, changed: Mapping[str, Any]) -> None:
        super().__init__(_changes, _Change(changed), None)
        self._changed = changed

    def __enter__(self) -> Settings:  # type: ignore[override]
        self._value = _Change(self._changed)  # anew each time: what is set inside the block ends with it
        super().__enter__()
        return self._value.settings


def use(**changed: Any) -> AbstractContextManager[Settings]:
    """Change settings inside a ``with`` block: ``with settings.use(workspace_bytes=0): ...``.

    The change holds for the whole process, not for one thread: the backward pass runs in threads of autograd's own, and
    must see what the forward pass saw. Of blocks that threads enter at the same time, the one that was entered last has
    its way; each takes back only what it changed, in whatever order they end. In a function that is compiled, a block
    breaks the graph; the arguments of a call and the attributes of a module do not.
    """
    return _Use(changed)


def set_tolerance(tolerance: float) -> float:
    """Set the error budget of every convolution that has none of its own; gives the one that held before.

    The budget is the largest error of any output element that may be expected of a fast algorithm, relative to the
    output's scale (see docs/accuracy.md). A larger one lets algorithms run that multiply less; 0 allows direct
    summation only. A call's own argument and a module's come before this.
    """
    before = current().tolerance
    _set(tolerance=checked_tolerance(tolerance))
    return before


def tolerance(value: float) -> AbstractContextManager[Settings]:
    """:func:`set_tolerance` for a ``with`` block. A forward pass in it settles the budget of its backward pass, too."""
    return use(tolerance=checked_tolerance(value))


_DEPTH = 64
"""How often a switch can be entered inside itself."""
_UNUSED = (None,) * _DEPTH


class _Used(list[None]):
    """A switch whose first block has ended: nothing of it is in force outside of a block."""

    _again: Block[_Change, None]

    def __enter__(self) -> None:
        self._again.__enter__()

    def __exit__(self, *reason: object) -> None:
        self._again.__exit__(*reason)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._again(function)


class _Switched(_Used):
    """What a switch gives: in force from the beginning, and until the end of a block, if it has one.

    Not a value that is put back: another thread may have changed it meanwhile, or be in a block of its own. Dropped
    without a block it stays in force; but a signal on the way into a block drops it, too. So it stays only if it was
    given to the caller and never entered. Both are single steps of C code, during which no signal is handled: it is a
    list that gets its elements when it is given (``iadd``), and entering it takes one of them.
    """

    _entry: Entry[_Change] | None = None

    def __init__(self, **changed: bool) -> None:
        super().__init__()
        change = _Change(changed, holds_changes=False)
        self._again = Block(_changes, change, None)
        self._entry = Entry(change)
        _changes.put(self._entry)

    __enter__ = list.pop

    def __exit__(self, *_: object) -> None:
        if len(self) < _DEPTH - 1:  # of a block inside itself
            self.append(None)
        elif self._entry is not None:
            _changes.take(self._entry)
            self.__class__ = _Used  # type: ignore[assignment]

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As a decorator it is in force while the function runs."""
        with self:
            return super().__call__(function)

    def __del__(self) -> None:
        if self._entry is None or sys.is_finalizing():
            return
        if len(self) == _DEPTH and sys._getframe(1).f_code not in _SWITCHES:
            _keep(self._entry)
        else:
            _changes.take(self._entry)


def _keep(entry: Entry[_Change]) -> None:
    """Let a change hold for the rest of the block around it, or of the process."""
    with whole:
        _set_among(_changes.entries[: _changes.entries.index(entry)], entry.value.changed)
        _changes.take(entry)


def allow_low_precision(allow: bool = True) -> AbstractContextManager[None]:
    """Let autocast on a CPU mean what it means elsewhere in torch: for the process, or, as a context, for a block.

    By default a convolution on a CPU computes in float32 and gives float32, also under ``torch.autocast``. Once
    allowed, autocast's dtype is followed: PyTorch's own convolution runs in that dtype. On a GPU it is always followed,
    because there the kernels multiply elements of 16 bits, sum in float32 and round the result once::

        polyconv.allow_low_precision()
        with polyconv.allow_low_precision(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = conv(x)  # bfloat16
    """
    return iadd(_Switched(allow_low_precision=bool(allow)), _UNUSED)  # type: ignore[no-any-return]


def follows_autocast(device_type: str) -> bool:
    """Whether a convolution in a region of autocast computes in the region's dtype, under the settings of now."""
    return device_type == "cuda" or current().allow_low_precision


def benchmark(enable: bool = True) -> AbstractContextManager[None]:
    """Let the first calls of each new problem be a race: for the process, or, as a context, for a block.

    As ``torch.backends.cudnn.benchmark``, but no call is made that the program does not make itself. While a problem is
    raced, each of its calls is computed by one contender, on the caller's own tensors, and timed: PyTorch's convolution
    (on the CPU), and those of polyconv's plans that the cost model ranks first. Who is far behind drops out; after some
    ten to sixty calls the fastest is known, and stays for the process, also after the block. Every result keeps the
    tolerance, but the last bits may differ from call to call until then. So nothing is raced where
    ``torch.use_deterministic_algorithms`` or ``torch.backends.cudnn.deterministic`` asks for determinism; only plain
    calls are raced, not those of a compiled graph, of a CUDA graph that is captured, under ``torch.func``, autocast, a
    profiler or a mode. What a tuning file or :func:`polyconv.optimize` has settled is not raced either. On a GPU a call
    that takes part waits for the end of the one before::

        polyconv.benchmark()
        for batch in loader:  # the first some are the race
            model(batch)
        polyconv.save_benchmark("tuning.json")  # for later processes
    """
    return iadd(_Switched(benchmark=bool(enable)), _UNUSED)  # type: ignore[no-any-return]


_SWITCHES = {allow_low_precision.__code__, benchmark.__code__}
"""Where a switch is dropped before it was given to the caller."""
