"""Whose files may choose what runs in this process.

A compiled kernel is code, so a file with one is taken only if nobody could have written it but this process's user,
root, or somebody who was trusted by name. Owner and permissions are asked of what was opened, never of a path: a path
may lead elsewhere a moment later. The rule is ssh's for its keys: neither the group nor others may have the right to
write. No group is exempt. Which processes have a group cannot be known: the group file does not list the users whose
primary group it is, and the user database does not list the arbitrary users that OpenShift starts in root's group.
The group's bits also cover access control lists, whose mask they are.

One thing is allowed that ssh refuses: a folder with the sticky bit, such as ``/tmp``. Others may add to it, but what
they add is theirs, and refused.

The folders above are not asked. Who can write one can put another folder in the place of ours; but that one is theirs,
and refused, or one of ours that they could not write.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection
from pathlib import Path

ROOT = 0


class UntrustedError(OSError):
    """Something that somebody else could have written. The message says what, why, and how to change it."""


def owners(*others: int) -> frozenset[int]:
    """The users whose files are taken: this process's own, root, and those who were trusted by name."""
    return frozenset((os.geteuid(), ROOT, *others)) if hasattr(os, "geteuid") else frozenset(others)


def check(status: os.stat_result, path: Path, trusted: Collection[int]) -> None:
    """Raise :class:`UntrustedError` unless only trusted users could have written what has this status.

    Args:
        status: of a descriptor.
        path: what it is called in the message.
        trusted: see :func:`owners`.
    """
    if not hasattr(os, "geteuid"):  # pragma: no cover - not a POSIX system: the profile's own permissions have to do
        return
    if status.st_uid not in trusted:
        raise UntrustedError(f"{path} belongs to another user (id {status.st_uid})")
    if _others_can_write(status):
        mode, quoted = stat.S_IMODE(status.st_mode), shlex.quote(str(path))
        raise UntrustedError(f"{path} can be written by others (mode {mode:04o}): chmod go-w {quoted}")


def _others_can_write(status: os.stat_result) -> bool:
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return False
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
