"""Atomic file writes, and folders in which links are not followed.

A :class:`Folder` is accessed by its open descriptor, wherever its path leads a moment later; links in it are not
followed. Reads do not block and have a limit: the name may be that of a pipe without a writer, or of a huge file.

Data is first written under a hidden name (:func:`unused`), which a killed writer leaves behind. Every writer of a name
holds its lock, so the next one may delete such remains.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType

from . import file_trust
from .file_trust import UntrustedError

try:
    import fcntl
except ImportError:  # pragma: no cover - not a POSIX system: renames still keep the files whole
    fcntl = None  # type: ignore[assignment]

_FOLDER = getattr(os, "O_DIRECTORY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_READ = os.O_RDONLY | _NO_WAITING | getattr(os, "O_BINARY", 0)


def is_writable(directory: Path) -> bool:
    """Whether files could be written into a folder, which need not exist yet."""
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def read_file(path: Path, most: int) -> bytes:
    """Contents of a file that the user named, links followed. Raises ``OSError`` if it has more than ``most`` bytes."""
    return _read(os.open(path, _READ), path, most, None)


def replace_whole(path: Path, data: bytes) -> None:
    """Create or replace a file atomically: a reader sees the old contents or the new ones, never a part."""
    with Folder(path.parent) as folder, folder.locked() as alone:
        folder.replace(path.name, data, alone=alone)


class Folder:
    """An open folder. Links in its path are followed when it is opened; links in it are not, unless ``follows``."""

    __slots__ = ("_descriptor", "_no_link", "path")

    def __init__(self, path: Path, within: Folder | None = None, *, follows: bool = False) -> None:
        self.path = path
        self._no_link: int = within._no_link if within is not None else 0 if follows else _NO_LINK
        if within is None:
            self._descriptor = os.open(path, os.O_RDONLY | _FOLDER)
        else:
            self._descriptor = within._open(path.name, os.O_RDONLY | _FOLDER)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def owner(self) -> int:
        return os.fstat(self._descriptor).st_uid

    def check(self, trusted: Collection[int]) -> None:
        """Raise :class:`~polyconv.util.file_trust.UntrustedError` if other users could have written into it."""
        file_trust.check(os.fstat(self._descriptor), self.path, trusted)

    def inner(self, name: str) -> Folder:
        """Open a folder in it."""
        return Folder(self.path / name, self)

    def read(self, name: str, most: int, trusted: Collection[int] | None = None) -> bytes:
        """Contents of a file of at most ``most`` bytes that only ``trusted`` users, if given, could have written."""
        return _read(self._open(name, _READ), os.path.join(self.path, name), most, trusted)

    # ---- writing

    def make(self, name: str) -> None:
        """Make a folder in it, accessible to the owner only."""
        os.mkdir(name, 0o700, dir_fd=self._descriptor)

    def close_to_others(self) -> int:
        """Make a folder of this user's private, and delete what others could have written in it.

        Returns the permissions that it had; 0 if it was private.
        """
        status = os.fstat(self._descriptor)
        if status.st_uid != os.geteuid() or not file_trust.others_can_write(status):
            return 0
        os.fchmod(self._descriptor, 0o700)
        for name in self.names():
            if self._mode(name) & 0o022:  # links included
                with contextlib.suppress(OSError, RecursionError):
                    self.delete(name)
        return stat.S_IMODE(status.st_mode)

    def write(self, name: str, data: bytes, permissions: int = 0o600) -> None:
        """Write a new file, by default accessible to the owner only, and sync it to disk."""
        descriptor = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, permissions)  # regardless of the umask
            file.write(data)
            file.flush()
            os.fsync(descriptor)

    def replace(self, name: str, data: bytes, *, alone: bool) -> None:
        """Create a file, or replace a file (with its permissions) or link, atomically. ``alone``: the lock is held."""
        if alone:
            self.sweep(name)
        before, temporary = self._mode(name), unused(name)
        if before and not (stat.S_ISREG(before) or stat.S_ISLNK(before)):
            raise OSError(f"{self.path / name} is not a file, and nothing is put in its place")
        try:
            self.write(temporary, data, before & 0o777 if stat.S_ISREG(before) else 0o644)
            os.replace(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            self.sync()
        except BaseException as error:
            with contextlib.suppress(OSError):
                self.delete(temporary)
            if isinstance(error, OSError) and error.filename is not None:
                error.filename = str(self.path / name)  # not the temporary name, which the caller does not know
            raise

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file, folder or link."""
        os.rename(name, new_name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def delete(self, name: str) -> None:
        """Delete a file, a link itself, or a folder with its contents."""
        if not stat.S_ISDIR(self._mode(name)):
            os.unlink(name, dir_fd=self._descriptor)
            return
        with self.inner(name) as inner:
            for each in inner.names():
                inner.delete(each)
        os.rmdir(name, dir_fd=self._descriptor)

    def names(self) -> list[str]:
        """Names of all entries, hidden ones included."""
        return os.listdir(self._descriptor)

    def sweep(self, name: str) -> None:
        """Delete what killed writers of a name left behind. Requires its lock, as files being written look alike."""
        for each in self.names():
            if meant(each) == name:
                with contextlib.suppress(OSError, RecursionError):
                    self.delete(each)

    def open_to_all(self) -> None:
        """Let all users read it."""
        os.fchmod(self._descriptor, 0o755)

    def sync(self) -> None:
        """Sync the folder's entries to disk, after a rename for example."""
        os.fsync(self._descriptor)

    @contextlib.contextmanager
    def locked(self, name: str | None = None) -> Iterator[bool]:
        """Hold a lock between processes: the folder's own, or that of a file in it. Yields whether it is really held.

        The file is created and stays: removing it would let two processes hold two locks of one name. On a file system
        without locks two writers may work at once; what they write is complete all the same.
        """
        alone = False
        try:
            descriptor = self._open(name or ".", os.O_RDWR | os.O_CREAT | _NO_WAITING if name else os.O_RDONLY)
        except IsADirectoryError:
            raise OSError(f"{self.path / (name or '.')} is not a file") from None
        try:
            if name and not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{self.path / name} is not a file")
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                    alone = True
            yield alone
        finally:
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # before closing: a forked child has it open, too
            os.close(descriptor)

    # ---- names

    def _open(self, name: str, flags: int, permissions: int = 0o600) -> int:
        try:
            return os.open(name, flags | self._no_link, permissions, dir_fd=self._descriptor)
        except OSError:
            if self._no_link and stat.S_ISLNK(
                self._mode(name)
            ):  # error codes for links differ between systems, and none says so
                raise UntrustedError(f"{self.path / name} is a link, which is not followed here") from None
            raise

    def _mode(self, name: str) -> int:
        """``st_mode`` of an entry, links not followed; 0 if there is none."""
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mode
        except OSError:
            return 0


def unused(name: str) -> str:
    """A new hidden name for a temporary or discarded version of ``name``."""
    return f".{name}.{secrets.token_hex(8)}"


def meant(hidden: str) -> str | None:
    """The name that :func:`unused` made a hidden name for; None if it did not."""
    made = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}", hidden, re.DOTALL)
    return made[1] if made else None


def _read(descriptor: int, path: Path | str, most: int, trusted: Collection[int] | None) -> bytes:
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a file")
        if trusted is not None:
            file_trust.check(status, path, trusted)
        if status.st_size <= most:
            data = _all_bytes(descriptor, status.st_size, most)
            if len(data) <= most:
                return data
        raise OSError(f"{path} is larger than {most:,} bytes, the most that is read of such a file")
    finally:
        os.close(descriptor)


def _all_bytes(descriptor: int, size: int, most: int) -> bytes:
    """Contents of a file, and a byte more than ``most`` of a larger one: it may grow, or not report its size."""
    parts: list[bytes] = []
    left = most + 1
    while left and (part := os.read(descriptor, min(left, size + 1 if not parts else 2**16))):
        parts.append(part)
        left -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
