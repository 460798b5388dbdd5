"""Finds nvdisasm, and remembers what it said.

CUDA 13 dropped sm_70, so the disassembler must be older. One that runs with no CUDA installed lies inside the wheel
of triton 3.3.1.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

_WHEEL = "triton==3.3.1"
_MEMBERS = ("nvdisasm", "cuobjdump")


class ToolchainError(RuntimeError):
    """A tool is missing and could not be fetched, or failed."""


def cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    path = (Path(root) if root else Path.home() / ".cache") / "polyconv-dev"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file, so that parallel processes do a slow thing once."""
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, data: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def nvdisasm() -> Path:
    """The disassembler: $GPU_EMULATOR_NVDISASM, else the cached one, else the one of the triton wheel."""
    return _tool("nvdisasm", "GPU_EMULATOR_NVDISASM")


def cuobjdump() -> Path:
    return _tool("cuobjdump", "GPU_EMULATOR_CUOBJDUMP")


def _tool(name: str, variable: str) -> Path:
    chosen = os.environ.get(variable)
    if chosen:
        path = Path(chosen)
        if not os.access(path, os.X_OK):
            raise ToolchainError(f"{variable}={chosen} is not an executable file")
        return path
    directory = cache_dir() / "cuda-12.8"
    path = directory / name
    if not path.exists():
        directory.mkdir(exist_ok=True)
        with lock(directory / ".lock"):
            if not path.exists():
                _fetch_from_wheel(directory)
    return path


def _fetch_from_wheel(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", scratch, _WHEEL]
        result = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(scratch).glob("triton-*.whl"))
        if result.returncode != 0 or not wheels:
            raise ToolchainError(
                f"nvdisasm for sm_70 is needed and could not be fetched from the {_WHEEL} wheel. Set "
                f"GPU_EMULATOR_NVDISASM to an nvdisasm of CUDA 12.x, or make this work:\n"
                f"  {' '.join(command)}\n{result.stderr.strip()}"
            )
        with zipfile.ZipFile(wheels[0]) as archive:
            for member in _MEMBERS:
                temporary = Path(scratch) / member
                with archive.open(f"triton/backends/nvidia/bin/{member}") as source, open(temporary, "wb") as out:
                    shutil.copyfileobj(source, out)
                temporary.chmod(0o755)
                os.replace(temporary, directory / member)


def disassemble(code: bytes, arch: str) -> str:
    """SASS text of raw code, branch targets as addresses. Kept on disk by the hash of the code."""
    directory = cache_dir() / "sass"
    directory.mkdir(exist_ok=True)
    path = directory / f"{hashlib.sha256(code).hexdigest()}.{arch}.sass"
    try:
        text = path.read_text()
        if text.rstrip().endswith("//end"):
            return text
    except OSError:
        pass
    with tempfile.NamedTemporaryFile(dir=directory, suffix=".bin") as raw:
        raw.write(code)
        raw.flush()
        tool = nvdisasm()
        result = subprocess.run(
            [str(tool), "-b", arch.replace("_", "").upper(), raw.name], capture_output=True, text=True
        )
    if result.returncode != 0:
        raise ToolchainError(f"{tool} failed: {result.stderr.strip()}")
    text = result.stdout + "\n//end\n"  # a truncated file must not look complete
    write_atomically(path, text.encode())
    return text
