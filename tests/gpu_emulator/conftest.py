"""Compiling CUDA for the emulator's own tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest


@cache
def compile_cuda(source: str, arch: str = "sm_70") -> bytes:
    core = pytest.importorskip("cuda.core")
    options = core.ProgramOptions(arch=arch, std="c++17")
    code = core.Program(source, "c++", options).compile("cubin").code
    return bytes(code)


@pytest.fixture(scope="session")
def nvrtc() -> Callable[..., bytes]:
    """CUDA C++ to a cubin: ``nvrtc(source)`` for sm_70, ``nvrtc(source, arch)`` for another."""
    return compile_cuda
