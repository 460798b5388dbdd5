"""Other users, as far as tests can have them.

As root, files really change owner and code really runs with another user's rights. As an ordinary user, ``fstat`` is
faked to report another owner, and code runs as it is: the package decides alike.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

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
