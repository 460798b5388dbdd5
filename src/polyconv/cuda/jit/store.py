"""Folders of compiled kernels: one reader and one writer, for the cache and for bundles.

A kernel is an entry, a readable folder::

    <folder>/<symbol>-<arch>-<hash>/kernel.cu      what was compiled
                                    kernel.cubin   the result
                                    meta.json      what the hash was made of, and the cubin's own checksum

Entries appear atomically, by a rename. Writing or removing one requires a lock: the cache
(:mod:`~polyconv.cuda.jit.cache`) has one per entry, a bundle (:mod:`~polyconv.cuda.jit.bundle`) one for all.

Write access to an entry is code execution in this process. So a binary is read through descriptors, from the folder
down, without following links, and folder, entry and files must be writable by trusted users only
(:mod:`~polyconv.util.file_trust`). Reading a description alone, for a list, has no such restriction.

Two kinds of folders need no such permissions. A cache in a directory that others can write, as Kubernetes' volumes are,
is a folder of this user's in it (:meth:`Store.of_cache`). And a bundle whose manifest has a known digest is known in
content: every file is checked as it is read, whatever its owner and whatever links lead to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ...util import checked_json, file_trust
from ...util.atomic_files import Folder, is_writable, meant, unused
from ...util.checked_json import DocumentError
from ...util.file_trust import UntrustedError
from .fingerprint import entry_name, entry_prefix, identity_digest, sha256

LARGEST_META, LARGEST_CODE = 2**20, 2**26
"""Limits on the size of files [bytes], far above those that polyconv writes."""
FILES = {"cubin": "kernel.cubin", "meta": "meta.json", "source": "kernel.cu"}
"""Member of a manifest -> the file whose SHA-256 it is."""

_ENTRY = re.compile(r".+-sm_\w+-[0-9a-f]{16}")


class EntryError(Exception):
    """An entry exists but must not run: damaged, or writable by untrusted users."""


class ForbiddenError(EntryError):
    """This user may not read an entry. It need not be damaged: the folder may be another user's."""


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of compiled kernels, which need not exist."""

    path: Path
    shipped: bool = False
    """Whether it is a bundle: its owner is trusted besides this process's user and root, and all users may read it."""
    listed: Mapping[str, Mapping[str, str]] | None = None
    """Manifest's checksums of the entries that may run; None: any entry that matches its own description."""
    entries: Mapping[str, str] = field(default_factory=dict)
    """Entries by the digest of their identity, as far as the manifest has it."""
    pinned: bool = False
    """Whether the manifest has a known digest: contents are checked, so that links and permissions do not matter."""
    own: bool = False
    """Whether it is a folder of this user's in a directory that others can write, so that it must not be a link."""
    passed_over: str = ""
    """Why the kernels in the directory around a folder of this user's do not run; empty if it has none."""

    @classmethod
    def of_cache(cls, directory: Path) -> Store:
        """Cache in a directory: the directory itself or, where others can write it, ``polyconv-<user id>`` in it."""
        with contextlib.suppress(OSError), Folder(directory) as folder:
            try:
                folder.check(file_trust.owners())
            except UntrustedError as error:
                reason = str(error) if any(map(_ENTRY.fullmatch, folder.names())) else ""
                return cls(directory / f"polyconv-{os.geteuid()}", own=True, passed_over=reason)
        return cls(directory)

    def reclaim(self) -> int:
        """Make a folder of this user's private again, without the kernels that others could have written.

        Kubernetes gives every file of a volume to its ``fsGroup``, at every mount. Returns the permissions that the
        folder had; 0 if it was private.
        """
        if self.own:
            with contextlib.suppress(OSError), self._open() as folder:
                return folder.close_to_others()
        return 0

    def _open(self) -> Folder:
        if not self.own:
            return Folder(self.path, follows=self.pinned)
        with Folder(self.path.parent) as directory:
            return directory.inner(self.path.name)

    # ---- reading

    def find(self, kernel: Mapping[str, Any]) -> bytes | None:
        """Binary of a kernel by its fingerprint, or by its identity, from any compiler; None if there is none.

        Raises :class:`EntryError` if all matching entries are refused or unreadable, ``OSError`` if the folder is.
        """
        refused: EntryError | None = None
        wanted = entry_name(kernel) if "compiler" in kernel else entry_prefix(kernel)
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            trusted = self._trusted(folder)
            entry = self.entries.get(identity_digest(kernel)) if self.entries else None
            if entry is not None and (cubin := self._read_listed(folder, entry, trusted)) is not None:
                return cubin
            for name in sorted(name for name in folder.names() if name.startswith(wanted)):
                try:
                    cubin = self._read(folder, name, trusted, kernel)
                    if cubin is not None:
                        return cubin
                except EntryError as error:
                    refused = type(error)(f"{self.path / name} is refused: {error}")
        if refused is not None:
            raise refused
        return None

    def check(self, each: Callable[[str], None] = lambda name: None) -> dict[str, str]:
        """Read every file. Returns the reasons for refusal by entry; ``each`` is called for every entry read."""
        problems: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            trusted = self._trusted(folder)
            for name in sorted({*(path.name for path in self.folders()), *(self.listed or ())}):
                try:
                    if self._read(folder, name, trusted, {}, whole=True) is None and self.listed is not None:
                        raise EntryError("it is in the manifest, but not in the folder")
                except EntryError as error:
                    problems[name] = str(error)
                each(name)
        return problems

    def read(self, name: str, most: int) -> bytes:
        """Contents of another file in the folder that only trusted users could have written."""
        with self._open() as folder:
            return folder.read(name, most, self._trusted(folder))

    def check_folder(self) -> None:
        """Raise :class:`~polyconv.util.file_trust.UntrustedError` if no entry may run. Reading one checks it again."""
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            self._trusted(folder)

    def _trusted(self, folder: Folder) -> Collection[int] | None:
        """Users whose files in the folder are trusted; None: anyone's. Raises if others can write to the folder."""
        if self.pinned:
            return None
        trusted = file_trust.owners(folder.owner) if self.shipped else file_trust.owners()
        folder.check(trusted)
        return trusted

    def _read(
        self,
        folder: Folder,
        name: str,
        trusted: Collection[int] | None,
        kernel: Mapping[str, Any],
        *,
        whole: bool = False,
    ) -> bytes | None:
        """Binary of an entry; None if the entry is absent or another kernel's. ``whole``: check ``kernel.cu``, too."""
        listed = (self.listed or {}).get(name, {})
        with _refusals():
            try:
                opened = folder.inner(name)
            except FileNotFoundError:
                return None
            with opened as entry:
                if trusted is not None:
                    entry.check(trusted)
                meta = _described(entry, trusted, listed.get("meta"))
                facts = {key: value for key, value in meta.items() if key != "cubin"}
                if entry_name(facts) != name:
                    raise EntryError("meta.json does not belong to this entry: its hash is not the folder's name")
                if any(facts.get(key) != value for key, value in kernel.items()):
                    return None
                if self.listed is not None and name not in self.listed:
                    raise EntryError("manifest.json does not name it")
                if self.pinned and "meta" not in listed:
                    raise EntryError("a digest needs a manifest with checksums of all files: make the bundle anew")
                if any(listed.get(file, meta.get(file)) != meta.get(file) for file in ("cubin", "source")):
                    raise EntryError("its checksum is not the one in manifest.json")
                cubin = _checked(entry, "kernel.cubin", meta["cubin"], trusted)
                if whole:
                    _checked(entry, "kernel.cu", meta.get("source"))
                return cubin

    def _read_listed(self, folder: Folder, name: str, trusted: Collection[int] | None) -> bytes | None:
        """Binary of an entry that is as the manifest says, unparsed; None if it is not, and :meth:`_read` says why."""
        listed = (self.listed or {})[name]
        with contextlib.suppress(EntryError), _refusals(), folder.inner(name) as entry:
            if trusted is not None:
                entry.check(trusted)
            cubin = entry.read("kernel.cubin", LARGEST_CODE, trusted)
            meta = entry.read("meta.json", LARGEST_META, trusted)
            if (sha256(cubin), sha256(meta)) == (listed["cubin"], listed["meta"]):
                return cubin
        return None

    # ---- lists

    def folders(self) -> list[Path]:
        """All folders, and links, that should be entries: no locks, no remains of killed processes."""
        try:
            with os.scandir(self.path) as listed:
                found = sorted(item.name for item in listed if _is_folder(item, follows=self.pinned))
        except OSError:
            return []
        return [self.path / name for name in found if name != "locks" and not name.startswith(".")]

    def rows(self) -> list[dict[str, Any]]:
        """Facts about every readable entry, for a list: sm_100 comes after sm_90."""
        rows: list[dict[str, Any]] = []
        for path in self.folders():
            with contextlib.suppress(EntryError, FileNotFoundError):
                with _refusals(), self._open() as folder, folder.inner(path.name) as entry:
                    meta = _described(entry)
                written = datetime.fromtimestamp(path.lstat().st_mtime).astimezone()
                rows.append(
                    {
                        "kernel": meta["symbol"],
                        "arch": meta["arch"],
                        "compiler": meta.get("compiler", "unknown"),
                        "bytes": _size(path),
                        "compiled": written.isoformat(timespec="seconds"),
                        "entry": path.name,
                    }
                )
        return sorted(rows, key=lambda row: (_arch_number(row["arch"]), row["kernel"]))

    # ---- writing

    def add(self, facts: Mapping[str, Any], source: str, make: Callable[[], bytes]) -> bytes:
        """Make and write the binary of a kernel, in place of a refused one. Processes that do so wait for each other.

        All but the first find it, and return what is there. Raises ``OSError`` if the folder cannot be used.
        """
        name = entry_name(facts)
        self.path.parent.mkdir(parents=True, exist_ok=True)  # with the usual permissions, as ~/.cache
        if self.own:
            with contextlib.suppress(FileExistsError), Folder(self.path.parent) as directory:
                directory.make(self.path.name)
        else:
            self.path.mkdir(mode=0o755 if self.shipped else 0o700, exist_ok=True)
        with self._open() as folder:
            trusted = self._trusted(folder) or ()
            with folder.locked() if self.shipped else locked(folder, name, trusted) as alone:
                with contextlib.suppress(EntryError):
                    cubin = self.find(facts)
                    if cubin is not None:
                        return cubin
                cubin = make()
                self._write(folder, name, entry_files(facts, source, cubin), alone=alone)
                return cubin

    def _write(self, folder: Folder, name: str, files: Mapping[str, bytes], *, alone: bool) -> None:
        """Write an entry under a temporary name, then rename it, replacing any there. ``alone``: the lock is held."""
        if alone:
            folder.sweep(name)
        temporary = unused(name)
        folder.make(temporary)
        try:
            with folder.inner(temporary) as entry:
                for file, data in files.items():
                    entry.write(file, data, 0o644 if self.shipped else 0o600)
                if self.shipped:
                    entry.open_to_all()
                entry.sync()
            with contextlib.suppress(FileNotFoundError):
                _remove(folder, name)
            folder.rename(temporary, name)
            folder.sync()
        except BaseException:
            _delete(folder, temporary)
            raise

    def clear(self, before: float) -> tuple[int, int]:
        """Remove entries written before a time [s since 1970], and what killed writers of entries left behind.

        Nothing else in the folder is deleted, and links are not followed. Returns the number of entries and of bytes.
        """
        removed, freed = 0, 0
        with contextlib.suppress(FileNotFoundError), self._open() as folder:
            there = {path.name for path in self.folders()}
            for name in sorted({*there, *filter(None, map(meant, folder.names()))}):
                if not _ENTRY.fullmatch(name):
                    continue
                with (
                    locked(folder, name, file_trust.owners(folder.owner)) as alone,
                    contextlib.suppress(FileNotFoundError),  # another process may have removed it
                ):
                    if alone:
                        folder.sweep(name)
                    if name in there and (self.path / name).lstat().st_mtime <= before:
                        size = _size(self.path / name)
                        _remove(folder, name)
                        removed, freed = removed + 1, freed + size
        return removed, freed


def entry_files(facts: Mapping[str, Any], source: str, cubin: bytes) -> dict[str, bytes]:
    """Files of an entry, by name."""
    meta = json.dumps({**facts, "cubin": sha256(cubin)}, indent=2) + "\n"
    return {"kernel.cu": source.encode(), "kernel.cubin": cubin, "meta.json": meta.encode()}


def summary(store: Store) -> dict[str, Any]:
    """Statistics of a folder of kernels, and why none of them may run, if so."""
    directory, refused = store.path, ""
    try:
        store.check_folder()
    except UntrustedError as error:
        refused = str(error)
    except OSError:
        pass  # an unreadable folder, which is reported elsewhere
    archs: dict[str, dict[str, int]] = {}
    for row in store.rows():
        of_arch = archs.setdefault(row["arch"], {"kernels": 0, "bytes": 0})
        of_arch["kernels"] += 1
        of_arch["bytes"] += row["bytes"]
    return {
        "directory": str(directory),
        "exists": directory.is_dir(),
        "writable": is_writable(directory),
        "refused": refused,
        "passed_over": store.passed_over,
        "kernels": sum(one["kernels"] for one in archs.values()),
        "bytes": sum(one["bytes"] for one in archs.values()),
        "archs": archs,
    }


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


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Raise :class:`EntryError` for any defect of an entry's files."""
    try:
        yield
    except (UntrustedError, DocumentError) as error:
        raise EntryError(str(error)) from error
    except OSError as error:
        kind = ForbiddenError if isinstance(error, PermissionError) else EntryError
        raise kind(f"it cannot be read: {error}") from error


def _described(entry: Folder, trusted: Collection[int] | None = None, checksum: str | None = None) -> Mapping[str, Any]:
    """Contents of ``meta.json``, checked."""
    data = entry.read("meta.json", LARGEST_META, trusted)
    if checksum is not None and sha256(data) != checksum:
        raise EntryError("the checksum of meta.json is not the one in manifest.json")
    meta = checked_json.parse(data, "meta.json")
    for name in ("symbol", "arch", "cubin"):
        meta.member(name).text()
    for name in ("compiler", "source"):
        meta.optional(name, "").text()
    return meta.object()


def _checked(entry: Folder, name: str, checksum: str | None, trusted: Collection[int] | None = None) -> bytes:
    """Contents of a file with a known checksum."""
    data = entry.read(name, LARGEST_CODE, trusted)
    if sha256(data) != checksum:
        raise EntryError(f"{name} is not the file that was stored: its checksum differs from meta.json's")
    return data


def _size(path: Path) -> int:
    """Size of all files in a folder [bytes]; 0 for a link."""
    if path.is_symlink():
        return 0
    inner = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(os.lstat(file).st_size for file in inner)


def _is_folder(item: os.DirEntry[str], *, follows: bool) -> bool:
    """Whether an item is a folder, or a link that is refused as one."""
    return item.is_dir(follow_symlinks=follows) or (item.is_symlink() and not follows)


def _arch_number(arch: str) -> int:
    digits = re.search(r"\d{1,9}", arch)
    return int(digits[0]) if digits else 0


def _remove(folder: Folder, name: str) -> None:
    """Rename an entry before deleting it, so that no process sees half of one."""
    aside = unused(name)
    folder.rename(name, aside)
    _delete(folder, aside)


def _delete(folder: Folder, name: str) -> None:
    """Delete as far as possible. Too deeply nested folders stay, under a hidden name."""
    with contextlib.suppress(OSError, RecursionError):
        folder.delete(name)
