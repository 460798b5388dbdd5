"""Trust in files that contain code: which owners and permissions are accepted.

A file with a compiled kernel is used only if no user but this process's, root and those trusted explicitly could have
written it. Owner and permissions are read from the open descriptor: a path may lead elsewhere a moment later. The rule
is ssh's for its keys: neither group nor others may write. No group is exempt, as its members cannot be known: the group
file does not list users whose primary group it is, and the user database does not list the arbitrary users that
OpenShift starts in root's group. The group's bits also cover access control lists, whose mask they are.

Unlike in ssh, folders with the sticky bit, such as ``/tmp``, are accepted: files that other users add are refused.
Parent folders are not checked: a user with access to one can only substitute a folder of their own, which is refused,
or one of ours that they could not write.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection
from pathlib import Path

ROOT = 0


class UntrustedError(OSError):
    """A file or folder that an untrusted user could have written. The message says which, why, and the remedy."""


def owners(*others: int) -> frozenset[int]:
    """Ids of the trusted users: this process's own, root, and ``others``."""
    return frozenset((os.geteuid(), ROOT, *others)) if hasattr(os, "geteuid") else frozenset(others)


def check(status: os.stat_result, path: Path | str, trusted: Collection[int]) -> None:
    """Raise :class:`UntrustedError`, naming ``path``, unless only ``trusted`` users could have written an open file."""
    if not hasattr(os, "geteuid"):  # pragma: no cover - not a POSIX system: the permissions of the user's profile apply
        return
    if status.st_uid not in trusted:
        raise UntrustedError(f"{path} belongs to another user (id {status.st_uid})")
    if others_can_write(status):
        mode, quoted = stat.S_IMODE(status.st_mode), shlex.quote(str(path))
        raise UntrustedError(f"{path} can be written by others (mode {mode:04o}): chmod go-w {quoted}")


def others_can_write(status: os.stat_result) -> bool:
    """Whether users other than the owner may write into an open file, or replace what is in an open folder."""
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return False
    return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
