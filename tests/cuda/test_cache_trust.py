"""Trust in cached kernels: files that other users could write are refused with a message, and links are not followed.

The results are the same for root and for ordinary users; ``strangers.py`` explains how.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polyconv import cli, settings
from polyconv.autotune import tuning_file
from polyconv.autotune.tuning_file import Tuning
from polyconv.cuda.errors import MissingKernelError
from polyconv.cuda.jit.bundle import Bundle
from polyconv.cuda.jit.bundle_writer import BundleWriter
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.fingerprint import sha256
from polyconv.cuda.jit.store import EntryError, Store
from polyconv.cuda.planner import KernelSpec
from polyconv.tools.doctor import environment
from polyconv.tuning_key import Environment
from polyconv.util import file_trust
from polyconv.util.atomic_files import Folder, read_file, replace_whole
from polyconv.util.file_trust import UntrustedError
from strangers import STRANGER, give_away, overwrite_as_group_member, public_folder, stranger
from virtual_gpu.example import KERNELS, axpy_spec

SPEC, OTHER = axpy_spec(), axpy_spec(64)
ARCH = "sm_70"
OURS, EVIL = b"machine code", b"planted code"

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("new_warnings")]  # a pipe must not block


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with one kernel."""
    path = tmp_path / "cache"
    assert ask(path) == (OURS, [])
    return path


@pytest.fixture
def entry(folder: Path) -> Path:
    return new_cache(folder).entry(SPEC, ARCH)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle with one kernel."""
    return new_bundle(tmp_path / "kernels", tmp_path / "machine")


def new_bundle(path: Path, cache: Path, *specs: KernelSpec) -> Path:
    writer = BundleWriter(path, new_cache(cache))
    for spec in specs or (SPEC,):
        writer.add(spec, ARCH)
    writer.finish(["a test"])
    return path


def new_cache(folder: Path, code: bytes = OURS) -> KernelCache:
    """A cache as a new process sees it, with a compiler that always returns the same bytes."""
    return KernelCache(folder, include_dirs=[KERNELS], compiler=lambda *_: code)


def ask(folder: Path, code: bytes = OURS, *, kernels: Path | None = None) -> tuple[bytes, list[str]]:
    """The binary that a program gets for the kernel, and its warnings."""
    with warnings.catch_warnings(record=True) as caught, settings.use(kernels=kernels):
        warnings.simplefilter("always")
        found = new_cache(folder, code).get(SPEC, ARCH)
    return found, [str(warning.message) for warning in caught]


def plant(target: Path, entry: Path) -> None:
    """A planted entry, complete and with correct checksums, in a world-writable folder."""
    if not target.exists():
        target.mkdir()
        target.chmod(0o777)
    meta = json.loads((entry / "meta.json").read_text())
    (target / "kernel.cu").write_bytes((entry / "kernel.cu").read_bytes())
    (target / "kernel.cubin").write_bytes(EVIL)
    (target / "meta.json").write_text(json.dumps({**meta, "cubin": sha256(EVIL)}))


# ---- links


def test_an_entry_that_is_a_link_is_not_followed(folder: Path, entry: Path, tmp_path: Path) -> None:
    """The link leads to a world-writable folder of root's, or of this user's: its owner alone proves nothing."""
    target = tmp_path / "public"
    plant(target, entry)
    shutil.rmtree(entry)
    entry.symlink_to(target)
    found, told = ask(folder)
    assert found == OURS
    assert len(told) == 1
    assert f"{entry} is a link, which is not followed here" in told[0]
    assert (target / "kernel.cubin").read_bytes() == EVIL  # nothing was written or deleted through the link
    assert not entry.is_symlink()
    assert ask(folder, EVIL) == (OURS, [])


def test_a_stranger_cannot_make_us_run_anything() -> None:
    """A cache that another user can write, with a link in it to a folder of ours that is world-writable."""
    with public_folder() as home:
        shared, public = home / "cache", home / "public"
        model = new_cache(home / "model")
        model.get(SPEC, ARCH)
        (home / "model").chmod(0o755)
        entry = model.entry(SPEC, ARCH)
        copy = home / "copy"
        shutil.copytree(entry, copy)
        for path in (shared, public):
            path.mkdir()
            path.chmod(0o777)
        for path in (copy, *copy.iterdir()):
            path.chmod(0o755)
        with stranger():
            plant(public, copy)
            (shared / entry.name).symlink_to(public)
        found, told = ask(shared)
        assert found == OURS
        assert ["chmod go-w" in words for words in told] == [True]
        assert ask(shared, EVIL)[0] == OURS  # kept in a folder of our own
        shared.chmod(0o755)
        found, told = ask(shared)
        assert found == OURS
        assert ["is a link" in words for words in told] == [True]
        assert ask(shared, EVIL) == (OURS, [])


@pytest.mark.parametrize("name", ["kernel.cubin", "meta.json"])
def test_a_file_that_is_a_link_is_not_followed(folder: Path, entry: Path, tmp_path: Path, name: str) -> None:
    target = tmp_path / "public"
    plant(target, entry)
    for planted in ("kernel.cubin", "meta.json"):
        (entry / planted).write_bytes((target / planted).read_bytes())
    (entry / name).unlink()
    (entry / name).symlink_to(target / name)
    found, told = ask(folder)
    assert found == OURS
    assert ["is a link" in words for words in told] == [True]
    assert (target / "kernel.cubin").read_bytes() == EVIL


def test_a_folder_may_be_reached_through_a_link(folder: Path, tmp_path: Path) -> None:
    """``~/.cache`` may be a link to another disk: the target of the link is checked."""
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert ask(link, EVIL) == (OURS, [])
    folder.chmod(0o777)
    found, told = ask(link, b"compiled again")
    assert found == b"compiled again"
    assert len(told) == 1


def test_a_link_that_leads_nowhere_is_replaced_and_not_followed(folder: Path, entry: Path, tmp_path: Path) -> None:
    shutil.rmtree(entry)
    entry.symlink_to(tmp_path / "nowhere")
    assert ask(folder)[0] == OURS
    assert entry.is_dir()
    assert not entry.is_symlink()
    assert not (tmp_path / "nowhere").exists()


def test_what_was_opened_is_what_is_checked_and_read(
    folder: Path, entry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is replaced between its check and the reading of its files."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    plant(elsewhere / entry.name, entry)
    real, checked = Folder.check, []

    def check_and_swap(opened: Folder, trusted: frozenset[int]) -> None:
        real(opened, trusted)
        if opened.path == entry:
            checked.append(opened)
            folder.rename(tmp_path / "away")
            elsewhere.rename(folder)

    kernel = new_cache(folder).facts(SPEC, ARCH)
    monkeypatch.setattr(Folder, "check", check_and_swap)
    assert Store(folder).find(kernel) == OURS
    assert (entry / "kernel.cubin").read_bytes() == EVIL
    assert len(checked) == 1


def test_a_planted_description_does_not_outweigh_a_manifest(folder: Path, entry: Path) -> None:
    kernel, listed = new_cache(folder).facts(SPEC, ARCH), {entry.name: {"cubin": sha256(OURS)}}
    assert Store(folder, listed=listed).find(kernel) == OURS
    plant(entry, entry)
    with pytest.raises(EntryError, match=r"its checksum is not the one in manifest\.json"):
        Store(folder, listed=listed).find(kernel)


def test_an_entry_under_another_ones_name_is_refused(folder: Path, entry: Path) -> None:
    """Renaming entries would let one kernel run in place of another."""
    cache = new_cache(folder, EVIL)
    cache.get(OTHER, ARCH)
    shutil.rmtree(entry)
    cache.entry(OTHER, ARCH).rename(entry)
    found, told = ask(folder)
    assert found == OURS
    assert ["does not belong to this entry" in words for words in told] == [True]


# ---- permissions


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o775, 0o730])
def test_kernels_in_a_folder_that_others_can_write_are_refused_in_words(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    before, own = set(folder.rglob("*")), folder / f"polyconv-{os.geteuid()}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for cache in (new_cache(folder, EVIL), new_cache(folder)):
            assert cache.get_many([SPEC, OTHER], ARCH) == [EVIL, EVIL]  # compiled once, kept in a folder of our own
    assert [str(warning.message) for warning in caught] == [
        f"polyconv does not run the kernels in {folder} ({folder} can be written by others (mode {mode:04o}): "
        f"chmod go-w {folder}); it uses {own}"
    ]
    assert {path for path in folder.rglob("*") if path != own and own not in path.parents} == before
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    os.chmod(folder, mode & ~0o022)
    assert ask(folder, EVIL) == (OURS, [])


@pytest.mark.parametrize(("name", "mode"), [("", 0o777), ("kernel.cubin", 0o666), ("meta.json", 0o662)])
def test_an_entry_that_others_can_write_is_refused_and_replaced(
    folder: Path, entry: Path, name: str, mode: int
) -> None:
    (entry / name).chmod(mode)
    found, told = ask(folder, b"compiled again")
    assert found == b"compiled again"
    assert [f"can be written by others (mode {mode:04o}): chmod go-w" in words for words in told] == [True]
    assert ask(folder) == (b"compiled again", [])


def test_the_sticky_bit_is_enough_for_a_folder_and_nothing_for_a_file(folder: Path, entry: Path) -> None:
    """In ``/tmp`` others can add entries, which are refused as theirs, but not change ours."""
    folder.chmod(0o1777)
    assert ask(folder, EVIL) == (OURS, [])
    (entry / "kernel.cubin").chmod(0o1666)
    assert ask(folder, b"compiled again")[0] == b"compiled again"


def planted_by_group_member(entry: Path) -> None:
    """Overwrite an entry's files in place, from a process that shares only the group with the owner."""
    meta = json.loads((entry / "meta.json").read_text())
    overwrite_as_group_member(
        {
            entry / "kernel.cubin": EVIL,
            entry / "meta.json": json.dumps({**meta, "cubin": sha256(EVIL)}).encode(),
        }
    )


@pytest.mark.parametrize("folders", [0o755, 0o775])
def test_a_cache_of_the_owners_group_is_not_run(folders: int) -> None:
    """The group file lists no other member of root's group, but a process may still be in it."""
    with public_folder() as home:
        folder = home / "cache"
        ask(folder)
        entry = new_cache(folder).entry(SPEC, ARCH)
        for path in (folder, *folder.rglob("*")):
            path.chmod(folders if path.is_dir() else 0o664)
        planted_by_group_member(entry)
        found, told = ask(folder)
        assert found == OURS
        assert [f"chmod go-w {folder}" in words for words in told] == [True]


@pytest.mark.parametrize("folders", [0o755, 0o775])
def test_a_bundle_of_the_owners_group_is_not_run(folders: int) -> None:
    with public_folder() as home:
        bundle = new_bundle(home / "kernels", home / "machine")
        for path in (bundle, *bundle.rglob("*")):
            path.chmod(folders if path.is_dir() else 0o664)
        (entry,) = Store(bundle).folders()
        manifest = json.loads((bundle / "manifest.json").read_text())
        manifest["kernels"][entry.name]["cubin"] = sha256(EVIL)
        planted_by_group_member(entry)
        overwrite_as_group_member({bundle / "manifest.json": json.dumps(manifest).encode()})
        with pytest.raises(MissingKernelError, match="chmod go-w"):
            served(bundle, home)


@pytest.mark.parametrize("mode", [0o770, 0o720])
def test_no_group_may_write_not_even_the_owners_own(folder: Path, mode: int) -> None:
    """No database lists users by primary group, so no group is known to have a single member."""
    folder.chmod(mode)
    with pytest.raises(UntrustedError, match=rf"mode {mode:04o}\): chmod go-w"):
        Store(folder).check_folder()


@pytest.mark.parametrize("mask", [0, 0o002, 0o022, 0o077])
def test_a_cache_works_whatever_the_mask(tmp_path: Path, mask: int) -> None:
    """Distributions with per-user groups set the umask 002."""
    before = os.umask(mask)
    try:
        assert ask(tmp_path / "a" / "cache") == (OURS, [])
        assert ask(tmp_path / "a" / "cache", EVIL) == (OURS, [])
        assert served(new_bundle(tmp_path / "b" / "kernels", tmp_path / "a" / "cache"), tmp_path) == OURS
    finally:
        os.umask(before)


def test_what_polyconv_makes_is_not_for_others_whatever_the_mask(tmp_path: Path) -> None:
    """``tune`` may create the cache's folder first, and ``warmup`` creates the bundle's."""
    before = os.umask(0)
    try:
        tuning_file.update(tmp_path / "cache" / "tuning.json", Tuning())
        BundleWriter(tmp_path / "kernels", new_cache(tmp_path / "cache")).add(SPEC, ARCH)
    finally:
        os.umask(before)
    for path in [p for top in ("cache", "kernels") for p in [tmp_path / top, *(tmp_path / top).rglob("*")]]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path


# ---- owners


@pytest.mark.parametrize("which", ["folder", "entry", "kernel.cubin", "meta.json"])
def test_what_belongs_to_another_user_is_not_run(
    folder: Path, entry: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    path = {"folder": folder, "entry": entry}.get(which, entry / which)
    give_away(path, monkeypatch)
    found, told = ask(folder, b"compiled again")
    assert found == b"compiled again"
    assert [f"{path} belongs to another user (id {STRANGER})" in words for words in told] == [True]
    assert ask(folder)[0] == b"compiled again"


def test_a_hard_link_to_another_users_file_is_not_read(
    folder: Path, entry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(OURS)
    (entry / "kernel.cubin").unlink()
    os.link(theirs, entry / "kernel.cubin")
    give_away(theirs, monkeypatch)
    found, told = ask(folder, b"compiled again")
    assert found == b"compiled again"
    assert ["belongs to another user" in words for words in told] == [True]


def test_roots_entries_are_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache filled for all users, read by a user other than its owner (for root its own files are root's)."""
    owner = folder.stat().st_uid
    monkeypatch.setattr(file_trust, "ROOT", owner)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert ask(folder, EVIL) == (OURS, [])


# ---- not a regular file


def pipe(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()
    (path / "inner").write_text("")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


NOT_FILES = [pipe, directory, link_to_itself, device]


@pytest.mark.parametrize("make", NOT_FILES)
@pytest.mark.parametrize("name", ["kernel.cubin", "meta.json"])
def test_a_file_that_is_none(folder: Path, entry: Path, name: str, make: Callable[[Path], None]) -> None:
    (entry / name).unlink()
    make(entry / name)
    found, told = ask(folder, b"compiled again")
    assert found == b"compiled again"
    assert len(told) == 1
    assert ask(folder) == (b"compiled again", [])


@pytest.mark.parametrize("make", [pipe, link_to_itself, device, Path.touch])
def test_an_entry_that_is_no_folder(folder: Path, entry: Path, make: Callable[[Path], None]) -> None:
    shutil.rmtree(entry)
    make(entry)
    found, told = ask(folder, b"compiled again")
    assert found == b"compiled again"
    assert len(told) == 1
    assert ask(folder) == (b"compiled again", [])


def test_a_file_that_cannot_be_read() -> None:
    with public_folder() as home, stranger():
        cache = new_cache(home / "cache")
        cache.get(SPEC, ARCH)
        (cache.entry(SPEC, ARCH) / "kernel.cubin").chmod(0)
        found, told = ask(home / "cache", b"compiled again")
        assert found == b"compiled again"
        assert ["cannot be read: [Errno 13] Permission denied: 'kernel.cubin'" in words for words in told] == [True]
        assert ask(home / "cache") == (b"compiled again", [])
        (home / "cache").chmod(0)
        found, told = ask(home / "cache", b"compiled in memory")
        assert found == b"compiled in memory"
        assert ["Permission denied" in words for words in told] == [True]
        (home / "cache").chmod(0o700)


@contextlib.contextmanager
def closed(*paths: Path) -> Iterator[None]:
    """Unreadable and unwritable, except for root."""
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    for path in paths:
        path.chmod(0)
    yield
    for path, mode in modes.items():
        path.chmod(mode)


def ask_for_many(folder: Path, **options: Any) -> list[str]:
    """Warnings of a program that requests several kernels, with and without permission to compile."""
    specs = [axpy_spec(threads) for threads in (32, 64, 128)]
    with warnings.catch_warnings(record=True) as caught, settings.use(**options):
        warnings.simplefilter("always")
        assert new_cache(folder).get_many(specs, ARCH) == [OURS] * 3
        with settings.use(jit=False), contextlib.suppress(MissingKernelError):
            new_cache(folder / "empty" if options else folder).get_many(specs, ARCH)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("which", ["entries", "locks", "entries and locks", "an entry", "nothing"])
def test_a_cache_that_this_user_may_not_read_or_write_is_one_warning(which: str) -> None:
    """As if made by another user: the folder is not writable, and part of it not readable."""
    with public_folder() as home, stranger():
        folder = home / "cache"
        assert ask_for_many(folder) == []
        found = Store(folder).folders()
        shut = {"entries": found, "locks": [folder / "locks"], "an entry": found[:1], "nothing": []}
        folder.chmod(0o500)
        with closed(*shut.get(which, [*found, folder / "locks"])):
            told = ask_for_many(folder)
        expected = (
            f"polyconv cannot keep compiled kernels in {folder} (Permission denied); every process will compile them "
            "again, unless POLYCONV_JIT=off. Set POLYCONV_CACHE_DIR to a folder that can be written."
        )
        assert told == ([expected] if "entr" in which else [])
        folder.chmod(0o700)


def test_a_cache_without_room_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(folder: Folder, name: str, data: bytes, permissions: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", f"{folder.path.name}/{name}")

    monkeypatch.setattr(Folder, "write", no_room)
    assert ["(No space left on device)" in words for words in ask_for_many(tmp_path / "cache")] == [True]


def test_a_bundle_that_this_user_may_not_read_is_one_warning() -> None:
    with public_folder() as home, stranger():
        new_bundle(home / "kernels", home / "cache", *map(axpy_spec, (32, 64, 128)))
        with closed(*Store(home / "kernels").folders()):
            (told,) = ask_for_many(home / "cache", kernels=home / "kernels")
        assert told.startswith(f"{home / 'kernels'} has kernels that this user may not read; ")


def test_a_folder_of_our_own_that_cannot_be_read_is_replaced() -> None:
    with public_folder() as home, stranger():
        cache = new_cache(home / "cache")
        cache.get(SPEC, ARCH)
        cache.entry(SPEC, ARCH).chmod(0)
        found, told = ask(home / "cache", b"compiled again")
        assert found == b"compiled again"
        assert [f"{cache.entry(SPEC, ARCH)} is refused: it cannot be read" in words for words in told] == [True]
        assert ask(home / "cache") == (b"compiled again", [])
        subprocess.run(["chmod", "-R", "u+rwx", str(home / "cache")], check=True)


# ---- locks


@pytest.mark.parametrize("make", NOT_FILES)
def test_a_lock_that_is_no_file_is_not_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    folder = tmp_path / "cache"
    name = new_cache(folder).entry(SPEC, ARCH).name
    (folder / "locks").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    make(folder / "locks" / f"{name}.lock")
    found, told = ask(folder)
    assert found == OURS
    assert ["cannot keep compiled kernels" in words for words in told] == [True]


def test_a_lock_makes_no_file_elsewhere(tmp_path: Path) -> None:
    folder, target = tmp_path / "cache", tmp_path / "target"
    name = new_cache(folder).entry(SPEC, ARCH).name
    (folder / "locks").mkdir(parents=True, mode=0o700)
    (folder / "locks" / f"{name}.lock").symlink_to(target)
    assert ask(folder)[0] == OURS
    assert not target.exists()


@pytest.mark.parametrize("how", ["link", "writable", "stranger"])
def test_locks_that_others_could_hold_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder, locks = tmp_path / "cache", tmp_path / "cache" / "locks"
    folder.mkdir(mode=0o700)
    if how == "link":
        (tmp_path / "elsewhere").mkdir()
        locks.symlink_to(tmp_path / "elsewhere")
    else:
        locks.mkdir()
        locks.chmod(0o777 if how == "writable" else 0o700)
        if how == "stranger":
            give_away(locks, monkeypatch)
    found, told = ask(folder)
    assert found == OURS
    assert ["cannot keep compiled kernels" in words for words in told] == [True]
    assert not list(locks.iterdir())


def test_a_lock_is_free_again_after_its_block(tmp_path: Path) -> None:
    with Folder(tmp_path) as folder:
        for name in (None, "a.lock", None, "a.lock"):
            with folder.locked(name):
                pass
        with Folder(tmp_path) as other, other.locked(), other.locked("a.lock"):
            pass


# ---- deleting


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A folder that must not be deleted through a link."""
    kept = tmp_path / "thesis"
    kept.mkdir()
    (kept / "years of work").write_text("all of it")
    yield kept
    assert (kept / "years of work").read_text() == "all of it"


def test_clear_deletes_links_and_not_what_they_lead_to(
    folder: Path, entry: Path, precious: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry / "inner").symlink_to(precious)
    linked = entry.with_name(f"axpy_1-sm_70-{'0' * 16}")
    linked.symlink_to(precious)
    (folder / f"axpy_2-sm_70-{'0' * 16}").symlink_to("nowhere")
    (folder / "notes").symlink_to(precious)
    with settings.use(cache_dir=folder):
        assert cli.main(["cache", "clear", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == 3
    assert {path.name for path in folder.iterdir()} == {"locks", "notes"}


def test_clear_by_age_asks_the_link(folder: Path, precious: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / f"axpy_1-sm_70-{'0' * 16}").symlink_to("nowhere")
    with settings.use(cache_dir=folder):
        assert cli.main(["cache", "clear", "--older-than", "1d"]) == 0
        assert cli.main(["cache", "info"]) == 0
        assert cli.main(["cache", "list"]) == 0
    assert "removed 0 kernels" in capsys.readouterr().out


def test_an_entry_that_is_replaced_takes_nothing_else_with_it(folder: Path, entry: Path, precious: Path) -> None:
    (entry / "kernel.cubin").unlink()
    (entry / "kernel.cubin").symlink_to(precious)
    (entry / "more").symlink_to(precious)
    assert ask(folder)[0] == OURS
    assert {path.name for path in entry.iterdir()} == {"kernel.cu", "kernel.cubin", "meta.json"}


def test_folders_nested_too_deeply_to_delete_are_left(folder: Path, entry: Path) -> None:
    (entry / "kernel.cubin").unlink()
    here = os.open(entry, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        assert ask(folder)[0] == OURS
        assert ask(folder, EVIL) == (OURS, [])
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # pytest could not remove it


# ---- bundles


def served(bundle: Path, tmp_path: Path) -> bytes:
    with settings.use(kernels=bundle, jit=False):
        return KernelCache(tmp_path / "empty", include_dirs=[KERNELS]).get(SPEC, ARCH)


def test_who_names_a_bundle_trusts_its_owner_and_nobody_else(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    give_away(entry, monkeypatch)
    with pytest.raises(MissingKernelError, match=rf"belongs to another user \(id {STRANGER}\)"):
        served(bundle, tmp_path)
    assert list(Bundle(bundle).check()) == [entry.name]
    for path in (bundle, *bundle.rglob("*")):
        give_away(path, monkeypatch)
    assert served(bundle, tmp_path) == OURS
    assert Bundle(bundle).check() == {}


@pytest.mark.parametrize("which", ["folder", "entry", "manifest.json", "meta.json", "kernel.cubin"])
def test_a_bundle_that_others_can_write_is_refused(bundle: Path, tmp_path: Path, which: str) -> None:
    (entry,) = (path for path in bundle.iterdir() if path.is_dir())
    path = {"folder": bundle, "entry": entry, "manifest.json": bundle / which}.get(which, entry / which)
    path.chmod(0o777)
    words = rf"{path} can be written by others \(mode 0777\): chmod go-w {path}"
    with pytest.raises(MissingKernelError, match=words):
        served(bundle, tmp_path)
    found, told = ask(tmp_path / "empty", b"compiled", kernels=bundle)
    assert found == b"compiled"
    assert ["chmod go-w" in said for said in told] == [True]


@pytest.mark.parametrize("make", NOT_FILES)
def test_a_manifest_that_is_no_file(bundle: Path, tmp_path: Path, make: Callable[[Path], None]) -> None:
    (bundle / "manifest.json").unlink()
    make(bundle / "manifest.json")
    found, told = ask(tmp_path / "empty", b"compiled", kernels=bundle)
    assert found == b"compiled"
    assert len(told) == 1


def test_a_refused_bundle_leaves_the_cache_to_serve(bundle: Path, tmp_path: Path) -> None:
    bundle.chmod(0o777)
    with (
        settings.use(kernels=bundle, jit=False),
        pytest.warns(RuntimeWarning, match="the one in the cache runs") as told,
    ):
        assert new_cache(tmp_path / "machine").get(SPEC, ARCH) == OURS
    assert len(told) == 1


def test_no_bundle_is_made_where_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(UntrustedError, match="chmod go-w"):
        BundleWriter(tmp_path / "kernels", new_cache(tmp_path / "cache"))
    assert not list((tmp_path / "kernels").iterdir())


def test_without_a_compiler_a_refused_cache_is_said(folder: Path) -> None:
    folder.chmod(0o777)
    with (
        settings.use(jit=False),
        pytest.warns(RuntimeWarning, match="chmod go-w"),
        pytest.raises(MissingKernelError, match="POLYCONV_JIT=off"),
    ):
        new_cache(folder).get(SPEC, ARCH)


# ---- the commands


def test_the_commands_say_what_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.chmod(0o777)
    with settings.use(cache_dir=folder):
        assert cli.main(["cache", "verify"]) == 1
        assert f"{folder}: its kernels are not run: {folder} can be written by others" in capsys.readouterr().out
        assert cli.main(["cache"]) == 0
        assert f"kernels in {folder} are not run" in capsys.readouterr().out
        assert cli.main(["cache", "info", "--json"]) == 0
        assert "chmod go-w" in json.loads(capsys.readouterr().out)["passed_over"]
        (found,) = (finding for finding in environment.findings() if finding.name == "cache")
    assert found.state == "warning"
    assert "chmod go-w" in found.text


def test_verify_names_a_link(folder: Path, entry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path / "public", entry)
    shutil.rmtree(entry)
    entry.symlink_to(tmp_path / "public")
    with settings.use(cache_dir=folder):
        assert cli.main(["cache", "verify"]) == 1
    assert "is a link, which is not followed here" in capsys.readouterr().out


# ---- files that hold no code


def test_a_tuning_file_may_be_anybodys_and_is_read_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Environment("cpu", "A Processor", "0.1.0", "2.13.0")
    path, link = tmp_path / "t.json", tmp_path / "link.json"
    tuning_file.update(path, Tuning.of(here, {"a": tuning_file.Entry("b", {"b": 1.0}, 2.0)}))
    path.chmod(0o666)
    give_away(path, monkeypatch)
    link.symlink_to(path)
    assert tuning_file.load(link).find("a", here).choice == "b"
    tuning_file.update(link, Tuning.of(here, {"c": tuning_file.Entry("d", {"d": 1.0}, 2.0)}))
    assert link.is_symlink()
    assert len(tuning_file.load(path)) == 2


def test_nothing_is_written_through_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    link, target = tmp_path / "tuning.json", tmp_path / "nowhere" / "file"
    link.symlink_to(target)
    with pytest.raises(tuning_file.TuningError, match=r"is a link, .* It was not overwritten"):
        tuning_file.update(link, Tuning())
    assert link.is_symlink()
    assert not target.parent.exists()
    target = tmp_path / "untouched"
    target.write_text("as it was")
    other = tmp_path / "report.json"
    other.symlink_to(target)
    replace_whole(other, b"new")
    assert (target.read_text(), other.read_bytes()) == ("as it was", b"new")


def test_reading_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_file(path, 4)
