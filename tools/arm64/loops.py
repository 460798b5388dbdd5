"""Judges the main loops of the NEON kernels by llvm-mca: ``python tools/arm64/loops.py``.

    python csrc/build.py                       first, with the cross compiler (CONTRIBUTING.md); or python tools/arm64
    python tools/arm64/loops.py                a Markdown table; status 1 if a loop is below its limit
    python tools/arm64/loops.py --show SYMBOL  the instructions of loops in functions whose names contain SYMBOL

A figure is the share of a core's peak of multiply-adds that a loop reaches, with all data in L1 and branches predicted.
llvm-mca's models are those of LLVM 19 (Debian: llvm-19). They count what a core dispatches, not what it decodes, so the
number of instructions that it decodes per cycle, from its manual, limits a loop as well. LLVM has one model for Apple's
cores, made for the A7 of 2013: two multiply-adds per cycle, three of those by a lane, where the M1 has four. So that
column is shown and not judged. Caches, prefetches and memory are absent.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.85
CORES = {"neoverse-n1": 4, "neoverse-v1": 8, "neoverse-v2": 8, "apple-m1": 6}
"""Instructions that a core decodes per cycle."""
JUDGED = ("neoverse-n1", "neoverse-v1", "neoverse-v2")
_ITERATIONS = 200
_BRANCH = re.compile(r"^(b\.\w+|b|cbn?z|tbn?z)\s+(?:.*,\s*)?0x([0-9a-f]+) <")


@dataclass(frozen=True)
class Kernel:
    """A function of an object file, with the template arguments for which most work is done."""

    name: str
    source: str
    symbol: str
    limit: float = LIMIT
    why: str = ""
    """What a lower limit is due to."""


KERNELS = (
    Kernel("tile lanes, 8 channels x 3 vectors", "tile_lanes/schemes_square", "ComputeTile<3, false>"),
    Kernel("tile lanes, nested", "tile_lanes/schemes_long", "ComputeTile<3, true>"),
    Kernel("tile lanes, 8 x 2", "tile_lanes/schemes_square", "ComputeTile<2, false>"),
    Kernel("channel lanes, direct, 7 pixels x 3 vectors", "channel_lanes/forward", "SumChannels<7, 3, true>"),
    Kernel("channel lanes, transformed, 5 x 4", "channel_lanes/forward", "SumChannels<5, 4, false>"),
    Kernel("channel lanes, transformed, 7 x 3", "channel_lanes/forward", "SumChannels<7, 3, false>"),
    Kernel("weight gradient, 8 channels x 3 vectors", "channel_lanes/gradient_square", "SumTile<8, 3>"),
    Kernel(
        "weight gradient, 4 x 3", "channel_lanes/gradient_square", "SumTile<4, 3>", 0.7, "12 sums wait for each other"
    ),
    Kernel("pointwise, 5 pixels x 4 vectors", "pointwise/pointwise", "SumTile<5, 4,"),
    Kernel("pointwise, 7 x 3", "pointwise/pointwise", "SumTile<7, 3,"),
    Kernel("pointwise, 9 x 2", "pointwise/pointwise", "SumTile<9, 2,"),
    Kernel("depthwise rows, 3x3", "depthwise/depthwise", "ComputeTaps<4, 3>"),
    Kernel(
        "depthwise rows, 5x5", "depthwise/depthwise", "ComputeTaps<4, 5>", 0.84, "three loads for four multiply-adds"
    ),
    Kernel("depthwise rows, any taps", "depthwise/depthwise", "ComputeTaps<4, 0>"),
    Kernel("depthwise channels_last, 3x3, 8 pixels", "depthwise/depthwise", "Compute<3, 1, 1, 2, 8, true>"),
    Kernel("depthwise planes, 16 vectors", "depthwise/depthwise", "SumTaps<16>", 0.55, "a load per multiply-add"),
    Kernel("depthwise weight gradient, 5 x 4 taps", "depthwise/depthwise", "AddGradients<5, 4>"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=Path, help="folder of the objects; default: that of csrc/build.py")
    parser.add_argument("--show", metavar="SYMBOL", help="print the loops of kernels whose symbols contain this")
    arguments = parser.parse_args()
    build = Path(os.environ.get("POLYCONV_BUILD_DIR") or ROOT / "build")
    objects = arguments.objects or build / "cpu-aarch64"
    if arguments.show:
        for kernel in KERNELS:
            if arguments.show in kernel.symbol:
                print(f"# {kernel.name}", *loop_of(objects, kernel), sep="\n")
        return 0
    print(f"| loop | multiply-adds | instructions | {' | '.join(CORES)} |\n| --- |" + " --- |" * (len(CORES) + 2))
    low = [kernel.name for kernel in KERNELS if not _print_row(objects, kernel)]
    if low:
        print(f"below the limit: {'; '.join(low)}", file=sys.stderr)
    return 1 if low else 0


def _print_row(objects: Path, kernel: Kernel) -> bool:
    loop = loop_of(objects, kernel)
    count = sum(map(_is_product, loop))
    shares = [least_cycles(loop, core) / cycles(loop, core) for core in CORES]
    name = f"{kernel.name} ({kernel.why})" if kernel.why else kernel.name
    cells = [name, str(count), str(len(loop)), *(f"{share:.0%}" for share in shares)]
    print(f"| {' | '.join(cells)} |", flush=True)
    return min(share for core, share in zip(CORES, shares, strict=True) if core in JUDGED) >= kernel.limit


def _is_product(instruction: str) -> bool:
    return instruction.startswith("fmla")


def loop_of(objects: Path, kernel: Kernel) -> list[str]:
    """Instructions of the innermost loop with most multiply-adds, in the longest instance of the function."""
    found = [function for name, function in functions(objects / f"{kernel.source}.o") if kernel.symbol in name]
    if not found:
        sys.exit(f"{kernel.source}.o has no function {kernel.symbol}")
    places, texts = zip(*max(found, key=len), strict=True)
    loops = []
    for last, text in enumerate(texts):
        branch = _BRANCH.match(text)
        if branch and int(branch[2], 16) in places[:last]:
            loops.append(range(places.index(int(branch[2], 16)), last + 1))
    innermost = [a for a in loops if not any(b != a and a.start <= b.start and b.stop <= a.stop for b in loops)]
    if not innermost:
        sys.exit(f"{kernel.symbol} in {kernel.source}.o has no loop")
    best = max(innermost, key=lambda loop: sum(_is_product(texts[i]) for i in loop))
    return [texts[i] for i in best]


@cache
def functions(target: Path) -> tuple[tuple[str, list[tuple[int, str]]], ...]:
    """Functions of an object by their names, each as addresses and instructions."""
    command = ["llvm-objdump-19", "-d", "--no-show-raw-insn", "-C", str(target)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: list[tuple[str, list[tuple[int, str]]]] = []
    for line in told.splitlines():
        if head := re.match(r"^[0-9a-f]+ <(.*)>:$", line):
            found.append((head[1], []))
        elif (row := re.match(r"^\s*([0-9a-f]+):\s+(.*)$", line)) and found:
            found[-1][1].append((int(row[1], 16), row[2].split("//")[0].strip().replace("\t", " ")))
    return tuple(found)


def cycles(loop: list[str], core: str) -> float:
    """Estimated cycles of one iteration."""
    lines = [re.sub(r"0x[0-9a-f]+ <.*>$", "top", line) for line in loop]
    return max(_cycles("\n".join(["top:", *lines]), core), len(lines) / CORES[core])


def least_cycles(loop: list[str], core: str) -> float:
    """Estimated cycles of the multiply-adds alone, with none waiting for another."""
    products = ["v31.s[0]" if "[" in text else "v31.4s" for text in loop if _is_product(text)]
    times = 1 + 96 // len(products)
    lines = [f"fmla v{i % 24}.4s, v30.4s, {factor}" for i, factor in enumerate(products * times)]
    return _cycles("\n".join(["top:", *lines]), core) / times


@cache
def _cycles(text: str, core: str) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".s") as file:
        file.write(text + "\n")
        file.flush()
        options = [f"-mcpu={core}", f"-iterations={_ITERATIONS}"]
        ran = subprocess.run(["llvm-mca-19", "-mtriple=aarch64", *options, file.name], capture_output=True, text=True)
    if ran.returncode != 0:
        sys.exit(ran.stderr)
    return int(re.search(r"Total Cycles:\s+(\d+)", ran.stdout)[1]) / _ITERATIONS  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
