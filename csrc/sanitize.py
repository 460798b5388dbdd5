"""Runs a command with native code that reports its mistakes: ``python csrc/sanitize.py address,undefined pytest ...``.

The native parts are built in folders of their own (csrc/build.py --sanitize), and every Python that the command starts
imports those instead of the ones in place; the emulator (tools/gpu_emulator) is built and loaded alike.
The first report ends the process that it is about. Examples:

    python csrc/sanitize.py address,undefined pytest -n 2 tests/cpu/test_cpu_native.py tests/gpu_emulator
    python csrc/sanitize.py address,undefined python tools/fuzz
    OMP_NUM_THREADS=1 python csrc/sanitize.py thread python tools/fuzz

AddressSanitizer sees our own code, and what it hands to functions of libc; not what torch does with tensors. Scratch
memory and pooled outputs are made known to it (csrc/cpu/common/sanitizing.h). Python and torch are not built to be
looked at for leaks, so leaks are not reported.

ThreadSanitizer does not see the barriers of the OpenMP that torch brings along, so with several OpenMP threads it would
report every result that one thread hands to another: set OMP_NUM_THREADS=1 and start threads in Python. It then sees
what our own code does with memory that threads share (the output pool, what is kept between calls, statics), and locks
of libc and libstdc++. What happens between threads in torch or Python alone it does not see.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from build import COUNTERS, PARTS, VARIANTS, build, compiler

RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}

# Before anything else in every Python that finds this folder on its path: some modules come from another place.
REDIRECTION = """\
import importlib.util
import sys

MODULES = {modules!r}


class Sanitized:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, MODULES[name]) if name in MODULES else None


sys.meta_path.insert(0, Sanitized)
"""

# Made-up races: torch and what it links were not compiled with ThreadSanitizer, so their locks are half visible.
SUPPRESSIONS = """\
race:libtorch
race:libc10
race:libgomp
race:libpython
race:python3
called_from_lib:libtorch_cpu.so
called_from_lib:libtorch_python.so
called_from_lib:libc10.so
called_from_lib:libgomp
"""


def environment(sanitizers: str, modules: dict[str, Path]) -> dict[str, str]:
    """What a process needs to load such modules: the runtime before all else, and where to find them, by name."""
    folder = next(iter(modules.values())).parent / "python"
    folder.mkdir(exist_ok=True)
    places = {name: str(path) for name, path in modules.items()}
    (folder / "sitecustomize.py").write_text(REDIRECTION.format(modules=places))
    (folder / "suppressions").write_text(SUPPRESSIONS)
    preloaded = [_library(name) for name in (*RUNTIMES[sanitizers], "libstdc++.so")]
    # A runtime that opens libraries in somebody's place does not know where that one would have looked.
    libraries = [str(found) for found in Path(torch.__file__).parents[1].glob("nvidia/*/lib")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*libraries, os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
        "PYTHONMALLOC": "malloc",  # Python's own pools hide the borders between objects
        "GPU_EMULATOR_SANITIZE": sanitizers,
        # 2: also where Python's faulthandler would like to have the signal
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:handle_segv=2:handle_sigfpe=2",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:abort_on_error=1",
        "TSAN_OPTIONS": f"suppressions={folder}/suppressions:ignore_noninstrumented_modules=1:halt_on_error=1:"
        "die_after_fork=0",
    }


def _library(name: str) -> str:
    """Where the compiler keeps a library that has to be loaded before Python starts."""
    asked = subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(asked.stdout.strip()).resolve())


def main() -> int:
    sanitizers, command = "".join(sys.argv[1:2]), sys.argv[2:]
    known = [name for name in VARIANTS if name != COUNTERS]
    if sanitizers not in known or not command:
        sys.exit(f"usage: python csrc/sanitize.py {{{' | '.join(known)}}} COMMAND ...")
    modules = {f"polyconv.{part}._native": build(part, variant=sanitizers) for part in PARTS}
    started = environment(sanitizers, modules)
    # Threads and forks find the runtime's shadow memory where it was put: the kernel must not shuffle addresses.
    return subprocess.run(["setarch", "-R", *command], env=started).returncode


if __name__ == "__main__":
    sys.exit(main())
