"""Other users, as far as tests can have them.

As root, files really change owner and code really runs with another user's rights. As an ordinary user, ``fstat`` is
faked to report another owner, and code runs as it is: the package decides alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

IS_ROOT = os.geteuid() == 0
STRANGER = 65534 if os.geteuid() != 65534 else 65533


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the owner of a file or folder, not of its contents."""
    if IS_ROOT:
        os.chown(path, STRANGER, STRANGER)
        return
    given, real = path.lstat().st_ino, os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        return os.stat_result((*found[:4], STRANGER, *found[5:])) if found.st_ino == given else found

    monkeypatch.setattr(os, "fstat", fstat)


@contextlib.contextmanager
def public_folder() -> Iterator[Path]:
    """A folder that all users can reach and write, unlike pytest's."""
    folder = Path(tempfile.mkdtemp(prefix="polyconv-strangers-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def stranger() -> Iterator[None]:
    """Run a block as another user without root's rights."""
    groups, group, user = os.getgroups(), os.getegid(), os.geteuid()
    if IS_ROOT:
        os.setgroups([])
        os.setegid(STRANGER)
        os.seteuid(STRANGER)
    try:
        yield
    finally:
        if IS_ROOT:
            os.seteuid(user)
            os.setegid(group)
            os.setgroups(groups)


def overwrite_as_group_member(files: dict[Path, bytes]) -> None:
    """Write files from another process: of an unknown user whose primary group is this process's.

    No user database lists such a user as a member of the group. OpenShift starts every container so, in root's group.
    """
    member = {"user": 12345, "group": os.getegid(), "extra_groups": []} if IS_ROOT else {}
    for path, data in files.items():
        subprocess.run(["tee", str(path)], input=data, stdout=subprocess.DEVNULL, check=True, **member)


class Child:
    """A forked process that runs a function; as root, under another user's and group's id without root's rights."""

    def __init__(self, function: Callable[[], Any], user: int | None = None, group: int | None = None) -> None:
        self._result, write = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(write)
            return
        try:  # in the child, which must not return
            if IS_ROOT and user is not None:
                os.setgroups([])
                os.setgid(group if group is not None else user)
                os.setuid(user)
            outcome = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        with open(write, "wb") as pipe:
            pickle.dump(outcome, pipe)
        os._exit(0)

    def result(self) -> Any:
        """What the function returned, or raise what it raised."""
        with open(self._result, "rb") as pipe:
            outcome, error = pickle.load(pipe)
        os.waitpid(self._pid, 0)
        if error is not None:
            raise error
        return outcome


CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


def private_mounts() -> None:
    """Let this process, a :class:`Child`, mount what only it sees. Skips the test where the system forbids it."""
    user, group = os.geteuid(), os.getegid()
    if _libc().unshare(CLONE_NEWNS if IS_ROOT else CLONE_NEWNS | CLONE_NEWUSER):
        pytest.skip("this system does not let a process mount anything")
    if not IS_ROOT:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    mount("none", Path("/"), "", MS_REC | MS_PRIVATE)


def mount(source: str | Path, target: Path, kind: str, flags: int = 0, options: str = "") -> None:
    if _libc().mount(str(source).encode(), str(target).encode(), kind.encode() or None, flags, options.encode()):
        pytest.skip(f"this system does not let a process mount {kind or source}: {os.strerror(ctypes.get_errno())}")


def make_read_only(path: Path) -> None:
    mount(path, path, "", MS_BIND)
    mount(path, path, "", MS_BIND | MS_REMOUNT | MS_RDONLY)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
