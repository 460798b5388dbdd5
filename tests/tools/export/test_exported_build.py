"""Compilation of an exported file: once, in torch's extension folder, with a message for each failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from exported_files import Builds, load, text_of
from polyconv.cuda.planner import DEVICES
from polyconv.tools.export import convolution_model, exported_file

SMALL = exported_file(
    convolution_model((1, 4, 9, 9), in_channels=4, out_channels=4, kernel_size=3, groups=4), DEVICES["v100"]
)


def test_importing_compiles_and_says_so(builds: Builds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load(SMALL, tmp_path / "exported_small.py")
    assert len(builds) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"compiling CUDA kernels into {tmp_path}/extensions/polyconv_\w+, once; .*", line)


def test_it_is_found_again(builds: Builds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a second process: the module is loaded again."""
    for _ in range(3):
        load(SMALL, tmp_path / "exported_small.py").ModelNew()
    assert len(builds) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_second_process_compiles_nothing(builds: Builds, tmp_path: Path) -> None:
    path = tmp_path / "exported_small.py"
    load(SMALL, path)
    program = (
        "import torch.utils.cpp_extension as e; e.load_inline = None; import exported_small; exported_small.ModelNew()"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "compiling" not in ran.stderr


def test_threads_compile_once(builds: Builds, tmp_path: Path) -> None:
    module: Any = load(SMALL, tmp_path / "exported_small.py")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: module.ModelNew(8, 8, 3, groups=8), range(8)))
    assert len(builds) == 2, "what it was exported for, and the other"


def test_what_was_interrupted_is_compiled_again(builds: Builds, tmp_path: Path) -> None:
    load(SMALL, tmp_path / "exported_small.py")
    (complete,) = (tmp_path / "extensions").rglob("complete")
    complete.unlink()
    load(SMALL, tmp_path / "exported_small.py")
    assert len(builds) == 2
    assert complete.exists()


@pytest.mark.parametrize("changed", ["torch", "cuda", "architecture", "text"])
def test_the_name_has_all_that_matters(
    changed: str, builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = load(SMALL, tmp_path / "exported_small.py")
    source = "// something else\n" if changed == "text" else builds.sources[0]
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    elif changed == "cuda":
        monkeypatch.setattr(torch.version, "cuda", "99.0")
    elif changed == "architecture":
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    module._compiled(source)
    assert len(set(builds)) == 2


def test_the_headers_of_torch_are_not_read(builds: Builds, tmp_path: Path) -> None:
    """Headers that ``load_inline`` includes by itself are replaced by empty ones: a minute less to compile."""
    load(SMALL, tmp_path / "exported_small.py")
    headers = {path.name: path.read_text() for path in (tmp_path / "extensions").rglob("headers/torch/*.h")}
    assert headers == {"extension.h": "", "types.h": ""}
    assert "torch" not in builds.sources[0]


# ---- failures


@pytest.fixture
def no_gpu(builds: Builds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_someone_has_to_say_what_for(builds: Builds, tmp_path: Path) -> None:
    module: Any = load(SMALL, tmp_path / "exported_small.py")
    assert not builds, "a file without a GPU can be imported all the same"
    with pytest.raises(RuntimeError, match=r"no GPU to compile for: .* TORCH_CUDA_ARCH_LIST=7\.0"):
        module.ModelNew()


@pytest.mark.usefixtures("no_gpu")
def test_a_file_can_say_what_for(builds: Builds, tmp_path: Path) -> None:
    model = convolution_model((1, 4, 9, 9), in_channels=4, out_channels=4, kernel_size=3, groups=4)
    try:
        load(exported_file(model, DEVICES["v100"], arch="7.0;8.0"), tmp_path / "exported_small.py")
        assert os.environ["TORCH_CUDA_ARCH_LIST"] == "7.0;8.0"
    finally:
        os.environ.pop("TORCH_CUDA_ARCH_LIST", None)
    assert len(builds) == 1


def test_the_environment_comes_before_the_file(builds: Builds, tmp_path: Path) -> None:
    model = convolution_model((1, 4, 9, 9), in_channels=4, out_channels=4, kernel_size=3, groups=4)
    load(exported_file(model, DEVICES["v100"], arch="9.0"), tmp_path / "exported_small.py")
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "Volta"


def test_a_lock_that_was_left_behind_is_explained(builds: Builds, tmp_path: Path) -> None:
    """torch itself would wait for it silently and forever."""
    module: Any = load(SMALL, tmp_path / "exported_small.py")
    (complete,) = (tmp_path / "extensions").rglob("complete")
    complete.unlink()
    lock = complete.with_name("lock")
    lock.touch()
    os.utime(lock, (time.time() - 3600,) * 2)
    with pytest.raises(RuntimeError, match=rf"the lock {lock} was left by a process that was killed .*: delete it"):
        module._compiled(builds.sources[0])
    lock.unlink()
    module._compiled(builds.sources[0])
    assert len(builds) == 2


def test_another_process_that_compiles_is_waited_for(builds: Builds, tmp_path: Path) -> None:
    module: Any = load(SMALL, tmp_path / "exported_small.py")
    (complete,) = (tmp_path / "extensions").rglob("complete")
    complete.unlink()
    lock = complete.with_name("lock")
    lock.touch()

    def finish() -> None:
        complete.touch()
        lock.unlink()

    threading.Timer(0.3, finish).start()
    assert module._compiled(builds.sources[0]).endswith(".so")
    assert len(builds) == 1


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "error: -- unsupported GNU version! gcc versions later than 11 are not supported!",
            "CC=gcc-11 CXX=g\\+\\+-11",
        ),
        ("ninja: build stopped", "ninja: build stopped"),
    ],
)
def test_a_compiler_that_nvcc_refuses(
    message: str, expected: str, builds: Builds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_inline(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr("torch.utils.cpp_extension.load_inline", load_inline)
    with pytest.raises(RuntimeError, match=expected):
        load(SMALL, tmp_path / "exported_small.py")
    assert not list((tmp_path / "extensions").rglob("complete"))


def test_everything_of_a_file_is_compiled_when_it_is_imported(builds: Builds, tmp_path: Path) -> None:
    """For each of its convolutions; the constructor finds them."""
    module: Any = load(text_of("kb86"), tmp_path / "exported_two.py")
    assert len(builds) == 2
    module.ModelNew()
    assert len(builds) == 2
