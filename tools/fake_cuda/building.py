"""Compiles libraries of C, each once: they are kept in the developers' cache under what they are made of."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpu_emulator.toolchain import cache_dir

_FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")


def build(name: str, sources: Iterable[Path], flags: Sequence[str] = ()) -> Path:
    """The path of a library with this name. Of the sources, those that are no C are only looked at: headers."""
    sources = sorted(sources)
    digest = hashlib.sha256(" ".join((*_FLAGS, *flags)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    target = cache_dir() / "pretended-cuda" / digest.hexdigest()[:16] / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / name
            code = [str(source) for source in sources if source.suffix == ".c"]
            command = ["gcc", *_FLAGS, *flags, *code, f"-Wl,-soname,{name}", "-o", str(built)]
            subprocess.run(command, check=True)
            built.rename(target)
    return target
