"""Run a command with sanitized native code: ``python csrc/sanitize.py address,undefined pytest ...``.

The modules are built in separate folders (csrc/build.py --sanitize), and every Python process that the command starts
imports them instead of those in place; likewise the emulator (tools/gpu_emulator). The first report ends its process.

    python csrc/sanitize.py address,undefined pytest -n 2 tests/cpu/test_cpu_native.py tests/gpu_emulator
    python csrc/sanitize.py address,undefined python tools/fuzz
    OMP_NUM_THREADS=1 python csrc/sanitize.py thread python tools/fuzz

AddressSanitizer checks this project's code and its calls of libc, not torch's accesses to tensors. Scratch memory and
pooled outputs are announced to it (csrc/cpu/common/sanitizing.h). Leaks are not reported, because Python and torch are
not built for it.

ThreadSanitizer does not see the barriers of torch's OpenMP, so with several OpenMP threads it would report every result
that one thread passes to another: set OMP_NUM_THREADS=1 and start threads in Python. It then checks this project's
accesses to shared memory (the output pool, caches, statics) and locks of libc and libstdc++, but no races within torch
or Python alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from build import COUNTERS, PARTS, VARIANTS, build, compiler

RUNTIMES = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}

# sitecustomize.py of every Python process with this folder on its path: redirects the imports of some modules.
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

# False positives: torch and its libraries were not compiled with ThreadSanitizer, so their locks are half visible.
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
    """Environment of a process that loads ``modules``: preloaded runtimes, and the paths of the modules by name."""
    folder = next(iter(modules.values())).parent / "python"
    folder.mkdir(exist_ok=True)
    places = {name: str(path) for name, path in modules.items()}
    (folder / "sitecustomize.py").write_text(REDIRECTION.format(modules=places))
    (folder / "suppressions").write_text(SUPPRESSIONS)
    preloaded = [_library(name) for name in (*RUNTIMES[sanitizers], "libstdc++.so")]
    # The runtime intercepts dlopen and does not know the search path of the calling library.
    libraries = [str(found) for found in Path(torch.__file__).parents[1].glob("nvidia/*/lib")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(preloaded),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [*libraries, os.environ.get("LD_LIBRARY_PATH")])),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])),
        "PYTHONMALLOC": "malloc",  # Python's own pools hide the bounds of objects
        "GPU_EMULATOR_SANITIZE": sanitizers,
        # handle_segv=2: even if Python's faulthandler installs a handler
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:handle_segv=2:handle_sigfpe=2",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:abort_on_error=1",
        "TSAN_OPTIONS": f"suppressions={folder}/suppressions:ignore_noninstrumented_modules=1:halt_on_error=1:"
        "die_after_fork=0",
    }


def _library(name: str) -> str:
    """Path of a compiler library that has to be preloaded."""
    asked = subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return str(Path(asked.stdout.strip()).resolve())


def main() -> int:
    sanitizers, command = "".join(sys.argv[1:2]), sys.argv[2:]
    known = [name for name in VARIANTS if name != COUNTERS]
    if sanitizers not in known or not command:
        sys.exit(f"usage: python csrc/sanitize.py {{{' | '.join(known)}}} COMMAND ...")
    modules = {f"polyconv.{part}._native": build(part, variant=sanitizers) for part in PARTS}
    started = environment(sanitizers, modules)
    # Before the command, whose time limits do not include a compilation.
    subprocess.run([sys.executable, "-c", "from gpu_emulator import _core; _core.library()"], env=started)
    # No address space randomisation: the runtime's shadow memory needs fixed addresses, also in threads and forks.
    return subprocess.run(["setarch", "-R", *command], env=started).returncode


if __name__ == "__main__":
    sys.exit(main())
