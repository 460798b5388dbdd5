"""Files that appear whole or not at all, however many processes write them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - not a POSIX system: renames still keep the files whole
    fcntl = None  # type: ignore[assignment]


def is_writable(directory: Path) -> bool:
    """Whether files could be written into a folder, which need not be there yet."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def write_synced(path: Path, data: bytes, permissions: int = 0o600) -> None:
    """Write a new file, for the owner only unless told otherwise, and wait until the disk has it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, permissions)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, permissions)  # whatever the process's mask takes away
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the disk knows what the folder holds: a rename, say."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_whole(path: Path, data: bytes) -> None:
    """Put a file in the place of another, or of none: a reader meets the old one or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.chmod(temporary, _mode_of(path))
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _mode_of(path: Path) -> int:
    """Permissions of the file that is replaced; of a new one, the usual."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        return 0o644


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes, on a folder, or on a file that is made for it and stays.

    Removing the file would let two processes hold two locks of one name. A file system without locks costs what two
    writers at once cost; what they write is whole all the same.
    """
    folder = path.is_dir()
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked off meanwhile has it open, too
        os.close(descriptor)
