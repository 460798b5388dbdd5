"""All settings of polyconv.

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
from functools import lru_cache
from operator import attrgetter, iadd
from pathlib import Path
from typing import Any, Literal

from .problem import DEFAULT_TOLERANCE, TORCH_FLOAT32, TORCH_TOLERANCE, Tolerance
from .runtime import state_version
from .runtime.fork_safety import STATE_LOCK
from .runtime.scopes import Scope, ScopeEntry, ScopeStack
from .runtime.warn_once import warn_once

PREFIX = "POLYCONV_"
X86_SETS = ("avx512", "avx2", "sse4")
"""Instruction sets of the native CPU kernels on x86-64, the best first."""
INSTRUCTION_SETS = (*X86_SETS, "neon")
"""All of them, numbered as in ``csrc/cpu``. ARM64 has one, so there is nothing to limit."""
OTHER_VARIABLES = {"BUILD_DIR", "BUILD_NATIVE", "CAMPAIGN_SECONDS", "CI_TORCH", "NIGHTLY", "TORCH_DIR"}
"""Variables of the build and the tests: not settings, and not reported as misspelt."""


class SettingsError(ValueError):
    """An environment variable with an invalid value. The message names both."""


NO_CACHE = (
    "no folder is known for polyconv's cache: this process has no home directory (HOME is not set, and its user has no "
    "entry in the system's list of users). Set POLYCONV_CACHE_DIR to a folder that can be written"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The values in force. Frozen: a change makes a new object, so a plan can store the settings it was made under."""

    cache_dir: Path | None = None
    """``POLYCONV_CACHE_DIR``: folder of compiled kernels. Default: ``polyconv`` under ``$XDG_CACHE_HOME`` or
    ``~/.cache``; none if the process has no home directory."""
    workspace_bytes: int = 64 * 2**20
    """``POLYCONV_WORKSPACE_BYTES``: largest workspace of one convolution on the device [bytes]."""
    tolerance: float = DEFAULT_TOLERANCE
    """``POLYCONV_TOLERANCE``: largest predicted error of a fast algorithm, relative to the output's scale. With 0, only
    direct summation runs. With ``torch``, the error that PyTorch has under its flags: see :func:`set_tolerance`."""
    tuning_file: tuple[Path, ...] | None = None
    """``POLYCONV_TUNING_FILE``: measured choices that replace the cost model's. Several files are separated by ``:``
    and searched in that order, then the default one, which ``polyconv tune`` writes (``tuning.json`` in the cache's
    folder). ``off``: no file, the cost model decides."""
    profile: Path | Literal["off"] | None = None
    """``POLYCONV_PROFILE``: measurements of this processor by ``polyconv calibrate``. Default: ``profile.json`` in the
    cache's folder, if it exists, then the shipped profiles. ``off``: no profile, the cost model is not corrected."""
    jit: bool = True
    """``POLYCONV_JIT``: ``off`` never runs the CUDA compiler; a kernel that is not on disk is then an error."""
    kernels: Path | Literal["off"] | None = None
    """``POLYCONV_KERNELS``: folder of compiled kernels from ``polyconv warmup -o``, searched before the cache. With the
    digest that the command prints, ``<folder>#<digest>``, contents are checked instead of owners, permissions and
    links. Bundles of installed wheels (``polyconv bundle wheel``) follow; ``off`` searches none of them."""
    allow_low_precision: bool = True
    """``POLYCONV_ALLOW_LOW_PRECISION``: see :func:`allow_low_precision`. ``on`` or ``off``."""
    benchmark: bool = False
    """``POLYCONV_BENCHMARK``: see :func:`benchmark`. ``on`` or ``off``."""
    output_pool: int = 2**30
    """``POLYCONV_OUTPUT_POOL``: most memory of freed outputs that the CPU kernels keep for reuse; in bytes, or as
    ``256M``. The system takes longer to clear new memory than a large convolution takes to compute. 0 keeps none;
    ``with settings.use(output_pool=0): pass`` frees all of it."""
    instruction_set: Literal["avx512", "avx2", "sse4"] | None = None
    """``POLYCONV_INSTRUCTION_SET``: the best instruction set that the CPU kernels may use, ``avx512``, ``avx2`` or
    ``sse4``. Default: the processor's best. No effect on ARM64, which has NEON alone. PyTorch's kernels have variables
    of their own, see below."""
    strict: bool = False
    """``POLYCONV_STRICT``: ``on`` raises if a CUDA kernel cannot be compiled, loaded or launched; otherwise a warning
    says what to report, and the next best kernel runs."""

    def __post_init__(self) -> None:
        if self.instruction_set not in (None, *X86_SETS):
            raise ValueError(f"expected one of {', '.join(X86_SETS)}; got {self.instruction_set!r}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Defaults, overridden by the variables that are set. An invalid value raises :class:`SettingsError`."""
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
        """Every setting as the environment variable that would set it; empty for None."""
        return {PREFIX + f.name.upper(): _as_text(getattr(self, f.name)) for f in fields(self)}

    def __str__(self) -> str:
        return "\n".join(f"{variable}={text}" for variable, text in self.as_variables().items())


def _as_text(value: Any) -> str:
    if value == TORCH_TOLERANCE:
        return "torch"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return os.pathsep.join(map(str, value)) or "off"
    return "" if value is None else str(value)


def _default_cache_dir(environ: Mapping[str, str]) -> Path | None:
    base = environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "polyconv"
    except RuntimeError:  # no HOME, and a user without an entry in the user database
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


def _kernels(text: str) -> Path | str:
    if text.lower() == "off":
        return "off"
    path = _path(text)
    _, mark, digest = text.rpartition("#")
    if mark and not re.fullmatch(r"[0-9a-fA-F]{64}", digest) and not path.exists():
        raise ValueError("expected 64 hexadecimal digits after #, the digest that polyconv warmup prints")
    return path


def _tuning_files(text: str) -> tuple[Path, ...]:
    if text.lower() == "off":
        return ()
    return tuple(_path(part) for part in text.split(os.pathsep) if part)


def checked_tolerance(tolerance: float | str) -> float:
    """The tolerance as a float. Raises ValueError if it is negative or not a number; ``"torch"`` is one."""
    number = TORCH_TOLERANCE if tolerance == "torch" else float(tolerance)
    if not number >= 0 and number not in (TORCH_TOLERANCE, TORCH_FLOAT32):
        raise ValueError(f'a tolerance is a number from 0 (direct summation only) up, or "torch"; got {tolerance!r}')
    return number


_READERS: dict[str, Callable[[str], Any]] = {
    "cache_dir": _path,
    "workspace_bytes": _byte_count,
    "tolerance": checked_tolerance,
    "tuning_file": _tuning_files,
    "profile": lambda text: "off" if text.lower() == "off" else _path(text),
    "jit": _switch,
    "kernels": _kernels,
    "allow_low_precision": _switch,
    "benchmark": _switch,
    "output_pool": _size,
    "instruction_set": _one_of_the_sets,
    "strict": _switch,
}

_current: Settings | None = None
_process: Settings | None = None
"""Settings of the process outside all ``with`` blocks."""
_initial: Settings | None = None


class _Change:
    """Settings changed by a ``with`` block."""

    __slots__ = ("below", "changed", "holds_changes", "settings")

    def __init__(self, changed: Mapping[str, Any], *, holds_changes: bool = True) -> None:
        self.changed = changed
        self.holds_changes = holds_changes
        """Whether a setting changed inside the block is reset at its end."""
        self.settings = replace(current(), **changed)
        """Settings in force in the block."""
        self.below: Settings | None = None
        """Settings that ``changed`` was applied to: those of the block entered before, or of the process."""


changes = ""
"""Settings made by the program that a compiled graph depends on, as text; empty while the environment's values hold.
Text, because ``torch.compile`` guards text by value, but would turn a changing number into a symbolic variable."""
planned_with = ""
"""The same for graphs that are planned when they are compiled (:mod:`polyconv.inductor`)."""


@state_version.include
def current() -> Settings:
    """The settings in force."""
    global _current, _process, _initial
    if _current is None:
        _warn_of_misspelt(os.environ)
        _initial = _process = Settings.from_environment(os.environ)
        _current = _initial
        for apply in _observers:
            apply(_initial)
    return _current


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    """Warn of ``POLYCONV_`` variables that are not settings, each with the closest setting."""
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
    """Call ``apply`` with the settings once the environment has been read, and after every change: for native code."""
    _observers.append(apply)
    if _current is not None:
        apply(_current)


def cache_folder() -> Path:
    """Folder of the cache. Raises :class:`SettingsError` if there is none."""
    folder = current().cache_dir
    if folder is None:
        raise SettingsError(NO_CACHE)
    return folder


def cache_file(name: str) -> Path:
    """Path of a file in the folder of the cache."""
    return _joined(cache_folder(), name)


@lru_cache(maxsize=8)
def _joined(folder: Path, name: str) -> Path:
    return folder / name  # cached: every new shape asks for two files, and joining paths takes 5 us


def _set(**changed: Any) -> None:
    """Change settings for the rest of the innermost block, or of the process."""
    # The lock makes torch.compile break the graph here, as it must: it would otherwise defer the change to the end of
    # the graph, where the convolutions in the graph would not see it.
    with STATE_LOCK:
        _set_among(_changes.entries, changed)


def _set_among(entries: tuple[ScopeEntry[_Change], ...], changed: Mapping[str, Any]) -> None:
    """Change settings in the last of the blocks that hold changes, or in the process if there is none."""
    global _process
    state_version.changed()
    blocks = [entry.value for entry in entries if entry.value.holds_changes]
    if blocks:
        blocks[-1].changed = {**blocks[-1].changed, **changed}
        blocks[-1].below = None
    else:
        _process = replace(_process or current(), **changed)
    _settle()
    state_version.changed()


def _settle() -> None:
    """Recompute the settings in force, holding the lock ``STATE_LOCK``. May be repeated after an interruption."""
    global _current, changes, planned_with
    while True:
        entries = _changes.entries
        found = _process or current()
        for entry in entries:
            change = entry.value
            if change.below is not found:
                change.settings = replace(found, **change.changed)
                change.below = found
            found = change.settings
        started = _initial or found
        texts = ["" if read(found) == read(started) else str(read(found)) for read in (_IN_GRAPHS, _IN_PLANS)]
        if _changes.entries is entries:  # else an abandoned block was collected meanwhile, in this thread
            _current, (changes, planned_with) = found, texts
            for apply in _observers:
                apply(found)
            return


_IN_GRAPHS = attrgetter("tolerance", "allow_low_precision")
_IN_PLANS = attrgetter("tolerance", "allow_low_precision", "instruction_set", "tuning_file", "profile")


_changes: ScopeStack[_Change] = ScopeStack(_settle)


class _Use(Scope[_Change, None]):
    """Context manager of :func:`use`."""

    def __init__(self, changed: Mapping[str, Any]) -> None:
        super().__init__(_changes, _Change(changed), None)
        self._changed = changed

    def __enter__(self) -> Settings:  # type: ignore[override]
        self._value = _Change(self._changed)  # new at each entry: settings changed inside the block end with it
        super().__enter__()
        return self._value.settings


def use(**changed: Any) -> AbstractContextManager[Settings]:
    """Change settings inside a ``with`` block: ``with settings.use(workspace_bytes=0): ...``.

    The change holds for the whole process, not for one thread, because the backward pass runs in autograd's threads and
    must see the settings of the forward pass. If blocks of several threads overlap, the one entered last wins; each
    reverts only its own changes, in any order. In a compiled function a block breaks the graph; arguments of a call and
    attributes of a module do not.
    """
    return _Use(changed)


def set_tolerance(tolerance: Tolerance) -> float:
    """Set the default error budget of convolutions. Returns the previous one.

    The budget limits the predicted error of any output element computed by a fast algorithm, relative to the output's
    scale (see docs/accuracy.md). A larger budget allows algorithms with fewer multiplications; 0 allows direct
    summation only. ``"torch"`` stands for the error that PyTorch's convolution has under its current flags: TF32's on a
    GPU that has the format, while ``torch.backends.cudnn.allow_tf32`` is on, else that of direct summation in float32.
    The ``tolerance`` of a call or of a module takes precedence.
    """
    before = current().tolerance
    _set(tolerance=checked_tolerance(tolerance))
    return before


def tolerance(value: Tolerance) -> AbstractContextManager[Settings]:
    """:func:`set_tolerance` for a ``with`` block. It also applies to the backward passes of forward passes in it."""
    return use(tolerance=checked_tolerance(value))


_DEPTH = 64
"""Most nested entries of one switch."""
_UNUSED = (None,) * _DEPTH


class _Used(list[None]):
    """A switch whose first block has ended: in force only inside further blocks."""

    _again: Scope[_Change, None]

    def __enter__(self) -> None:
        self._again.__enter__()

    def __exit__(self, *reason: object) -> None:
        self._again.__exit__(*reason)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._again(function)


class _Switched(_Used):
    """Result of a switch: in force at once, for the process or, if used in ``with``, until the end of the block.

    An entry of the stack, not a saved value: other threads may change the setting meanwhile. Dropped without a block it
    stays in force, but not if a signal between call and block drops it. So it stays only if it was returned to the
    caller and never entered. Both steps are atomic to signals, being single steps of C code: it is a list that is
    filled when it is returned (``iadd``), and ``__enter__`` pops an element.
    """

    _entry: ScopeEntry[_Change] | None = None

    def __init__(self, **changed: bool) -> None:
        super().__init__()
        change = _Change(changed, holds_changes=False)
        self._again = Scope(_changes, change, None)
        self._entry = ScopeEntry(change)
        _changes.put(self._entry)

    __enter__ = list.pop

    def __exit__(self, *_: object) -> None:
        if len(self) < _DEPTH - 1:  # a nested block
            self.append(None)
        elif self._entry is not None:
            _changes.take(self._entry)
            self.__class__ = _Used  # type: ignore[assignment]

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: in force while the function runs."""
        with self:
            return super().__call__(function)

    def __del__(self) -> None:
        if self._entry is None or sys.is_finalizing():
            return
        if len(self) == _DEPTH and sys._getframe(1).f_code not in _SWITCHES:
            _keep(self._entry)
        else:
            _changes.take(self._entry)


def _keep(entry: ScopeEntry[_Change]) -> None:
    """Make a change hold for the rest of the enclosing block, or of the process."""
    with STATE_LOCK:
        _set_among(_changes.entries[: _changes.entries.index(entry)], entry.value.changed)
        _changes.take(entry)


def allow_low_precision(allow: bool = True) -> AbstractContextManager[None]:
    """Follow ``torch.autocast`` on a CPU, or do not: for the process or, as a context manager, for a block.

    By default it is followed, as by ``torch.nn``: operands and result have the region's dtype, sums are float32. With
    ``False`` a convolution on a CPU computes in float32 and returns float32. On a GPU autocast is always followed::

        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = conv(x)  # bfloat16
            with polyconv.allow_low_precision(False):
                y = conv(x)  # float32
    """
    return iadd(_Switched(allow_low_precision=bool(allow)), _UNUSED)  # type: ignore[no-any-return]


def follows_autocast(device_type: str) -> bool:
    """Whether convolutions follow the dtype of ``torch.autocast`` under the current settings."""
    return device_type == "cuda" or current().allow_low_precision


def benchmark(enable: bool = True) -> AbstractContextManager[None]:
    """Autotune the first calls of each new problem: for the process or, as a context manager, for a block.

    As ``torch.backends.cudnn.benchmark``, but without extra calls: during an autotuning session each of the program's
    own calls of a problem runs and times one trial, PyTorch's convolution (on the CPU) or a plan that the cost model
    ranks first. Slow trials are dropped; after some ten to sixty calls the fastest is known, and stays for the process,
    also after the block. Every result keeps the tolerance, but last bits may differ from call to call until then.
    Excluded are calls under ``torch.use_deterministic_algorithms``, ``torch.backends.cudnn.deterministic``,
    ``torch.func``, autocast, a profiler or a mode, in compiled graphs and in CUDA graphs being captured, and problems
    decided by a tuning file or :func:`polyconv.optimize`. On a GPU a timed call waits for the previous one::

        polyconv.benchmark()
        for batch in loader:  # the first few are the autotuning session
            model(batch)
        polyconv.save_benchmark("tuning.json")  # for later processes
    """
    return iadd(_Switched(benchmark=bool(enable)), _UNUSED)  # type: ignore[no-any-return]


_SWITCHES = {allow_low_precision.__code__, benchmark.__code__}
"""Code objects in which a switch is dropped before it was returned to the caller."""
