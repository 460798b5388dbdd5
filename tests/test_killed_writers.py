"""Processes killed while writing: the next writer removes their remains, and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polyconv import cli
from polyconv.autotune import tuning_file
from polyconv.autotune.tuning_file import Tuning
from polyconv.backend import backend_for
from polyconv.cuda.jit import store
from polyconv.cuda.jit.bundle_writer import BundleWriter
from polyconv.cuda.jit.cache import KernelCache
from polyconv.util import file_trust
from polyconv.util.atomic_files import Folder, replace_whole
from virtual_gpu.example import KERNELS, axpy_spec

SPEC, ARCH = axpy_spec(), "sm_70"
HERE = backend_for(torch.device("cpu")).environment()

pytestmark = pytest.mark.timeout(60)  # a lock that is never freed is a failure, not a long wait


def machine(folder: Path) -> KernelCache:
    return KernelCache(folder, include_dirs=[KERNELS], compiler=lambda *_: b"machine code")


def killed_while_it_writes(write: Callable[[], object]) -> None:
    """Run something in a process that is killed when the new contents are on disk without a name."""
    pid = os.fork()
    if pid == 0:
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        write()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def some_tuning() -> Tuning:
    return Tuning.of(HERE, {"a problem": tuning_file.Entry("a", {"a": 1.0}, 2.0)})


def new_bundle(folder: Path) -> None:
    writer = BundleWriter(folder / "bundle", machine(folder / "cache"))
    writer.add(SPEC, ARCH)
    writer.finish(["a test"])


def cache_in_a_volume(folder: Path) -> None:
    """A cache in a directory that all users can write, as Kubernetes' volumes are."""
    (folder / "volume").mkdir(exist_ok=True)
    (folder / "volume").chmod(0o777)
    machine(folder / "volume").get(SPEC, ARCH)


WRITERS: dict[str, Callable[[Path], object]] = {
    "tuning file": lambda folder: tuning_file.update(folder / "tuning.json", some_tuning()),
    "report": lambda folder: replace_whole(folder / "report.json", b"{}"),
    "cache": lambda folder: machine(folder).get(SPEC, ARCH),
    "cache in a volume": cache_in_a_volume,
    "manifest": lambda folder: BundleWriter(folder, machine(folder / "none")),
    "bundle": new_bundle,
}


@pytest.mark.parametrize("what", WRITERS)
def test_what_a_killed_writer_leaves_behind_goes_with_the_next(tmp_path: Path, what: str) -> None:
    write = WRITERS[what]
    for _ in range(3):
        killed_while_it_writes(lambda: write(tmp_path))
        assert len(hidden(tmp_path)) == 1
    others = [
        ".tuning.json.bak",
        ".other.json.0123456789abcdef",
        ".tuning.json.0123456789ABCDEF",
        ".manifest.json.1234",
    ]
    if what != "manifest":  # a bundle is made only in an empty place
        for name in others:
            (tmp_path / name).touch()
    write(tmp_path)
    assert set(hidden(tmp_path)) == (set(others) if what != "manifest" else set())


def test_an_entry_of_a_bundle_that_was_cut_off_goes_with_the_next(tmp_path: Path) -> None:
    new_bundle(tmp_path)
    (entry,) = (path for path in (tmp_path / "bundle").iterdir() if path.is_dir())
    (tmp_path / "bundle" / f".{entry.name}.0123456789abcdef").mkdir()
    (tmp_path / "bundle" / f".{entry.name}.0123456789abcdef" / "kernel.cu").touch()
    (entry / "kernel.cubin").write_bytes(b"damaged")
    new_bundle(tmp_path)
    assert hidden(tmp_path) == []


def test_without_locks_nothing_of_other_writers_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks, what looks abandoned may belong to another writing process."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    write = WRITERS["tuning file"]
    killed_while_it_writes(lambda: write(tmp_path))
    monkeypatch.setattr("fcntl.flock", no_locks)
    write(tmp_path)
    assert len(hidden(tmp_path)) == 1


def test_clearing_a_cache_takes_what_was_left_behind_and_waits_for_writers(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = machine(folder)
    killed_while_it_writes(lambda: cache.get(SPEC, ARCH))
    assert len(hidden(folder)) == 1
    clearing = threading.Thread(target=cli.main, args=(["cache", "clear", "--directory", str(folder)],))
    name = cache.entry(SPEC, ARCH).name
    with Folder(folder) as opened, store.locked(opened, name, file_trust.owners()):
        clearing.start()
        clearing.join(0.3)
        assert clearing.is_alive()
        assert len(hidden(folder)) == 1
    clearing.join(30)
    assert [path.name for path in folder.iterdir()] == ["locks"]
