"""Cross-builds the wheel for ARM64 and runs it under qemu, with torch's wheel for that processor.

    python tools/arm64                  the compiler, then the checks of program.py, with 300 random convolutions
    python tools/arm64 --seconds 3600   more of them
    python tools/arm64 --count          instructions that some layers execute, by polyconv and by torch
    python tools/arm64 COMMAND ...      a command of polyconv: calibrate --seconds 1 -o profile.json

CXX names another cross compiler: "clang++ --target=aarch64-linux-gnu".

Debian's packages of the cross compiler and of qemu must be installed (g++-aarch64-linux-gnu, qemu-user-static).
Everything else is fetched and kept in the developers' cache: Python of Debian 12 for ARM64 and torch, 1 GB. Only
correctness is checked: an emulator's times say nothing about a processor's, and numbers of instructions little.
Counting them takes the package qemu-user, whose qemu loads plugins.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from export_check.toolchains import fetch_debian
from fake_cuda.environment import run
from gpu_emulator.toolchain import ToolchainError, cache_dir, lock

ROOT = Path(__file__).resolve().parents[2]
CROSS = "aarch64-linux-gnu-"
TORCH = "2.13.0"
PYTHON = "3.11"
"""Debian 12's."""
_DEBIAN = (
    f"python{PYTHON}-minimal libpython{PYTHON}-minimal libpython{PYTHON}-stdlib libc6 libstdc++6 libgcc-s1 zlib1g "
    "libexpat1 libffi8 libbz2-1.0 liblzma5 libssl3 libuuid1 libsqlite3-0"
)
_PYTHON = f"torch=={TORCH} numpy filelock typing-extensions sympy mpmath networkx jinja2 markupsafe fsspec"
_CUDA = "nvidia-cuda-runtime>=13,<14"
"""The only library of CUDA that torch calls when it is imported."""
_CPUINFO = "processor\t: {}\nFeatures\t: fp asimd atomics fphp asimdhp asimddp\nCPU implementer\t: 0x41\n" + (
    "CPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n"
)
"""A Neoverse N1. torch's own detection crashes on the file of an x86-64 machine."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--convolutions", type=int, default=300, help="random ones, in three passes; default: %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="processor time of others after them; default: none")
    parser.add_argument("--count", action="store_true", help="count instructions instead")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="polyconv's command to run instead")
    arguments = parser.parse_args()
    static, dynamic = map(shutil.which, ("qemu-aarch64-static", "qemu-aarch64"))
    emulator = dynamic if arguments.count else static or dynamic
    if emulator is None or shutil.which(shlex.split(compiler())[0]) is None:
        package = "qemu-user" if arguments.count else "qemu-user-static"
        raise ToolchainError(f"needs a cross compiler and qemu: apt-get install g++-aarch64-linux-gnu {package}")
    machine = emulated_machine()
    with tempfile.TemporaryDirectory() as package:
        build(machine, Path(package))
        digests = Path(package) / "digests.json"
        module, call = "arm64.program", f"main({arguments.convolutions}, {arguments.seconds}, {str(digests)!r})"
        if arguments.command:
            module, call = "polyconv.cli", f"main({arguments.command})"
        options = ["-L", str(machine), "-cpu", "neoverse-n1"]
        if arguments.count:
            plugin = Path(package) / "count.so"
            source = Path(__file__).with_name("count.c")
            run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(plugin), str(source)])
            module, call = "arm64.counting", "main()"
            options += ["-plugin", str(plugin)]
        # Without CUDA's libraries, torch can be loaded only if functions are bound at their first call.
        program = f"import os, sys; sys.setdlopenflags(os.RTLD_LAZY); from {module} import main; sys.exit({call})"
        paths = [package, machine / "site", ROOT / "tools", ROOT / "tests"]
        variables = {"PYTHONPATH": ":".join(map(str, paths)), "LD_LIBRARY_PATH": str(machine / "empty")}
        variables["POLYCONV_CACHE_DIR"] = f"{package}/cache"
        settings = [word for name, value in variables.items() for word in ("-E", f"{name}={value}")]
        python = machine / "usr" / "bin" / f"python{PYTHON}"
        status = subprocess.run([emulator, *options, *settings, str(python), "-c", program]).returncode
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{children.ru_utime + children.ru_stime:.0f} s of processor time with the compiler's", flush=True)
        return status or compare(digests)


def compare(digests: Path) -> int:
    """Compares results of the emulated process with those of this machine, if it has SSE4; returns the exit status."""
    if not digests.exists() or platform.machine() != "x86_64":
        return 0
    variables = {**os.environ, "PYTHONPATH": ":".join(map(str, (ROOT / "src", ROOT / "tools")))}
    program = f"import sys; from arm64 import bits; sys.exit(bits.compare({str(digests)!r}))"
    return subprocess.run(
        [sys.executable, "-c", program], env=variables | {"POLYCONV_INSTRUCTION_SET": "sse4"}
    ).returncode


def compiler() -> str:
    return os.environ.get("CXX") or f"{CROSS}g++"


def build(machine: Path, package: Path) -> None:
    """Cross-build the wheel from a copy of the sources, and unpack it. Objects are kept in the build folder."""
    variables = {"CXX": compiler(), "POLYCONV_TORCH_DIR": str(machine / "site" / "torch")}
    variables |= {"POLYCONV_BUILD_DIR": os.environ.get("POLYCONV_BUILD_DIR") or str(ROOT / "build")}
    variables |= {"POLYCONV_BUILD_NATIVE": "1", "_PYTHON_HOST_PLATFORM": "linux-aarch64"}
    ignored = shutil.ignore_patterns(".*", "__pycache__", "_native*", "build", "dist", "docs", "tests")
    shutil.copytree(ROOT, package / "source", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "./source"]
    subprocess.run(command, env=os.environ | variables, cwd=package, check=True)
    (wheel,) = package.glob("*-linux_aarch64.whl")
    print(f"{wheel.stat().st_size:,} bytes  {wheel.name}", flush=True)
    shutil.unpack_archive(wheel, package, "zip")


def emulated_machine() -> Path:
    """Files of an ARM64 machine with Python and torch, which qemu prefers to this machine's of the same path."""
    folder = cache_dir() / f"arm64-torch-{TORCH}"
    with lock(cache_dir() / "arm64.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache_dir()) as scratch:
                _assemble(Path(scratch))
                os.rename(Path(scratch) / "root", folder)
    return folder


def _assemble(scratch: Path) -> None:
    root, site, cuda = scratch / "root", scratch / "root" / "site", scratch / "cuda"
    fetch_debian(scratch, root, _DEBIAN.split(), "main", architecture="arm64")
    platforms = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += ["--python-version", PYTHON, *(f"--platform={name}" for name in platforms)]
    run([*pip, "--target", str(site), *_PYTHON.split()])
    run([*pip, "--target", str(cuda), _CUDA])
    empty = root / "empty"
    empty.mkdir()
    shutil.copy2(next(cuda.rglob("libcudart.so.*")), empty)
    libraries = [path for path in root.rglob("*.so*") if path.is_file()]
    present = {path.name for path in libraries}
    for name in sorted(set().union(*map(_needed, libraries)) - present):
        compiler = [f"{CROSS}gcc", "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-x", "c", os.devnull]
        run([*compiler, "-o", str(empty / name)])
    processors = range(os.cpu_count() or 1)
    files = {f"sys/devices/system/cpu/{name}": f"0-{processors[-1]}\n" for name in ("possible", "present")}
    files["sys/devices/system/cpu/cpu0/regs/identification/midr_el1"] = "0x00000000413fd0c1\n"
    files["proc/cpuinfo"] = "".join(map(_CPUINFO.format, processors))
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def _needed(library: Path) -> list[str]:
    """Names of the libraries that a library is linked with."""
    told = subprocess.run([f"{CROSS}readelf", "--dynamic", str(library)], capture_output=True, text=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", told)


if __name__ == "__main__":
    sys.exit(main())
