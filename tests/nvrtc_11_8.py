"""CUDA 11.8's own compiler, from PyPI, for one thing: that an exported file compiles with the oldest CUDA it promises.

The package is put into a folder of its own under the developers' cache: the environment has a newer NVRTC.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from volta.toolchain import cache_dir, lock, write_atomically

_PACKAGE = "nvidia-cuda-nvrtc-cu11==11.8.89"


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    directory = cache_dir() / "nvrtc-11.8"
    libraries = directory / "nvidia" / "cuda_nvrtc" / "lib"
    if not (libraries / "libnvrtc.so.11.2").exists():
        with lock(cache_dir() / "nvrtc-11.8.lock"):
            if not (libraries / "libnvrtc.so.11.2").exists():
                command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory)]
                subprocess.run([*command, _PACKAGE], check=True)
    ctypes.CDLL(str(libraries / "libnvrtc-builtins.so.11.8"))  # found by name from then on
    return ctypes.CDLL(str(libraries / "libnvrtc.so.11.2"))


def warnings_of(source: str) -> str:
    """What the compiler remarks on the CUDA source of an exported file. An error is one here too.

    Kept on disk by the hash of the source. NVRTC takes functions of the host for functions of the device, which may
    call most of the runtime and launch kernels; the rest is declared for it.
    """
    key = hashlib.sha256(f"{_PACKAGE}\0{_DECLARATIONS}\0{source}".encode()).hexdigest()
    directory = cache_dir() / "exported"
    directory.mkdir(exist_ok=True)
    kept: Path = directory / f"{key}.log"
    if not kept.exists():
        source = source.replace("#include <cstdio>\n", "").replace("static thread_local ", "static ")
        write_atomically(kept, _compile(_DECLARATIONS + source).encode())
    return kept.read_text(encoding="utf-8")


_DECLARATIONS = """\
int snprintf(char* text, unsigned long size, const char* format, ...);
cudaError_t cudaSetDevice(int device);
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute attribute, int value) {
  return cudaSuccess;
}
"""


def _compile(source: str) -> str:
    nvrtc = _library()
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"model.cu", 0, None, None))
    try:
        options = [
            b"--gpu-architecture=compute_70",
            b"--std=c++17",
            b"--device-as-default-execution-space",
            b"-rdc=true",
        ]
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        size = ctypes.c_size_t()
        _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        if status != 0:
            raise RuntimeError(f"NVRTC 11.8 could not compile the exported source:\n{log.value.decode()}")
        return log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        _restore_locale()


def _restore_locale() -> None:
    """NVRTC 11.8 leaves the calling thread in the C locale, where Python reads text files as ASCII; undo that."""
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.argtypes, uselocale.restype = [ctypes.c_void_p], ctypes.c_void_p
    uselocale(ctypes.c_void_p(-1))  # LC_GLOBAL_LOCALE


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"NVRTC failed with status {status}")
