"""CUDA 11.8's compiler, to check that an exported file compiles with the oldest CUDA that it promises."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gpu_emulator.toolchain import cache_dir, write_atomically
from other_nvrtc import nvrtc

VERSION = "11.8.89"
OPTIONS = ("--gpu-architecture=compute_70", "--std=c++17", "--device-as-default-execution-space", "-rdc=true")


def warnings_of(source: str) -> str:
    """Compiler messages for the CUDA source of an exported file; errors fail here as well.

    Cached on disk by the hash of the source. NVRTC compiles host functions as device functions, which may call most of
    the runtime and launch kernels; the rest is declared for it.
    """
    key = hashlib.sha256(f"{VERSION}\0{OPTIONS}\0{_DECLARATIONS}\0{source}".encode()).hexdigest()
    directory = cache_dir() / "exported"
    directory.mkdir(exist_ok=True)
    kept: Path = directory / f"{key}.log"
    if not kept.exists():
        source = source.replace("#include <cstdio>\n", "").replace("static thread_local ", "static ")
        write_atomically(kept, nvrtc(VERSION).compile(_DECLARATIONS + source, "model.cu", OPTIONS).encode())
    return kept.read_text(encoding="utf-8")


_DECLARATIONS = """\
int snprintf(char* text, unsigned long size, const char* format, ...);
cudaError_t cudaSetDevice(int device);
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel kernel, cudaFuncAttribute attribute, int value) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel* kernel) {
  return cudaSuccess;
}
"""
