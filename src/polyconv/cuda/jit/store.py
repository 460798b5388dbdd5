"""Compiled kernels as folders on disk: write, read, check and list.

An entry is a readable folder::

    <folder>/<symbol>-<arch>-<hash>/kernel.cu      what was compiled
                                    kernel.cubin   the result
                                    meta.json      what the hash was made of, and the cubin's own checksum

Entries appear atomically, by a rename. Writing or removing one requires a lock: the cache
(:mod:`~polyconv.cuda.jit.cache`) has one per entry, a bundle (:mod:`~polyconv.cuda.jit.bundle`) one for all.

Write access to an entry is code execution in this process. So a binary is read through descriptors, from the folder
down, without following links, and folder, entry and files must be writable by trusted users only
(:mod:`~polyconv.util.file_trust`). Reading a description alone, for a list, has no such restriction.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...util import checked_json, file_trust
from ...util.atomic_files import Folder, is_writable, meant, unused
from ...util.checked_json import DocumentError
from ...util.file_trust import UntrustedError
from .fingerprint import entry_name, entry_prefix, sha256

PRIVATE, SHARED = 0o600, 0o644
"""Permissions of an entry's files: owner only, or readable by all."""
LARGEST_META, LARGEST_CODE = 2**20, 2**26
"""Limits on the size of files [bytes], far above those that polyconv writes."""


class EntryError(Exception):
    """An entry exists but must not run: damaged, or writable by untrusted users."""


class ForbiddenError(EntryError):
    """This user may not read an entry. It need not be damaged: the folder may be another user's."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel with a readable description."""

    path: Path
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Entry | None:
        """Entry at a path; None if there is none. Raises :class:`EntryError` if its description is invalid."""
        try:
            with Folder(path.parent) as folder, folder.inner(path.name) as entry:
                return cls(path, _described(entry))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable("it", error) from error

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
        """Time of writing [s since 1970]."""
        return self.path.lstat().st_mtime

    @property
    def size(self) -> int:
        """Size of all files [bytes]."""
        return size_of(self.path)

    def is_of(self, kernel: Mapping[str, Any]) -> bool:
        """Whether the entry was compiled from this kernel (:func:`~.fingerprint.identity`)."""
        return all(self.meta.get(key) == value for key, value in kernel.items())

    def cubin(self, *, shipped: bool = False) -> bytes:
        """The binary, after a check of its checksum and of file ownership. Raises :class:`EntryError` if that fails.

        Raises :class:`~polyconv.util.file_trust.UntrustedError` if no entry of the folder may run. ``shipped``: in a
        bundle, whose owner is trusted besides this process's user and root.
        """
        with Folder(self.path.parent) as folder:
            trusted = trusted_users(folder, shipped=shipped)
            try:
                with folder.inner(self.path.name) as entry:
                    entry.check(trusted)
                    if _described(entry, trusted) != self.meta:
                        raise EntryError("meta.json is another file than a moment ago")
                    data = entry.read("kernel.cubin", LARGEST_CODE, trusted)
            except UntrustedError as error:
                raise EntryError(str(error)) from error
            except OSError as error:
                raise _unreadable("kernel.cubin", error) from error
        if sha256(data) != self.meta["cubin"]:
            raise EntryError("kernel.cubin is not the file that was stored: its checksum differs from meta.json's")
        return data

    def check(self, *, shipped: bool = False) -> None:
        """Raise :class:`EntryError` if anything in the entry differs from what was stored."""
        self.cubin(shipped=shipped)
        facts = {key: value for key, value in self.meta.items() if key != "cubin"}
        if entry_name(facts) != self.path.name:
            raise EntryError("meta.json does not belong to this entry: its hash is not the folder's name")
        try:
            with Folder(self.path.parent) as folder, folder.inner(self.path.name) as entry:
                source = entry.read("kernel.cu", LARGEST_CODE)
        except OSError as error:
            raise _unreadable("kernel.cu", error) from error
        if sha256(source) != self.meta.get("source"):
            raise EntryError("kernel.cu is not the file that was stored: its checksum differs from meta.json's")


def _described(entry: Folder, trusted: Collection[int] | None = None) -> Mapping[str, Any]:
    """Contents of ``meta.json``, checked."""
    try:
        meta = checked_json.parse(entry.read("meta.json", LARGEST_META, trusted), "meta.json")
        for name in ("symbol", "arch", "cubin"):
            meta.member(name).text()
        for name in ("compiler", "source"):
            meta.optional(name, "").text()
    except FileNotFoundError:
        raise EntryError("meta.json is missing") from None
    except DocumentError as error:
        raise EntryError(str(error)) from error
    except UntrustedError:
        raise
    except OSError as error:
        raise _unreadable("meta.json", error) from error
    return meta.object()


def _unreadable(what: str, error: OSError) -> EntryError:
    kind = ForbiddenError if isinstance(error, PermissionError) else EntryError
    return kind(f"{what} cannot be read: {error}")


def check_folder(directory: Path, *, shipped: bool = False) -> None:
    """Raise :class:`~polyconv.util.file_trust.UntrustedError` if no entry of a folder, if it exists, may run.

    For a single message about the folder. Reading an entry checks again, on the opened descriptors.
    """
    with contextlib.suppress(FileNotFoundError), Folder(directory) as folder:
        trusted_users(folder, shipped=shipped)


def refusal(directory: Path, *, shipped: bool = False) -> str:
    """Message of :func:`check_folder`; empty if the folder is trusted."""
    try:
        check_folder(directory, shipped=shipped)
    except UntrustedError as error:
        return str(error)
    except OSError:
        pass  # no folder, or an unreadable one, which is reported elsewhere
    return ""


def trusted_users(folder: Folder, *, shipped: bool) -> Collection[int]:
    """Users whose files in a folder are trusted. Raises if other users can write to the folder."""
    trusted = file_trust.owners(folder.owner) if shipped else file_trust.owners()
    folder.check(trusted)
    return trusted


def load(path: Path, facts: Mapping[str, Any], *, shipped: bool = False) -> bytes | None:
    """Binary of an entry; None if absent. Raises :class:`EntryError` if it does not match ``facts``."""
    entry = Entry.read(path)
    if entry is None:
        return None
    if not entry.is_of(facts):
        raise EntryError("meta.json does not belong to this entry")
    return entry.cubin(shipped=shipped)


def is_entry(name: str) -> bool:
    """Whether ``name`` is that of an entry. Nothing else in a folder may be deleted."""
    return re.fullmatch(r".+-sm_\w+-[0-9a-f]{16}", name) is not None


def folders(directory: Path) -> list[Path]:
    """All folders that should be entries: no locks, no remains of killed processes. Links are listed, not followed."""
    try:
        with os.scandir(directory) as listed:
            found = sorted(item.name for item in listed if item.is_dir(follow_symlinks=False) or item.is_symlink())
    except OSError:
        return []
    return [directory / name for name in found if name != "locks" and not name.startswith(".")]


def size_of(path: Path) -> int:
    """Size of all files in a folder [bytes]; 0 for a link."""
    if path.is_symlink():
        return 0
    inner = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(os.lstat(file).st_size for file in inner)


def entries(directory: Path) -> Iterator[Entry]:
    """All readable entries of a folder."""
    for path in folders(directory):
        try:
            entry = Entry.read(path)
        except EntryError:
            continue
        if entry is not None:
            yield entry


def summary(directory: Path, *, shipped: bool = False) -> dict[str, Any]:
    """Statistics of a folder of kernels, and why none of them may run, if so."""
    archs: dict[str, dict[str, int]] = {}
    for entry in entries(directory):
        of_arch = archs.setdefault(entry.arch, {"kernels": 0, "bytes": 0})
        of_arch["kernels"] += 1
        of_arch["bytes"] += entry.size
    return {
        "directory": str(directory),
        "exists": directory.is_dir(),
        "writable": is_writable(directory),
        "refused": refusal(directory, shipped=shipped),
        "kernels": sum(one["kernels"] for one in archs.values()),
        "bytes": sum(one["bytes"] for one in archs.values()),
        "archs": dict(sorted(archs.items(), key=lambda item: arch_number(item[0]))),
    }


def arch_number(arch: str) -> int:
    """Sort key: sm_100 comes after sm_90."""
    digits = re.search(r"\d{1,9}", arch)
    return int(digits[0]) if digits else 0


def find(directory: Path, kernel: Mapping[str, Any], binary: Callable[[Entry], bytes]) -> bytes | None:
    """Binary of a kernel by its identity, from any compiler; None if there is none.

    Raises :class:`EntryError` if all matching entries are refused or unreadable, ``OSError`` if the folder is.
    """
    prefix = entry_prefix(kernel)
    try:
        names = sorted(name for name in os.listdir(directory) if name.startswith(prefix))
    except FileNotFoundError:
        return None
    refused: EntryError | None = None
    for name in names:
        try:
            entry = Entry.read(directory / name)
            if entry is not None and entry.is_of(kernel):
                return binary(entry)
        except ForbiddenError:
            refused = ForbiddenError(f"{directory} has kernels that this user may not read")  # one text for all of them
        except EntryError as error:
            refused = EntryError(f"{directory / name} is refused: {error}")
    if refused is not None:
        raise refused
    return None


def store(
    folder: Folder,
    name: str,
    source: str,
    cubin: bytes,
    facts: Mapping[str, Any],
    permissions: int = PRIVATE,
    *,
    alone: bool,
) -> None:
    """Write an entry under a temporary name and rename it, replacing anything there. ``alone``: the lock is held."""
    if alone:
        folder.sweep(name)
    temporary = unused(name)
    folder.make(temporary)
    try:
        with folder.inner(temporary) as entry:
            meta = {**facts, "cubin": sha256(cubin)}
            entry.write("kernel.cu", source.encode(), permissions)
            entry.write("kernel.cubin", cubin, permissions)
            entry.write("meta.json", (json.dumps(meta, indent=2) + "\n").encode(), permissions)
            if permissions == SHARED:
                entry.open_to_all()
            entry.sync()
        with contextlib.suppress(FileNotFoundError):
            _remove(folder, name)
        folder.rename(temporary, name)
        folder.sync()
    except BaseException:
        _delete(folder, temporary)
        raise


def remove(entry: Path) -> None:
    """Remove an entry: rename it first, so that no process sees half of one, then delete. Links are not followed."""
    with Folder(entry.parent) as folder, locked(folder, entry.name, file_trust.owners(folder.owner)) as alone:
        if alone:
            folder.sweep(entry.name)
        _remove(folder, entry.name)


def sweep(directory: Path) -> None:
    """Delete the remains of entries whose writers were killed."""
    with contextlib.suppress(FileNotFoundError), Folder(directory) as folder:
        for name in {meant(hidden) for hidden in folder.names()}:
            if name is not None and is_entry(name):
                with locked(folder, name, file_trust.owners(folder.owner)) as alone:
                    if alone:
                        folder.sweep(name)


@contextlib.contextmanager
def locked(folder: Folder, name: str, trusted: Collection[int]) -> Iterator[bool]:
    """Hold the lock of a cache entry, see :meth:`~polyconv.util.atomic_files.Folder.locked`.

    ``trusted``: users who may own the folder of locks, and so can block this process.
    """
    with contextlib.suppress(FileExistsError):
        folder.make("locks")
    try:
        locks = folder.inner("locks")
    except NotADirectoryError:
        raise OSError(f"{folder.path / 'locks'} is not a folder") from None
    with locks:
        locks.check(trusted)
        with locks.locked(f"{name}.lock") as alone:
            yield alone


def _remove(folder: Folder, name: str) -> None:
    aside = unused(name)
    folder.rename(name, aside)
    _delete(folder, aside)


def _delete(folder: Folder, name: str) -> None:
    """Delete as far as possible. Too deeply nested folders stay, under a hidden name."""
    with contextlib.suppress(OSError, RecursionError):
        folder.delete(name)
