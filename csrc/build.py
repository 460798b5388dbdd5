"""Build the native modules: ``python csrc/build.py`` in place, for development; setup.py for a wheel.

Modules, as an editable installation imports them: ``src/polyconv/cpu/_native.abi3.so``, the CPU kernels;
``src/polyconv/cuda/_native.abi3.so``, which launches GPU kernels and is built without CUDA;
``src/polyconv/dispatch/_native.abi3.so``, the passthrough cache; ``src/polyconv/runtime/_native.abi3.so``, the override
of ATen's convolution. Builds with cycle counters or sanitizers (``csrc/sanitize.py``) stay in the build folder. A
source is compiled again if it, a header that it includes, or the command changed. File times do not matter, so objects
survive a change of branch and serve copies of the sources. The compiler decides on the processor, x86-64 or ARM64
(aarch64), and on the system, Linux or macOS (darwin); modules for another machine than this one stay in the build
folder, too.

    POLYCONV_BUILD_DIR  folder of the objects; build/ beside csrc/ by default
    POLYCONV_TORCH_DIR  folder torch/ of another processor's wheel, for a cross compiler; the installed torch by default
    MAX_JOBS            number of parallel compilers; the number of cores by default
    CXX                 the compiler, possibly with arguments: "clang++ --target=aarch64-linux-gnu"; g++ by default
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import function_order

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("cpu", "cuda", "dispatch", "runtime")
"""Folders in csrc/, each the source of one module in the package's folder of that name."""
PYTHON = "-DPy_LIMITED_API=0x030a0000"
"""Python's stable interface, which later versions of Python have as well."""
STABLE = "-DTORCH_TARGET_VERSION=0x020b000000000000"
"""torch's stable interface, which later versions of torch have as well."""
WITH_TORCH = {"cpu": STABLE, "runtime": ""}
"""Parts that call torch, and the interface that they keep to: "runtime" serves only the torch that it is built with."""
LARGE = ("tile_lanes", "channel_lanes")
"""Folders whose sources compile longest: many schemes, for each instruction set."""
PER_CALL, SMALL = ("bindings", "runtime"), "-Os"
"""Folders of code that mostly runs once per call, which is compiled for size: 70 KB less in a wheel."""
BOUNDARIES = "-Wa,-mbranches-within-32B-boundaries"
"""From Skylake to Cascade Lake, a loop whose jump touches such a boundary is decoded in every iteration, which costs up
to a third of its speed, depending on its address. Not every assembler knows the option."""
UNSCHEDULED = "-fno-schedule-insns"
"""On ARM, gcc reorders instructions before it allocates registers: loads move up, and register tiles that fill all
registers are spilled in every step. clang has no such pass."""
NO_TABLES = ("-fno-asynchronous-unwind-tables", "-fno-dwarf2-cfi-asm")
"""Functions that no exception passes, which are most kernels, have no tables to unwind their frames. gcc leaves them
out only if it writes the tables itself, not the assembler."""
OF_PROCESSOR = {"x86_64": BOUNDARIES, "aarch64": UNSCHEDULED}
"""Processors that the modules are built for, each with an option for compilers that accept it."""
OF_SYSTEM = {
    # --as-needed drops unused libraries, which is not every linker's default.
    "linux": ["-shared", "-Wl,--as-needed"],
    # Python's functions are those of the program that loads the module.
    "darwin": ["-bundle", "-undefined", "dynamic_lookup"],
}
"""Systems that the modules are built for, each with the linker's options."""
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffunction-sections",  # for function_order
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vectors wider than the baseline are only passed to inlined functions
    "-Wno-missing-field-initializers",
]

COUNTERS = "counters"
SANITIZED = ["-O1", "-g1", "-fasynchronous-unwind-tables", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS"]
VARIANTS = {
    COUNTERS: ["-DPOLYCONV_STAGE_COUNTERS"],
    "address,undefined": [*SANITIZED, "-fsanitize=address,undefined,float-cast-overflow"],
    "thread": [*SANITIZED, "-fsanitize=thread"],
}


def compiler() -> list[str]:
    """The compiler's command."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


@cache
def target() -> tuple[str, str]:
    """Processor and system that the compiler builds for, as in :data:`OF_PROCESSOR` and :data:`OF_SYSTEM`."""
    command = [*compiler(), "-dumpmachine"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    name, system = _processor(told.partition("-")[0]), "linux" if "linux" in told else "darwin"
    if name not in OF_PROCESSOR or not any(word in told for word in ("linux", "darwin", "macos")):
        names = f"{' and '.join(OF_PROCESSOR)} with {' and '.join(OF_SYSTEM)}"
        sys.exit(f"{shlex.join(compiler())} compiles for {told}; the native modules are for {names}")
    return name, system


def _processor(name: str) -> str:
    return {"arm64": "aarch64"}.get(name, name)  # Apple's name


def _torch() -> Path:
    return Path(os.environ.get("POLYCONV_TORCH_DIR") or Path(torch.__file__).parent).resolve()


def build(part: str = "cpu", module: Path | None = None, variant: str | None = None) -> Path:
    """Compile stale sources, link, and return the path of the module. By default, variants and modules for another
    processor are linked beside their objects."""
    objects = Path(os.environ.get("POLYCONV_BUILD_DIR") or ROOT / "build").resolve()
    here = _processor(platform.machine()), sys.platform
    other = [name for name, own in zip(target(), here, strict=True) if name != own]
    objects /= "-".join([part, *other, *(variant.split(",") if variant else [])])
    objects.mkdir(parents=True, exist_ok=True)
    folder = objects if variant or other else ROOT / "src" / "polyconv" / part
    module = module or folder / "_native.abi3.so"
    more_flags = VARIANTS[variant] if variant else []
    sources = sorted(source.relative_to(ROOT) for source in (ROOT / "csrc" / part).rglob("*.cc"))
    _compile(part, sources, objects, more_flags)
    module.parent.mkdir(parents=True, exist_ok=True)
    # The module names torch's libraries without a path: torch is imported first and has loaded them.
    libraries = [f"-L{_torch() / 'lib'}", "-ltorch_cpu", "-lc10"] if part in WITH_TORCH else []
    linked = [str(_object(objects, source)) for source in sources]
    system = target()[1]
    command = [*compiler(), *more_flags, *OF_SYSTEM[system], *linked, *libraries]
    if variant or system != "linux":  # whose linker takes the script that orders functions
        subprocess.run([*command, "-o", str(module)], check=True)
        return module
    unordered, order = objects / "unordered.so", objects / "order.ld"
    subprocess.run([*command, "-o", str(unordered)], check=True)
    function_order.write_script(unordered, order)
    subprocess.run([*command, "-o", str(module), f"-Wl,-T,{order}"], check=True)
    return module


@cache
def _takes(flag: str) -> bool:
    """Whether the compiler accepts a flag, without a warning that it is of no use."""
    empty = [*compiler(), "-Werror", flag, "-x", "c++", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(empty, capture_output=True).returncode == 0


def _compile(part: str, sources: list[Path], objects: Path, more_flags: list[str]) -> None:
    headers = _torch() / "include"
    of_torch = [headers, headers / "torch" / "csrc" / "api" / "include"] if part in WITH_TORCH else []
    found = [Path(folder).resolve() for folder in (*of_torch, sysconfig.get_paths()["include"])]
    includes = [f"-isystem{folder}" for folder in found]
    # Paths enter the objects, through messages of failed assertions. They depend neither on the folder of the sources,
    # because our own are relative, nor on that of torch.
    includes += [f"-fmacro-prefix-map={folder}={folder.name}" for folder in found]
    of_compiler = filter(_takes, (OF_PROCESSOR[target()[0]], *NO_TABLES))
    flags = [flag for flag in (*FLAGS, *of_compiler, PYTHON, WITH_TORCH.get(part)) if flag]
    includes += ["-iquote", str(Path("csrc", part)), "-c"]

    def command_of(source: Path) -> list[str]:
        small = [SMALL] if source.parent.name in PER_CALL else []
        return [*compiler(), *flags, *small, *more_flags, *includes]

    def compile_one(source: Path) -> bool:
        target = _object(objects, source)
        target.parent.mkdir(parents=True, exist_ok=True)
        listed, key = target.with_suffix(".d"), target.with_suffix(".key")
        key.unlink(missing_ok=True)
        command = command_of(source)
        ran = subprocess.run([*command, str(source), "-o", str(target), "-MD", "-MF", str(listed)], cwd=ROOT)
        if ran.returncode == 0:
            key.write_text(_key(command, listed))
        return ran.returncode == 0

    stale = [source for source in sources if _is_stale(_object(objects, source), command_of(source))]
    # One job per core, because a compiler takes a gigabyte. The largest sources first.
    stale.sort(key=lambda source: source.parent.name in LARGE, reverse=True)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = int(os.environ.get("MAX_JOBS") or usable)
    with ThreadPoolExecutor(jobs) as pool:
        compiled = list(pool.map(compile_one, stale))
    failed = [source.name for source, well in zip(stale, compiled, strict=True) if not well]
    if failed:
        sys.exit(f"could not compile {', '.join(failed)}")


def _object(objects: Path, source: Path) -> Path:
    """Path of a source's object, in folders like those of the sources."""
    return (objects / Path(*source.parts[2:])).with_suffix(".o")


def _is_stale(target: Path, command: list[str]) -> bool:
    listed, key = target.with_suffix(".d"), target.with_suffix(".key")
    if not (target.exists() and listed.exists() and key.exists()):
        return True
    return key.read_text() != _key(command, listed)


def _key(command: list[str], listed: Path) -> str:
    """Hash of an object's inputs: the command, and the contents of every file in the compiler's dependency list."""
    names = listed.read_text().replace("\\\n", " ").split()[1:]
    parts = [*command, *(f"{name} {_contents(ROOT / name)}" for name in names)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _contents(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "absent"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawTextHelpFormatter,
    )
    variants = parser.add_mutually_exclusive_group()
    variants.add_argument(
        "--counters", action="store_const", const=COUNTERS, dest="variant", help="count cycles per stage"
    )
    sanitizers = [name for name in VARIANTS if name != COUNTERS]
    variants.add_argument(
        "--sanitize", choices=sanitizers, dest="variant", help="report mistakes: see csrc/sanitize.py"
    )
    variant = parser.parse_args().variant
    for part in PARTS:
        print(build(part, variant=variant))
