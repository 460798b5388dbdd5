"""Releases of NVRTC from PyPI, in addition to the environment's.

Each is installed into its own folder in the developers' cache, and called without NVIDIA's bindings, which know one
major version only.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from gpu_emulator.toolchain import cache_dir, lock
from polyconv.cuda.jit.compile import compiler_id


class NvrtcError(Exception):
    """An NVRTC error with its log."""


class Nvrtc:
    """One release: ``12.4.127``."""

    def __init__(self, version: str) -> None:
        self.version = version
        major, minor, _ = version.split(".")
        suffix = f"-cu{major}" if int(major) < 13 else ""
        self._package = f"nvidia-cuda-nvrtc{suffix}=={version}"
        folder = self._installed()
        compiler_id()  # loads the environment's own first: the bindings take the process's first library of that name
        ctypes.CDLL(str(next(folder.rglob(f"libnvrtc-builtins.so.{major}.{minor}"))))  # found by name from then on
        self._library = ctypes.CDLL(str(next(folder.rglob("libnvrtc.so.[0-9]*"))))

    def _installed(self) -> Path:
        folder: Path = cache_dir() / f"nvrtc-{self.version}"
        complete = folder / "complete"
        with lock(cache_dir() / f"nvrtc-{self.version}.lock"):
            if not complete.exists():
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]
                subprocess.run([*command, str(folder), self._package], check=True)
                complete.touch()
        return folder

    def compile(self, source: str, name: str, options: Iterable[str]) -> str:
        """Compiler messages for a source; :class:`NvrtcError` if it cannot be compiled."""
        return self._compiled(source, name, options)[0]

    def cubin(self, source: str, name: str, options: Iterable[str]) -> bytes:
        """Machine code for the architecture in the options."""
        return self._compiled(source, name, options, with_code=True)[1]

    def _compiled(self, source: str, name: str, options: Iterable[str], with_code: bool = False) -> tuple[str, bytes]:
        nvrtc, program = self._library, ctypes.c_void_p()
        self._check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
        given = [option.encode() for option in options]
        try:
            status = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode()
            if status != 0:
                raise NvrtcError(f"NVRTC {self.version} could not compile {name}:\n{log}")
            return log, self._read(program, "CUBIN") if with_code else b""
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
            _restore_locale()

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, text))
        return text.raw

    def _check(self, status: int) -> None:
        if status != 0:
            raise NvrtcError(f"NVRTC {self.version} failed with status {status}")


@cache
def nvrtc(version: str) -> Nvrtc:
    """Installed and loaded once."""
    return Nvrtc(version)


def _restore_locale() -> None:
    """NVRTC 11.8 leaves the calling thread in the C locale, where Python reads text files as ASCII; restore it."""
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.argtypes, uselocale.restype = [ctypes.c_void_p], ctypes.c_void_p
    uselocale(ctypes.c_void_p(-1))  # LC_GLOBAL_LOCALE
