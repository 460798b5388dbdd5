"""Compiled kernels as folders on disk: how one is written, read, checked and listed.

An entry is a folder that a person can read::

    <folder>/<symbol>-<arch>-<hash>/kernel.cu      what was compiled
                                    kernel.cubin   the result
                                    meta.json      what the hash was made of, and the cubin's own checksum

Entries appear whole, by a rename, or not at all. The machine's cache (:mod:`~polyconv.cuda.cache`) and the bundles that
are shipped to other machines (:mod:`~polyconv.cuda.bundle`) have the same entries.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import is_writable, sync_directory, write_synced
from .fingerprint import entry_name, entry_prefix, sha256

PRIVATE, SHARED = 0o600, 0o644
"""Permissions of an entry's files: for the owner alone, or for everybody to read."""


class EntryError(Exception):
    """An entry that is there and must not run: damaged, or written by another user. The message says which."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel, whose description could be read."""

    path: Path
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Entry | None:
        """The entry at a path, None if there is nothing; :class:`EntryError` if its description makes no sense."""
        try:
            meta = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            if path.is_dir():
                raise EntryError("meta.json is missing") from None
            return None
        except (OSError, ValueError) as error:
            raise EntryError(f"meta.json cannot be read: {error}") from error
        if not isinstance(meta, dict) or not {"symbol", "arch", "cubin"} <= meta.keys():
            raise EntryError("meta.json does not describe a kernel")
        return cls(path, meta)

    @property
    def symbol(self) -> str:
        return str(self.meta["symbol"])

    @property
    def arch(self) -> str:
        return str(self.meta["arch"])

    @property
    def compiler(self) -> str:
        return str(self.meta.get("compiler", "unknown"))

    @property
    def modified(self) -> float:
        """When it was written, in seconds since 1970."""
        return self.path.stat().st_mtime

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    def is_of(self, kernel: Mapping[str, Any]) -> bool:
        """Whether it was compiled from exactly this kernel (:func:`~.fingerprint.identity`)."""
        return all(self.meta.get(key) == value for key, value in kernel.items())

    def cubin(self, trusted: tuple[int, ...] = ()) -> bytes:
        """The binary, if it is what was stored, by somebody who may choose what runs here.

        Args:
            trusted: users whose entries are taken, beside this process's own and root.
        """
        try:
            owner = self.path.stat().st_uid
            # Whoever can write an entry chooses what runs on the GPU in this process.
            if hasattr(os, "geteuid") and owner not in (os.geteuid(), 0, *trusted):
                raise EntryError(f"it belongs to another user (id {owner})")
            data = (self.path / "kernel.cubin").read_bytes()
        except OSError as error:
            raise EntryError(f"kernel.cubin cannot be read: {error}") from error
        if sha256(data) != self.meta["cubin"]:
            raise EntryError("kernel.cubin is not the file that was stored: its checksum differs from meta.json's")
        return data

    def check(self) -> None:
        """Raise :class:`EntryError` if anything about the entry is not as it was stored."""
        self.cubin()
        facts = {key: value for key, value in self.meta.items() if key != "cubin"}
        if entry_name(facts) != self.path.name:
            raise EntryError("meta.json does not belong to this entry: its hash is not the folder's name")
        try:
            source = (self.path / "kernel.cu").read_bytes()
        except OSError as error:
            raise EntryError(f"kernel.cu cannot be read: {error}") from error
        if sha256(source) != self.meta.get("source"):
            raise EntryError("kernel.cu is not the file that was stored: its checksum differs from meta.json's")


def load(path: Path) -> bytes | None:
    """The binary of an entry, or ``None`` if it is absent, damaged, or not ours."""
    try:
        entry = Entry.read(path)
        return None if entry is None else entry.cubin()
    except EntryError:
        return None


def folders(directory: Path) -> list[Path]:
    """Every folder that is an entry, or should be: not the locks, nor what a dying process left behind."""
    try:
        found = sorted(path for path in directory.iterdir() if path.is_dir())
    except OSError:
        return []
    return [path for path in found if path.name != "locks" and not path.name.startswith(".")]


def entries(directory: Path) -> Iterator[Entry]:
    """Every entry of a folder that can be read."""
    for path in folders(directory):
        try:
            entry = Entry.read(path)
        except EntryError:
            continue
        if entry is not None:
            yield entry


def summary(directory: Path) -> dict[str, Any]:
    """What is in a folder of kernels, in numbers."""
    archs: dict[str, dict[str, int]] = {}
    for entry in entries(directory):
        of_arch = archs.setdefault(entry.arch, {"kernels": 0, "bytes": 0})
        of_arch["kernels"] += 1
        of_arch["bytes"] += entry.size
    return {
        "directory": str(directory),
        "exists": directory.is_dir(),
        "writable": is_writable(directory),
        "kernels": sum(one["kernels"] for one in archs.values()),
        "bytes": sum(one["bytes"] for one in archs.values()),
        "archs": dict(sorted(archs.items(), key=lambda item: arch_number(item[0]))),
    }


def arch_number(arch: str) -> int:
    """For sorting: sm_100 comes after sm_90."""
    digits = re.sub(r"\D", "", arch)
    return int(digits) if digits else 0


def of_kernel(directory: Path, kernel: Mapping[str, Any]) -> Iterator[Entry]:
    """The entries of one kernel, whatever compiled it. Needs no compiler, only the kernel's identity."""
    prefix = entry_prefix(kernel)
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith(prefix))
    except OSError:
        return
    for name in names:
        try:
            entry = Entry.read(directory / name)
        except EntryError:
            continue
        if entry is not None and entry.is_of(kernel):
            yield entry


def store(entry: Path, source: str, cubin: bytes, facts: Mapping[str, Any], permissions: int = PRIVATE) -> None:
    """Write an entry beside its place and rename it there, replacing a damaged one."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))  # mkdtemp makes it owner-only
    try:
        meta = {**facts, "cubin": sha256(cubin)}
        write_synced(temporary / "kernel.cu", source.encode(), permissions)
        write_synced(temporary / "kernel.cubin", cubin, permissions)
        write_synced(temporary / "meta.json", (json.dumps(meta, indent=2) + "\n").encode(), permissions)
        if permissions == SHARED:
            temporary.chmod(0o755)
        sync_directory(temporary)
        if entry.exists():
            remove(entry)
        os.rename(temporary, entry)
        sync_directory(entry.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove(entry: Path) -> None:
    """Take an entry away at once, so that no other process meets half of one, and then delete it."""
    aside = Path(tempfile.mkdtemp(prefix=f".{entry.name}.removed.", dir=entry.parent))
    os.rename(entry, aside / "entry")
    shutil.rmtree(aside, ignore_errors=True)
