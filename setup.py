"""Everything about the package is in pyproject.toml; this adds the native CPU backend to a wheel that asks for it.

    POLYCONV_BUILD_NATIVE=1 pip wheel . --no-build-isolation --no-deps

needs a C++20 compiler, Highway's headers (Debian: libhwy-dev) and the torch to build against; the wheel then serves
that torch version and later ones, and every Python from 3.10 on. Without the variable the wheel is pure Python.
"""

from __future__ import annotations

import os
import runpy
from typing import Any

from setuptools import setup


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


setup(**(native() if os.environ.get("POLYCONV_BUILD_NATIVE") == "1" else {}))
