"""Compiled kernels on disk: each is compiled once per machine, however many processes start together.

An entry is a folder that a person can read::

    <cache>/<symbol>-<arch>-<hash>/kernel.cu      what was compiled
                                   kernel.cubin   the result
                                   meta.json      what the hash was made of, and the cubin's own checksum

The hash covers everything that can change the binary (see :func:`fingerprint`), so an entry is never stale: a changed
header is another entry. Entries appear whole, by a rename, or not at all. Processes that want the same kernel queue at
a lock, and all but the first find it there. A damaged entry, or one that belongs to another user, counts as absent.

The cache lies in the folder that the settings name (``POLYCONV_CACHE_DIR``). Where that cannot be written the kernels
are compiled in memory, and a warning says so once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import settings
from ..files import locked, sync_directory, write_synced
from ..plan.plan import KernelSpec
from .compile import compile_kernel, compiler_id, flags, in_threads, search_path

SCHEMA = 1
"""Raise it when the layout of an entry or the meaning of the fingerprint changes."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)

Compiler = Callable[[KernelSpec, str], bytes]


def included_headers(source: str, search: Sequence[Path]) -> dict[str, str]:
    """Text of every header that the source reaches, by the name it is included under.

    Follows NVRTC's own rule under ``--no-source-include``: each name is looked up in the search path alone. A name
    that is not found there is skipped, since the compiler will either know it itself or report it.
    """
    headers: dict[str, str] = {}
    waiting = _INCLUDE.findall(source)
    while waiting:
        name = waiting.pop()
        if name in headers:
            continue
        path = next((directory / name for directory in search if (directory / name).is_file()), None)
        if path is not None:
            headers[name] = path.read_text(encoding="utf-8")
            waiting += _INCLUDE.findall(headers[name])
    return headers


def fingerprint(spec: KernelSpec, arch: str, search: Sequence[Path]) -> dict[str, Any]:
    """Everything that can change the binary. Paths are not in it, so a cache can be moved or shipped."""
    source = spec.source()
    return {
        "schema": SCHEMA,
        "symbol": spec.symbol,
        "arch": arch,
        "compiler": compiler_id(),
        "flags": list(flags(arch)),
        "source": _sha256(source.encode()),
        "headers": {name: _sha256(text.encode()) for name, text in sorted(included_headers(source, search).items())},
    }


class KernelCache:
    """Cubins by kernel and architecture: first from memory, then from disk, else from the compiler.

    Safe to use from several threads and several processes. Headers are read when a kernel is first asked for; a process
    does not notice that one is edited afterwards.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        include_dirs: Iterable[str | os.PathLike[str]] = (),
        compiler: Compiler | None = None,
    ) -> None:
        self._directory = Path(directory) if directory is not None else settings.current().cache_dir
        self._include_dirs = tuple(include_dirs)
        self._compiler = compiler or self._compile
        self._memory: dict[tuple[KernelSpec, str], bytes] = {}
        self._guard = threading.Lock()
        self._busy: dict[tuple[KernelSpec, str], threading.Lock] = {}

    @property
    def directory(self) -> Path:
        return self._directory

    def get(self, spec: KernelSpec, arch: str) -> bytes:
        """The kernel's cubin, compiled if it is nowhere to be found."""
        key = (spec, arch)
        cubin = self._memory.get(key)
        if cubin is None:
            with self._guard:
                busy = self._busy.setdefault(key, threading.Lock())
            with busy:
                cubin = self._memory.get(key)
                if cubin is None:
                    cubin = self._memory[key] = self._from_disk_or_compiler(spec, arch)
        return cubin

    def get_many(self, specs: Sequence[KernelSpec], arch: str) -> list[bytes]:
        """The same for several kernels; those that are missing are compiled on all cores."""
        return in_threads(lambda spec: self.get(spec, arch), specs)

    def entry(self, spec: KernelSpec, arch: str) -> Path:
        """The folder that holds, or would hold, the kernel."""
        return self._directory / self._entry_name(fingerprint(spec, arch, search_path(self._include_dirs)))

    @staticmethod
    def _entry_name(facts: Mapping[str, Any]) -> str:
        digest = _sha256(json.dumps(facts, sort_keys=True).encode())
        return f"{facts['symbol']}-{facts['arch']}-{digest[:16]}"

    def _compile(self, spec: KernelSpec, arch: str) -> bytes:
        return compile_kernel(spec, arch, include_dirs=self._include_dirs)

    def _from_disk_or_compiler(self, spec: KernelSpec, arch: str) -> bytes:
        facts = fingerprint(spec, arch, search_path(self._include_dirs))
        name = self._entry_name(facts)
        cubin = _load(self._directory / name)
        if cubin is not None:
            return cubin
        # An installation that must never run a compiler (a serving fleet with shipped kernels) would stop here.
        with contextlib.ExitStack() as stack:
            try:
                _make_private(self._directory)
                stack.enter_context(locked(self._directory / "locks" / f"{name}.lock"))
            except OSError as error:
                _warn_unwritable(self._directory, error)
                return self._compiler(spec, arch)
            # Another process may have stored the kernel while this one waited for the lock.
            cubin = _load(self._directory / name)
            if cubin is not None:
                return cubin
            cubin = self._compiler(spec, arch)
            try:
                _store(self._directory / name, spec.source(), cubin, facts)
            except OSError as error:
                _warn_unwritable(self._directory, error)
            return cubin


def _load(entry: Path) -> bytes | None:
    """The cubin of an entry, or ``None`` if it is absent, damaged, or not ours."""
    try:
        # Whoever can write an entry chooses what runs on the GPU in this process.
        if hasattr(os, "geteuid") and entry.stat().st_uid not in (os.geteuid(), 0):
            return None
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        cubin = (entry / "kernel.cubin").read_bytes()
        return cubin if meta["cubin"] == _sha256(cubin) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _store(entry: Path, source: str, cubin: bytes, facts: Mapping[str, Any]) -> None:
    """Write an entry beside its place and rename it there, replacing a damaged one."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))  # mkdtemp makes it owner-only
    try:
        meta = {**facts, "cubin": _sha256(cubin)}
        write_synced(temporary / "kernel.cu", source.encode())
        write_synced(temporary / "kernel.cubin", cubin)
        write_synced(temporary / "meta.json", (json.dumps(meta, indent=2) + "\n").encode())
        sync_directory(temporary)
        if entry.exists():
            damaged = Path(tempfile.mkdtemp(prefix=f".{entry.name}.damaged.", dir=entry.parent))
            os.rename(entry, damaged / "entry")
            shutil.rmtree(damaged, ignore_errors=True)
        os.rename(temporary, entry)
        sync_directory(entry.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _make_private(directory: Path) -> None:
    """Make the cache's folders, for the owner only; parents such as ``~/.cache`` get the usual permissions."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "locks").mkdir(mode=0o700, exist_ok=True)


_warned = False


def _warn_unwritable(directory: Path, error: OSError) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"polyconv cannot keep compiled kernels in {directory} ({error}); every process will compile them again. "
            f"Set POLYCONV_CACHE_DIR to a folder that can be written.",
            RuntimeWarning,
            stacklevel=3,
        )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
