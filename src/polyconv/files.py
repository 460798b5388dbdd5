"""Files that appear whole or not at all, and folders in which nothing is followed to elsewhere.

Whatever is done in a :class:`Folder` is done in the one that was opened, by its descriptor, wherever its path may lead
a moment later; a name in it that is a link is not followed. Reading waits for nobody and has a limit: what should be a
file may be a pipe that nobody writes into, or fill the memory.

What appears is written under a hidden name first (:func:`unused`), which a writer that is killed leaves behind. Every
writer of a name holds its lock, so the next one may delete that.
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

from . import trust
from .trust import UntrustedError

try:
    import fcntl
except ImportError:  # pragma: no cover - not a POSIX system: renames still keep the files whole
    fcntl = None  # type: ignore[assignment]

_FOLDER = getattr(os, "O_DIRECTORY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_READ = os.O_RDONLY | _NO_WAITING | getattr(os, "O_BINARY", 0)


def is_writable(directory: Path) -> bool:
    """Whether files could be written into a folder, which need not be there yet."""
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.exists(path))
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def read_file(path: Path, most: int) -> bytes:
    """The contents of a file that somebody named, links and all; an ``OSError`` if it has more than ``most`` bytes."""
    return _read(os.open(path, _READ), path, most, None)


def replace_whole(path: Path, data: bytes) -> None:
    """Put a file in the place of another, or of none: a reader meets the old one or the new one, never a part."""
    with Folder(path.parent) as folder, folder.locked() as alone:
        folder.replace(path.name, data, alone=alone)


class Folder:
    """An open folder. Its path is followed to where it leads now; names in it are not."""

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: Path, within: Folder | None = None) -> None:
        self.path = path
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
        """Raise :class:`~polyconv.trust.UntrustedError` if others could have put something into it."""
        trust.check(os.fstat(self._descriptor), self.path, trusted)

    def inner(self, name: str) -> Folder:
        """A folder in it, opened."""
        return Folder(self.path / name, self)

    def read(self, name: str, most: int, trusted: Collection[int] | None = None) -> bytes:
        """The contents of a file, if it has at most so many bytes and only trusted users, if named, wrote it."""
        return _read(self._open(name, _READ), self.path / name, most, trusted)

    # ---- writing

    def make(self, name: str) -> None:
        """Make a folder in it, for the owner only."""
        os.mkdir(name, 0o700, dir_fd=self._descriptor)

    def write(self, name: str, data: bytes, permissions: int = 0o600) -> None:
        """Write a new file, for the owner only unless told otherwise, and wait until the disk has it."""
        descriptor = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, permissions)  # whatever the process's mask takes away
            file.write(data)
            file.flush()
            os.fsync(descriptor)

    def replace(self, name: str, data: bytes, *, alone: bool) -> None:
        """Put a file in the place of another, or of a link, or of none. It keeps the permissions of the other.

        Args:
            alone: whether nobody else writes the name meanwhile (:meth:`locked`).
        """
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
                error.filename = str(self.path / name)  # nobody has named the other one
            raise

    def rename(self, name: str, new_name: str) -> None:
        """Give what has the name, or the link of that name, another one."""
        os.rename(name, new_name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def delete(self, name: str) -> None:
        """Delete what has the name, with all that is in it; of a link, the link."""
        if not stat.S_ISDIR(self._mode(name)):
            os.unlink(name, dir_fd=self._descriptor)
            return
        with self.inner(name) as inner:
            for each in inner.names():
                inner.delete(each)
        os.rmdir(name, dir_fd=self._descriptor)

    def names(self) -> list[str]:
        """Of everything in it, hidden or not."""
        return os.listdir(self._descriptor)

    def sweep(self, name: str) -> None:
        """Delete what writers of a name left behind when they were killed, as far as it can be deleted.

        Only for who is alone with the name: what another process is writing looks no different.
        """
        for each in self.names():
            if meant(each) == name:
                with contextlib.suppress(OSError, RecursionError):
                    self.delete(each)

    def open_to_all(self) -> None:
        """Let everybody read what is in it."""
        os.fchmod(self._descriptor, 0o755)

    def sync(self) -> None:
        """Wait until the disk knows what the folder holds: a rename, say."""
        os.fsync(self._descriptor)

    @contextlib.contextmanager
    def locked(self, name: str | None = None) -> Iterator[bool]:
        """Hold a lock between processes: the folder's own, or that of a file in it, which is made for it and stays.

        Removing the file would let two processes hold two locks of one name. A file system without locks costs what two
        writers at once cost; what they write is whole all the same. Gives whether the lock is really held.
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
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked off meanwhile has it open, too
            os.close(descriptor)

    # ---- names

    def _open(self, name: str, flags: int, permissions: int = 0o600) -> int:
        try:
            return os.open(name, flags | _NO_LINK, permissions, dir_fd=self._descriptor)
        except OSError:
            if stat.S_ISLNK(self._mode(name)):  # the system's own words for it differ, and none of them says so
                raise UntrustedError(f"{self.path / name} is a link, which is not followed here") from None
            raise

    def _mode(self, name: str) -> int:
        """Kind and permissions of what has the name, be it a link; 0 if nothing has it."""
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_mode
        except OSError:
            return 0


def unused(name: str) -> str:
    """A hidden name for what is to become, or was, what has the name."""
    return f".{name}.{secrets.token_hex(8)}"


def meant(hidden: str) -> str | None:
    """The name that a hidden one was made for by :func:`unused`; None if it was not."""
    made = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}", hidden, re.DOTALL)
    return made[1] if made else None


def _read(descriptor: int, path: Path, most: int, trusted: Collection[int] | None) -> bytes:
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a file")
        if trusted is not None:
            trust.check(status, path, trusted)
        if status.st_size <= most:
            with open(descriptor, "rb", closefd=False) as file:
                data = file.read(most + 1)  # a file may grow meanwhile, or not know its size
            if len(data) <= most:
                return data
        raise OSError(f"{path} is larger than {most:,} bytes, the most that is read of such a file")
    finally:
        os.close(descriptor)
