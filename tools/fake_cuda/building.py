"""Compiles C libraries into the developers' cache, under a hash of sources and flags."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpu_emulator.toolchain import cache_dir

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")


def build(name: str, sources: Iterable[Path], flags: Sequence[str] = ()) -> Path:
    """Path of a library with this name. Sources that are not C files, such as headers, are only hashed."""
    sources = sorted(sources)
    digest = hashlib.sha256(" ".join((*_FLAGS, *flags)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    target = cache_dir() / "fake-cuda" / digest.hexdigest()[:16] / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / name
            code = [str(source) for source in sources if source.suffix == ".c"]
            command = ["gcc", *_FLAGS, *flags, *code, f"-Wl,-soname,{name}", "-o", str(built)]
            subprocess.run(command, check=True)
            built.rename(target)
    return target
