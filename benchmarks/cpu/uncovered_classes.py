"""Classes of convolutions that few networks have, after ``polyconv.replace`` and before, with PyTorch against itself.

    python benchmarks/cpu/uncovered_classes.py                     # every class, one thread: some minutes
    python benchmarks/cpu/uncovered_classes.py depthwise --all     # classes with this word; PyTorch's plans, too

Profiles of processors are made of layers of real networks, so most of these lie far from everything that was measured:
long kernels over one axis, large ones over two, few or many channels, tiny and huge images, large batches, transposed
convolutions with large strides, three axes. There an estimate is worth little, and PyTorch's convolution is to run
unless polyconv's kernel is far ahead. Times are processor time; a class is *slower* where polyconv's ratio is below
0.95 by more than the noise.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import nn

import polyconv
from polyconv.cpu.engines import aten
from polyconv.measure.layers import has_any
from polyconv.tools.bench.ab_compare import AGAIN, OURS, TORCH, fight
from polyconv.tools.bench.ab_suites import call_of
from polyconv.tools.bench.cases import Case, Cases, Layout, Mode
from polyconv.util.console import print_table

LEAST = 0.95
"""A ratio below this, by more than the noise, is a loss."""
REPEATS = 9
ATTEMPTS = 3
"""Measurements of a class that seems slower: on a shared machine a single one may be noise."""


@dataclass(frozen=True)
class Class:
    """A kind of convolution: a torch module and its input shape."""

    name: str
    make: Callable[..., nn.Module]
    arguments: dict[str, Any]
    shape: tuple[int, ...]

    def module(self) -> nn.Module:
        return self.make(**self.arguments)


def classes() -> Iterator[Class]:
    """All of them."""
    for taps in (9, 16, 31):
        yield _one("Conv1d", f"depthwise k{taps}", 8, 8, taps, (4096,), groups=8)
    for taps, length in ((64, 4096), (256, 4096), (1024, 4096), (4096, 8192)):
        for channels in (2, 4, 8, 32):
            yield _one("Conv1d", f"depthwise k{taps}", channels, channels, taps, (length,), groups=channels)
        for c, k in ((1, 1), (1, 16), (8, 8), *([(32, 32)] if taps <= 256 else [])):  # larger ones take seconds a call
            yield _one("Conv1d", f"dense k{taps}", c, k, taps, (length,))
        if taps <= 1024:
            yield _one("Conv1d", f"grouped k{taps}", 16, 16, taps, (length,), groups=4)
    yield _one("Conv1d", "depthwise k1024, multiplier 4", 8, 32, 1024, (4096,), groups=8)
    yield _one("Conv1d", "dilated k9 by 512", 16, 16, 9, (8192,), dilation=512)
    yield _one("Conv1d", "frames k400 by 160", 1, 64, 400, (16000,), stride=160)
    yield _one("Conv1d", "frames k1024 by 256", 1, 513, 1024, (16384,), stride=256)
    for taps, stride, c, k in (
        *((512, 256, 16, 1), (400, 160, 64, 1), (1024, 256, 513, 1)),
        *((64, 32, 64, 32), (16, 8, 256, 128), (64, 1, 16, 1), (9, 1, 16, 1)),
    ):
        frames = 64 if stride > 1 else 4096
        yield _one("ConvTranspose1d", f"k{taps} by {stride}", c, k, taps, (frames,), stride=stride)
    for taps, stride, c, k, frames in (
        *((16, 8, 64, 1, 8), (16, 8, 64, 1, 32), (10, 2, 256, 1, 6), (4, 8, 16, 1, 15), (2, 2, 16, 8, 600)),
        *((8, 8, 4, 256, 9), (4, 4, 64, 3, 33), (7, 3, 256, 1, 685), (8, 1, 16, 2, 238)),
    ):
        yield _one(
            "ConvTranspose1d",
            f"few channels k{taps} by {stride}, {frames} frames",
            c,
            k,
            taps,
            (frames,),
            stride=stride,
        )
    for c, k, taps, length in ((1, 8, 5, 2000), (32, 2, 3, 600), (64, 1, 8, 273)):
        yield _one("Conv1d", f"few channels k{taps}", c, k, taps, (length,))
    for c, k, size in ((64, 1, 15), (128, 1, 6), (16, 8, 8)):
        yield _one("ConvTranspose2d", f"few channels 3x3 of {size}x{size}", c, k, 3, (size, size), padding=1)
    for c, k in ((64, 1), (64, 8), (128, 3)):
        yield _one("Conv2d", "few channels, patches of 2x2", c, k, 2, (32, 32), stride=2)
    yield _one("ConvTranspose1d", "depthwise k256 by 128", 8, 8, 256, (128,), stride=128, groups=8)
    for kernel in ((15, 15), (31, 31), (1, 129), (129, 1)):
        by = "x".join(map(str, kernel))
        yield _one("Conv2d", f"depthwise {by}", 8, 8, kernel, (160, 160), groups=8)
        yield _one("Conv2d", f"dense {by}", 4, 8, kernel, (144, 144))
    yield _one("Conv2d", "one channel", 1, 1, 3, (512, 512), padding=1)
    yield _one("Conv2d", "one channel 11x11", 1, 1, 11, (256, 256), padding=5)
    yield _one("Conv2d", "many channels, one pixel", 2048, 2048, 1, (1, 1))
    yield _one("Conv2d", "many channels in, few out", 1024, 8, 3, (8, 8), padding=1)
    yield _one("Conv2d", "tiny image", 64, 64, 3, (2, 2), padding=1)
    yield _one("Conv2d", "tiny image, large kernel", 64, 64, 7, (3, 3), padding=3)
    yield _one("Conv2d", "huge image", 3, 8, 3, (1536, 1536), padding=1)
    yield _one("Conv2d", "huge image, depthwise", 4, 4, 5, (1024, 1024), padding=2, groups=4)
    yield _one("Conv2d", "large batch", 16, 16, 3, (8, 8), batch=512, padding=1)
    yield _one("Conv2d", "large batch, depthwise", 32, 32, 3, (4, 4), batch=1024, padding=1, groups=32)
    yield _one("Conv2d", "many groups", 64, 64, 5, (32, 32), padding=2, groups=16)
    yield _one("Conv2d", "large stride", 16, 16, 16, (256, 256), stride=16)
    yield _one("ConvTranspose2d", "large stride", 32, 16, 16, (16, 16), stride=16)
    for kernel in (3, 5, 7):
        yield _one("Conv3d", f"depthwise {kernel}", 16, 16, kernel, (16, 20, 20), padding=kernel // 2, groups=16)
    for c, k in ((1, 16), (8, 8), (32, 32)):
        yield _one("Conv3d", "dense 3", c, k, 3, (12, 32, 32), padding=1)
    yield _one("Conv3d", "dense 3 by 2", 16, 16, 3, (16, 32, 32), padding=1, stride=2)
    yield _one("ConvTranspose3d", "k2 by 2", 32, 16, 2, (8, 16, 16), stride=2)
    yield _one("Conv3d", "dense 7x1x1", 16, 16, (7, 1, 1), (24, 16, 16), padding=(3, 0, 0))


def _one(
    module: str, name: str, c: int, k: int, kernel: Any, size: tuple[int, ...], *, batch: int = 1, **options: Any
) -> Class:
    arguments = {"in_channels": c, "out_channels": k, "kernel_size": kernel, **options}
    return Class(f"{module}, {name}, {c} to {k}", getattr(nn, module), arguments, (batch, c, *size))


@dataclass(frozen=True)
class Outcome:
    """Times of one class in one mode."""

    one: Class
    mode: Mode
    promised: float | None
    """Speedup of the forward pass according to ``explain``; None if ATen runs."""
    covered: bool
    ours: bool
    """True if any pass ran a polyconv kernel."""
    ratio: float
    noise: float
    """PyTorch against itself: distance from 1, as a ratio above 1."""

    @property
    def slower(self) -> bool:
        return self.ratio * self.noise < LEAST

    @property
    def wrong(self) -> bool:
        """True if the forward pass's promised speedup is wrong beyond the noise: an estimate by more than a factor of
        two; a lower bound (of a class that is not covered) at all."""
        if self.promised is None or self.mode is Mode.TRAINING:
            return False
        off = self.promised / self.ratio
        return max(off, 1 / off) > 2 * self.noise if self.covered else off > self.noise


def measured(one: Class, mode: Mode, repeats: int = REPEATS) -> Outcome:
    """Both in turn, on one thread; repeated if polyconv seems slower."""
    for _ in range(ATTEMPTS):
        found = _measured(one, mode, repeats)
        if not found.slower:
            break
    return found


def _measured(one: Class, mode: Mode, repeats: int) -> Outcome:
    torch.manual_seed(0)
    case = Case(mode, Layout.NCHW, one.shape[0], 1)
    found = fight(one.module(), torch.randn(one.shape), case, Cases(repeats=repeats), call_of)
    times = {name: timing.cpu for name, timing in found["timings"].items()}
    promised, covered = promise(one)
    aa = times[TORCH] / times[AGAIN]
    ours = any(aten.NAME not in plan for plan in found["plans"])
    ratio = sqrt(times[TORCH] * times[AGAIN]) / times[OURS]
    return Outcome(one, mode, promised, covered, ours, ratio, max(aa, 1 / aa))


def promise(one: Class) -> tuple[float | None, bool]:
    """The speedup that ``explain`` states for the forward pass."""
    twin = one.module()
    polyconv.replace(twin)
    said = str(polyconv.explain(twin.eval(), one.shape).convolutions[0].passes[0])
    found = re.search(r"(?:estimated|probably at least) ([\d.]+) times as fast as PyTorch's", said)
    return (float(found[1]) if found else None), "not covered" not in said


def lines(outcomes: Sequence[Outcome]) -> list[list[str]]:
    return [
        [
            found.one.name,
            str(found.mode),
            "yes" if found.covered else "no",
            "ours" if found.ours else "PyTorch's",
            "" if found.promised is None else f"{found.promised:.1f}",
            f"{found.ratio:.2f}",
            f"{found.noise:.2f}",
            "slower" if found.slower else "promise" if found.wrong else "",
        ]
        for found in outcomes
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="classes with one of these words in their names")
    parser.add_argument("--all", action="store_true", help="measure classes that PyTorch's convolution runs, too")
    parser.add_argument("--mode", choices=[str(mode) for mode in Mode], help="one of both")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"rounds (default: {REPEATS})")
    args = parser.parse_args()
    outcomes = []
    for one in classes():
        if not has_any(one.name, args.words):
            continue
        for mode in Mode:
            if args.mode is None or str(mode) == args.mode:
                found = measured(one, mode, args.repeats)
                if found.ours or args.all:
                    outcomes.append(found)
                    print(*lines([found])[0], sep=" | ", file=sys.stderr, flush=True)
    headers = ["class", "mode", "covered", "runs", "promised", "ratio", "A/A", "finding"]
    print_table("one thread, processor time", headers, lines(outcomes), left=4)
    slower = [found for found in outcomes if found.slower]
    print(f"{len(slower)} of {len(outcomes)} are slower than {LEAST} beyond the noise")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
