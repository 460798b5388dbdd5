"""Everything about the package is in pyproject.toml; this adds the native parts to a wheel.

These are the CPU kernels; what launches the kernels of a GPU, for which nothing of CUDA need be installed; the way of a
module to PyTorch's convolution; and the override of that, which serves only the torch version that it is built with.

They are built by csrc/build.py, as they are for development, where a machine (x86-64 with Linux, ARM64 with Linux or
macOS) has a C++20 compiler, Highway's headers (Debian: libhwy-dev; or their folder in CPATH) and torch:

    pip wheel . --no-build-isolation --no-deps

and the wheel then serves that torch version and later ones, and every Python from 3.10 on. Where one of them is missing
(in an isolated build there is no torch) the wheel is pure Python, and says so. POLYCONV_BUILD_NATIVE=1 makes a missing
part an error, POLYCONV_BUILD_NATIVE=0 leaves all out. On macOS, where they
have not run yet, they are built only with 1.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


class BuildNative(build_ext):
    def build_extension(self, ext: Extension) -> None:
        part = ext.name.split(".")[1]
        runpy.run_path("csrc/build.py")["build"](part, Path(self.get_ext_fullpath(ext.name)))


def missing() -> str | None:
    """What the native kernels cannot be built without, or None."""
    if sys.platform not in ("linux", "darwin"):
        return f"Linux or macOS, and this is {sys.platform}"
    if sys.platform == "darwin" and os.environ.get("POLYCONV_BUILD_NATIVE") != "1":
        return "POLYCONV_BUILD_NATIVE=1 on macOS, where they have not run yet"
    processors = ("x86_64", "aarch64") if sys.platform == "linux" else ("arm64",)
    if platform.machine() not in processors:
        return f"{' or '.join(processors)} as the processor of {sys.platform}, and this is {platform.machine()}"
    if find_spec("torch") is None:
        return "torch (build with --no-build-isolation)"
    if shutil.which((shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]) is None:
        return "a C++ compiler"
    includes = [Path("/usr/include"), Path("/usr/local/include"), *map(Path, os.environ.get("CPATH", "").split(":"))]
    if not any((folder / "hwy" / "highway.h").exists() for folder in includes):
        return "Highway's headers (Debian: apt-get install libhwy-dev; elsewhere name their folder in CPATH)"
    return None


def native() -> dict[str, Any]:
    return {
        # csrc/build.py lists the parts and their sources.
        "ext_modules": [
            Extension(f"polyconv.{part}._native", sources=[], py_limited_api=True)
            for part in runpy.run_path("csrc/build.py")["PARTS"]
        ],
        "cmdclass": {"build_ext": BuildNative},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


def options() -> dict[str, Any]:
    wanted = os.environ.get("POLYCONV_BUILD_NATIVE", "")
    if wanted == "0":
        return {}
    lacking = missing()
    if lacking is None:
        return native()
    if wanted == "1":
        sys.exit(f"the native CPU kernels need {lacking}")
    print(f"building without the native CPU kernels: they need {lacking}", file=sys.stderr)
    return {}


setup(**options())
