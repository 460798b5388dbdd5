"""Builds the native CPU backend in place, for development: ``python csrc/build.py [--counters]``.

The result, ``src/polyconv/cpu/_native.abi3.so``, is what an editable installation imports. Sources that changed are
compiled again, and those that include a header that did. The flags are those of the wheel.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "csrc" / "cpu").glob("*.cc"))
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vectors wider than the baseline never cross a boundary that is not inlined
    "-Wno-missing-field-initializers",
    "-DPy_LIMITED_API=0x030a0000",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
]


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def _is_stale(target: Path) -> bool:
    """Whether an object is older than anything that it was compiled from, by the list that the compiler wrote."""
    listed = target.with_suffix(".d")
    if not target.exists() or not listed.exists():
        return True
    sources = [Path(name) for name in listed.read_text().replace("\\\n", " ").split()[1:]]
    return any(not source.exists() or source.stat().st_mtime > target.stat().st_mtime for source in sources)


def build(counters: bool = False) -> Path:
    """Compiles what is out of date and links; gives the path of the module."""
    out = ROOT / "build" / ("cpu-counters" if counters else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    includes = [*include_paths(), sysconfig.get_paths()["include"], str(ROOT / "csrc" / "cpu")]
    flags = [*FLAGS, *(["-DPOLYCONV_STAGE_COUNTERS"] if counters else []), *(f"-isystem{i}" for i in includes[:-1])]
    flags.append(f"-I{includes[-1]}")
    stale: list[tuple[Path, Path]] = []
    objects: list[Path] = []
    for source in SOURCES:
        target = out / (source.stem + ".o")
        objects.append(target)
        if _is_stale(target):
            stale.append((source, target))

    def compile_one(pair: tuple[Path, Path]) -> int:
        command = [compiler(), *flags, "-MD", "-c", str(pair[0]), "-o", str(pair[1])]
        return subprocess.run(command, check=False).returncode

    # As many at a time as there are cores: a compiler takes a gigabyte. The largest sources first.
    stale.sort(key=lambda pair: "schemes" in pair[0].name or "channel" in pair[0].name, reverse=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        codes = list(pool.map(compile_one, stale))
    failed = [source.name for (source, _), code in zip(stale, codes, strict=True) if code != 0]
    if failed:
        sys.exit(f"could not compile {', '.join(failed)}")
    module = (out if counters else ROOT / "src" / "polyconv" / "cpu") / "_native.abi3.so"
    lib = Path(torch.__file__).parent / "lib"
    subprocess.run(
        [compiler(), "-shared", "-o", str(module), *map(str, objects), f"-L{lib}", "-ltorch", "-ltorch_cpu", "-lc10"],
        check=True,
    )
    return module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counters", action="store_true", help="count cycles per stage")
    print(build(parser.parse_args().counters))
