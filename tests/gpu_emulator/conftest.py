"""Compiling CUDA for the emulator's own tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest


@cache
def compile_cuda(source: str) -> bytes:
    core = pytest.importorskip("cuda.core")
    options = core.ProgramOptions(arch="sm_70", std="c++17")
    code = core.Program(source, "c++", options).compile("cubin").code
    return bytes(code)


@pytest.fixture(scope="session")
def nvrtc() -> Callable[[str], bytes]:
    """CUDA C++ to an sm_70 cubin."""
    return compile_cuda
