"""Everything about the package is in pyproject.toml; this adds the native CPU kernels to a wheel.

They are built where a C++20 compiler, Highway's headers (Debian: libhwy-dev) and torch are found:

    pip wheel . --no-build-isolation --no-deps

and the wheel then serves that torch version and later ones, and every Python from 3.10 on. Where one of them is missing
(in an isolated build there is no torch) the wheel is pure Python, and says so. POLYCONV_BUILD_NATIVE=1 makes a missing
part an error, POLYCONV_BUILD_NATIVE=0 leaves the kernels out.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from setuptools import setup


def missing() -> str | None:
    """What the native kernels cannot be built without, or None."""
    if find_spec("torch") is None:
        return "torch (build with --no-build-isolation)"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "a C++ compiler"
    includes = [Path("/usr/include"), Path("/usr/local/include"), *map(Path, os.environ.get("CPATH", "").split(":"))]
    if not any((folder / "hwy" / "highway.h").exists() for folder in includes):
        return "Highway's headers (Debian: apt-get install libhwy-dev)"
    return None


def native() -> dict[str, Any]:
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    build = runpy.run_path("csrc/build.py")
    extension = CppExtension(
        "polyconv.cpu._native",
        sources=[os.path.relpath(source) for source in build["SOURCES"]],
        # distutils gives the file that foreach_target.h includes again no folder of its own
        include_dirs=[os.path.abspath("csrc/cpu")],
        extra_compile_args=build["FLAGS"],
        py_limited_api=True,
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension},
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
