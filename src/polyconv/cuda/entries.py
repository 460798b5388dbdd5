"""Compiled kernels as folders on disk: how one is written, read, checked and listed.

An entry is a folder that a person can read::

    <folder>/<symbol>-<arch>-<hash>/kernel.cu      what was compiled
                                    kernel.cubin   the result
                                    meta.json      what the hash was made of, and the cubin's own checksum

Entries appear whole, by a rename, or not at all. Who writes or removes one holds a lock: the machine's cache
(:mod:`~polyconv.cuda.cache`) has one per entry, a bundle that is shipped to other machines
(:mod:`~polyconv.cuda.bundle`) one for all. Otherwise they have the same entries.

Whoever can write an entry chooses what runs in this process. So a binary is read through descriptors, from the folder
down, without following a link, and folder, entry and files must be such that nobody else could have written them
(:mod:`~polyconv.trust`). A description alone, for a list say, may be anybody's.
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

from .. import documents, trust
from ..documents import DocumentError
from ..files import Folder, is_writable, meant, unused
from ..trust import UntrustedError
from .fingerprint import entry_name, entry_prefix, sha256

PRIVATE, SHARED = 0o600, 0o644
"""Permissions of an entry's files: for the owner alone, or for everybody to read."""
LARGEST_META, LARGEST_CODE = 2**20, 2**26
"""Bytes of a file that are read at most, far more than ours have."""


class EntryError(Exception):
    """An entry that is there and must not run: damaged, or such that others could have written it."""


class ForbiddenError(EntryError):
    """An entry that this user may not read. It need not be damaged: the folder may be another user's."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel, whose description could be read."""

    path: Path
    meta: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Entry | None:
        """The entry at a path, None if there is nothing; :class:`EntryError` if its description makes no sense."""
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
        """When it was written, in seconds since 1970."""
        return self.path.lstat().st_mtime

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return size_of(self.path)

    def is_of(self, kernel: Mapping[str, Any]) -> bool:
        """Whether it was compiled from exactly this kernel (:func:`~.fingerprint.identity`)."""
        return all(self.meta.get(key) == value for key, value in kernel.items())

    def cubin(self, *, shipped: bool = False) -> bytes:
        """The binary, if it is what was stored, by somebody who may choose what runs here.

        :class:`EntryError` if not; :class:`~polyconv.trust.UntrustedError` if no entry of the folder may be run.

        Args:
            shipped: in a bundle, whose owner is trusted beside this process's user and root: somebody named it.
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
        """Raise :class:`EntryError` if anything about the entry is not as it was stored."""
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
    """What ``meta.json`` says."""
    try:
        meta = documents.parse(entry.read("meta.json", LARGEST_META, trusted), "meta.json")
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
    """Raise :class:`~polyconv.trust.UntrustedError` if no entry of a folder may be run; nothing if it is not there.

    For words that are said once for all its entries: what reads one asks again, of what it opened.
    """
    with contextlib.suppress(FileNotFoundError), Folder(directory) as folder:
        trusted_users(folder, shipped=shipped)


def refusal(directory: Path, *, shipped: bool = False) -> str:
    """The same in words; empty if nothing is wrong."""
    try:
        check_folder(directory, shipped=shipped)
    except UntrustedError as error:
        return str(error)
    except OSError:
        pass  # no folder, or one that cannot be read: something else, which others say
    return ""


def trusted_users(folder: Folder, *, shipped: bool) -> Collection[int]:
    """The users who may have written what is in a folder; an error if others could have put something into it."""
    trusted = trust.owners(folder.owner) if shipped else trust.owners()
    folder.check(trusted)
    return trusted


def load(path: Path, facts: Mapping[str, Any], *, shipped: bool = False) -> bytes | None:
    """The binary of an entry, None if it is absent; :class:`EntryError` if it is not what the facts say."""
    entry = Entry.read(path)
    if entry is None:
        return None
    if not entry.is_of(facts):
        raise EntryError("meta.json does not belong to this entry")
    return entry.cubin(shipped=shipped)


def is_entry(name: str) -> bool:
    """Whether an entry can have the name: anything else in a folder is not ours to delete."""
    return re.fullmatch(r".+-sm_\w+-[0-9a-f]{16}", name) is not None


def folders(directory: Path) -> list[Path]:
    """Every folder that is an entry, or should be: not the locks, nor what a dying process left behind.

    A link in the place of a folder is in the list, so that people hear of it, and leads nowhere.
    """
    try:
        with os.scandir(directory) as listed:
            found = sorted(item.name for item in listed if item.is_dir(follow_symlinks=False) or item.is_symlink())
    except OSError:
        return []
    return [directory / name for name in found if name != "locks" and not name.startswith(".")]


def size_of(path: Path) -> int:
    """Bytes of all files in a folder; of a link, nothing."""
    if path.is_symlink():
        return 0
    inner = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(os.lstat(file).st_size for file in inner)


def entries(directory: Path) -> Iterator[Entry]:
    """Every entry of a folder that can be read."""
    for path in folders(directory):
        try:
            entry = Entry.read(path)
        except EntryError:
            continue
        if entry is not None:
            yield entry


def summary(directory: Path, *, shipped: bool = False) -> dict[str, Any]:
    """What is in a folder of kernels, in numbers, and why none of them may be run, if so."""
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
    """For sorting: sm_100 comes after sm_90."""
    digits = re.search(r"\d{1,9}", arch)
    return int(digits[0]) if digits else 0


def find(directory: Path, kernel: Mapping[str, Any], binary: Callable[[Entry], bytes]) -> bytes | None:
    """The binary of a kernel, whatever compiled it. Needs no compiler, only the kernel's identity.

    None if there is none; :class:`EntryError` if there are only such that must not run, or cannot be read; an
    ``OSError`` if that is so of the folder.

    Args:
        binary: reads an entry's, or refuses it.
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
    """Write an entry beside its place and rename it there, replacing a damaged one, or whatever else has its name.

    Args:
        alone: whether nobody else writes the entry meanwhile, nor removes it (:meth:`~polyconv.files.Folder.locked`).
    """
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
    """Take an entry away at once, so that no other process meets half of one, and then delete it; a link unfollowed."""
    with Folder(entry.parent) as folder, locked(folder, entry.name, trust.owners(folder.owner)) as alone:
        if alone:
            folder.sweep(entry.name)
        _remove(folder, entry.name)


def sweep(directory: Path) -> None:
    """Delete what processes left behind of a cache's entries when they were killed."""
    with contextlib.suppress(FileNotFoundError), Folder(directory) as folder:
        for name in {meant(hidden) for hidden in folder.names()}:
            if name is not None and is_entry(name):
                with locked(folder, name, trust.owners(folder.owner)) as alone:
                    if alone:
                        folder.sweep(name)


@contextlib.contextmanager
def locked(folder: Folder, name: str, trusted: Collection[int]) -> Iterator[bool]:
    """Hold the lock of a cache's entry; gives what :meth:`~polyconv.files.Folder.locked` does.

    Args:
        trusted: the users who may keep this process waiting.
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
    """As far as it can be deleted. What somebody nested too deeply stays, under a name that nobody looks at."""
    with contextlib.suppress(OSError, RecursionError):
        folder.delete(name)
