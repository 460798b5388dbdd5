"""The kernel cache: each kernel is compiled once per machine; stale or damaged entries are never used."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from nightly import NIGHTLY
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.jit.compile import OPTIONS, compile_kernel
from polyconv.cuda.jit.cubin import kernel_info
from polyconv.cuda.jit.fingerprint import Headers, identity
from polyconv.cuda.planner.codegen import source
from polyconv.cuda.planner.plan import KernelSpec
from polyconv.util.atomic_files import Folder
from virtual_gpu.example import KERNELS, axpy_spec

SPEC = axpy_spec()
ARCH = "sm_70"
PROCESSES = 64 if NIGHTLY else 16
pytestmark = pytest.mark.usefixtures("new_warnings")


class CountingCompiler:
    """A fake compiler that appends a line to a file per call, also from other processes, and returns unique bytes."""

    def __init__(self, log: Path, answer: bytes = b"machine code") -> None:
        self.log = log
        self.answer = answer

    def __call__(self, spec: KernelSpec, arch: str) -> bytes:
        with self.log.open("a") as file:
            file.write(f"{spec.symbol} {arch}\n")
        return self.answer

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path) -> CountingCompiler:
    return CountingCompiler(tmp_path / "compilations")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def new_cache(folder: Path, compiler: CountingCompiler | None = None) -> KernelCache:
    """A cache as a new process sees it."""
    return KernelCache(folder, include_dirs=[KERNELS], compiler=compiler)


def test_compiles_once_then_reads(folder: Path, compiler: CountingCompiler) -> None:
    first = new_cache(folder, compiler)
    assert first.get(SPEC, ARCH) == first.get(SPEC, ARCH) == b"machine code"
    assert new_cache(folder, compiler).get(SPEC, ARCH) == b"machine code"
    assert compiler.calls == 1


def test_an_entry_can_be_read_by_people(folder: Path) -> None:
    cache = new_cache(folder)
    cubin = cache.get(SPEC, ARCH)
    entry = cache.entry(SPEC, ARCH)
    assert entry.name.startswith("axpy_128-sm_70-")
    assert len(entry.name.rpartition("-")[2]) == 16
    assert (entry / "kernel.cu").read_text() == source(SPEC)
    assert (entry / "kernel.cubin").read_bytes() == cubin
    assert kernel_info(cubin).name == "axpy_128"
    meta = json.loads((entry / "meta.json").read_text())
    assert set(meta["headers"]) == {"axpy.cuh", "common/common.cuh", "common/field_check.cuh"}
    assert meta["arch"] == ARCH


def test_owner_only(folder: Path) -> None:
    before = os.umask(0)
    try:
        cache = new_cache(folder)
        cache.get(SPEC, ARCH)
    finally:
        os.umask(before)
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_is_left_over(folder: Path, compiler: CountingCompiler) -> None:
    cache = new_cache(folder, compiler)
    cache.get(SPEC, ARCH)
    assert {path.name for path in folder.iterdir()} == {"locks", cache.entry(SPEC, ARCH).name}


@pytest.mark.parametrize("damage", ["flip", "truncate", "meta", "meta gone", "cubin gone", "empty"])
def test_a_damaged_entry_is_replaced(folder: Path, compiler: CountingCompiler, damage: str) -> None:
    cache = new_cache(folder, compiler)
    cache.get(SPEC, ARCH)
    entry = cache.entry(SPEC, ARCH)
    cubin, meta = entry / "kernel.cubin", entry / "meta.json"
    if damage == "flip":
        cubin.write_bytes(b"Machine code")
    elif damage == "truncate":
        cubin.write_bytes(b"mach")
    elif damage == "meta":
        meta.write_text("[]")
    elif damage == "meta gone":
        meta.unlink()
    elif damage == "cubin gone":
        cubin.unlink()
    else:
        for path in entry.iterdir():
            path.unlink()
    with pytest.warns(RuntimeWarning, match=f"{entry.name} is refused: .*; polyconv compiles the kernel again") as said:
        assert new_cache(folder, compiler).get(SPEC, ARCH) == b"machine code"
    assert len(said) == 1
    assert new_cache(folder, compiler).get(SPEC, ARCH) == b"machine code"
    assert compiler.calls == 2
    assert {path.name for path in folder.iterdir()} == {"locks", entry.name}


def test_everything_that_can_change_the_binary_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = tmp_path / "headers"
    headers.mkdir()
    (headers / "axpy.cuh").write_text('#include "inner.cuh"\n')
    (headers / "inner.cuh").write_text("// one\n")

    def key() -> str:
        return KernelCache(tmp_path, include_dirs=[headers]).entry(SPEC, ARCH).name

    seen = [key()]
    (headers / "inner.cuh").write_text("// two\n")
    seen.append(key())
    (headers / "axpy.cuh").write_text('#include "inner.cuh"\n// changed\n')
    seen.append(key())
    monkeypatch.setattr("polyconv.cuda.jit.cache.compiler_id", lambda: "CL-1 12.9")
    seen.append(key())
    monkeypatch.setattr("polyconv.cuda.jit.cache.flags", lambda arch: ("--std=c++20",))
    seen.append(key())
    monkeypatch.setattr("polyconv.cuda.jit.fingerprint.SCHEMA", 1000)
    seen.append(key())
    monkeypatch.setitem(OPTIONS, "use_fast_math", True)
    seen.append(key())
    seen.append(KernelCache(tmp_path, include_dirs=[headers]).entry(SPEC, "sm_80").name)
    seen.append(KernelCache(tmp_path, include_dirs=[headers]).entry(axpy_spec(min_blocks=2), ARCH).name)
    assert len(set(seen)) == len(seen)


def test_the_place_of_the_headers_is_not_in_the_key(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "axpy.cuh").write_bytes((KERNELS / "axpy.cuh").read_bytes())
    here, there = (identity(SPEC, ARCH, Headers([tmp_path / name])) for name in ("here", "there"))
    assert here == there


def test_includes_are_followed_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.cuh").write_text('#pragma once\n#  include "b.cuh"\n#include <cuda_fp16.h>\n// #include "no.cuh"\n')
    (tmp_path / "b.cuh").write_text('  #include "sub/c.cuh"\n#include "a.cuh"\n')
    (tmp_path / "sub" / "c.cuh").write_text("")
    (tmp_path / "no.cuh").write_text("")
    assert set(Headers([tmp_path]).included_by('#include "a.cuh"\n')) == {"a.cuh", "b.cuh", "sub/c.cuh"}


def test_threads_of_one_process_compile_once(folder: Path, compiler: CountingCompiler) -> None:
    def slowly(spec: KernelSpec, arch: str) -> bytes:
        time.sleep(0.05)
        return compiler(spec, arch)

    cache = KernelCache(folder, include_dirs=[KERNELS], compiler=slowly)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cache.get(SPEC, ARCH), range(8)))
    assert compiler.calls == 1


def _one_of_many(folder: Path, log: Path, barrier: Barrier) -> None:
    """Body of a process that requests three kernels at the same time as all others."""

    def compile_and_count(spec: KernelSpec, arch: str) -> bytes:
        CountingCompiler(log)(spec, arch)
        return compile_kernel(spec, arch, include_dirs=[KERNELS])

    cache = KernelCache(folder, include_dirs=[KERNELS], compiler=compile_and_count)
    specs = [axpy_spec(threads) for threads in (32, 64, 128)]
    barrier.wait(60)
    for spec, cubin in zip(specs, cache.get_many(specs, ARCH), strict=True):
        assert kernel_info(cubin).name == spec.symbol


def test_processes_that_start_together_compile_each_kernel_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Forked from a server that has only done imports: separate processes, started fast.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server does not get pytest's sys.path
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["polyconv.cuda.jit.cache", "cuda.core", "cuda.bindings.nvrtc", __name__])
    barrier = context.Barrier(PROCESSES)
    log = tmp_path / "compilations"
    processes = [context.Process(target=_one_of_many, args=(folder, log, barrier)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    assert sorted(log.read_text().splitlines()) == ["axpy_128 sm_70", "axpy_32 sm_70", "axpy_64 sm_70"]


def test_an_unwritable_cache_compiles_in_memory_and_warns_once(tmp_path: Path, compiler: CountingCompiler) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.warns(RuntimeWarning, match="POLYCONV_CACHE_DIR"):
        assert new_cache(blocked / "cache", compiler).get(SPEC, ARCH) == b"machine code"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert new_cache(blocked / "cache", compiler).get(SPEC, ARCH) == b"machine code"
    assert compiler.calls == 2


def test_a_full_disk_does_not_lose_the_kernel(
    folder: Path, compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(folder: Folder, name: str, data: bytes, permissions: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "write", no_space)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert new_cache(folder, compiler).get(SPEC, ARCH) == b"machine code"
    assert [path.name for path in folder.iterdir()] == ["locks"]


def test_a_failed_compilation_leaves_nothing(folder: Path) -> None:
    def fail(spec: KernelSpec, arch: str) -> bytes:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        KernelCache(folder, include_dirs=[KERNELS], compiler=fail).get(SPEC, ARCH)
    assert [path.name for path in folder.iterdir()] == ["locks"]
