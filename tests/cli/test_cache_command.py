"""``polyconv cache``: its output and what it deletes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from polyconv import cli, settings
from polyconv.cuda.jit.bundle_writer import BundleWriter
from polyconv.cuda.jit.cache import KernelCache
from virtual_gpu.example import KERNELS, axpy_spec

ARCHS = ("sm_70", "sm_100")


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """A cache with two kernels, each for two architectures."""
    made = KernelCache(tmp_path / "cache", include_dirs=[KERNELS], compiler=lambda *_: b"machine code")
    for arch in ARCHS:
        made.get_many([axpy_spec(), axpy_spec(64)], arch)
    return made


def ask(cache: KernelCache, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    with settings.use(cache_dir=cache.directory):
        capsys.readouterr()
        assert cli.main(["cache", *arguments, "--json"]) == status
        answer = json.loads(capsys.readouterr().out)
        assert cli.main(["cache", *arguments]) == status  # also as text
    return answer


def test_info(cache: KernelCache, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(cache, capsys)
    on_disk = sum(
        path.stat().st_size for path in cache.directory.rglob("*") if path.suffix != ".lock" and path.is_file()
    )
    assert (found["kernels"], found["bytes"], found["writable"]) == (4, on_disk, True)
    assert list(found["archs"]) == list(ARCHS)
    assert [one["kernels"] for one in found["archs"].values()] == [2, 2]
    assert f"{cache.directory}: 4 kernels" in capsys.readouterr().out


def test_an_absent_cache_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(KernelCache(tmp_path / "a" / "b"), capsys)
    assert (found["exists"], found["writable"], found["kernels"]) == (False, True, 0)
    assert list(tmp_path.iterdir()) == []


def test_list(cache: KernelCache, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ask(cache, capsys, "list")
    assert [(row["kernel"], row["arch"]) for row in rows] == [
        (symbol, arch) for arch in ARCHS for symbol in ("axpy_128", "axpy_64")
    ]
    assert all((cache.directory / row["entry"]).is_dir() for row in rows)
    assert "axpy_64" in capsys.readouterr().out


def test_path(cache: KernelCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(cache, capsys, "path") == {"directory": str(cache.directory)}
    assert capsys.readouterr().out == f"{cache.directory}\n"


@pytest.mark.parametrize("file", ["kernel.cubin", "kernel.cu", "meta.json"])
def test_verify(cache: KernelCache, capsys: pytest.CaptureFixture[str], file: str) -> None:
    assert ask(cache, capsys, "verify")["problems"] == {}
    entry = cache.entry(axpy_spec(), "sm_70")
    text = (entry / file).read_text()
    (entry / file).write_text(text.replace("machine", "Machine").replace("extern", "ext3rn").replace("12.9", "13.0"))
    found = ask(cache, capsys, "verify", status=1)
    assert list(found["problems"]) == [entry.name]
    printed = capsys.readouterr()
    assert "4 kernels, 1 of them damaged" in printed.out
    assert "never run" in printed.err


def test_verify_a_bundle(cache: KernelCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "kernels"
    writer = BundleWriter(folder, cache)
    writer.add(axpy_spec(), "sm_70")
    writer.finish(["a test"])
    there = ("verify", "--directory", str(folder))
    assert ask(cache, capsys, *there)["problems"] == {}
    (entry,) = (path for path in folder.iterdir() if path.is_dir())
    entry.rename(folder / f"{entry.name[:-1]}x")
    assert sorted(ask(cache, capsys, *there, status=1)["problems"]) == sorted([entry.name, f"{entry.name[:-1]}x"])
    with settings.use(cache_dir=folder):
        assert cli.main(["cache", "clear"]) == 2
    assert "delete it as a whole" in capsys.readouterr().err


def test_clear(cache: KernelCache, capsys: pytest.CaptureFixture[str]) -> None:
    (cache.directory / "notes").mkdir()
    old = cache.entry(axpy_spec(), "sm_70")
    os.utime(old, (0, time.time() - 3 * 86400))
    assert ask(cache, capsys, "clear", "--older-than", "2d")["removed"] == 1
    assert not old.exists()
    assert ask(cache, capsys, "clear")["removed"] == 3
    assert {path.name for path in cache.directory.iterdir()} == {"locks", "notes"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "--older-than", "1d"], "--older-than is for clear"),
        (["clear", "--older-than", "soon"], "'soon' is not an age"),
        (["info", "--directory", "/nowhere"], "/nowhere is not a directory"),
        (["forget"], "invalid choice"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        sys.exit(cli.main(["cache", *arguments]))
    assert words in capsys.readouterr().err
