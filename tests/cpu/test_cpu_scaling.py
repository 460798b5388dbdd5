"""Time and memory per pixel of large images are those of small ones.

Memory is checked on every change. Time depends on the machine's load, so it is checked with ``POLYCONV_NIGHTLY=1``
only.

Each measurement has its own process: only there is the peak memory meaningful and the output pool empty.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fresh import run_fresh
from nightly import NIGHTLY, nightly
from polyconv import dispatch
from polyconv.arguments import Geometry
from polyconv.cpu import native
from polyconv.measure.timing import interleaved

pytestmark = pytest.mark.skipif(not native.is_available(), reason="PyTorch's kernels are not ours to judge")

PASSES = ("fprop", "dgrad", "wgrad")
SIDES = (128, 512, 1024)
LARGEST = 4096
GROWTH = 1.15
"""Largest time per output pixel, relative to the smallest image."""
SCRATCH = 64 * 2**20
"""Largest memory besides the tensors [bytes]."""
SLACK = 16 * 2**20
"""Largest difference of the scratch memory of two images [bytes]: allocators keep some freed memory."""
SPEEDUP = 1.8
"""Smallest speedup with two threads."""


# ---- the measuring process


def call(kind: str, side: int) -> tuple[Callable[[], Tensor], int]:
    """One pass of a 5x9 kernel, dilated 2x3, 32 to 64 channels, on a square image; and the output's pixels."""
    geometry = Geometry(padding=(2, 2, 4, 4), dilation=(2, 3))
    x, w = torch.randn(1, 32, side, side), torch.randn(64, 32, 5, 9) * 0.02
    out = geometry.out_size((side, side), (5, 9))
    pixels = out[0] * out[1]
    if kind == "fprop":
        return lambda: dispatch.fprop(x, w, None, *geometry), pixels
    dy = torch.randn(1, 64, *out)
    if kind == "dgrad":
        return lambda: dispatch.dgrad(dy, w, x.shape, False, *geometry), pixels
    return lambda: dispatch.wgrad(dy, x, w.shape, False, False, *geometry)[0], pixels


def memory(key: str) -> int:
    """Memory of this process [bytes]: ``VmRSS`` now, ``VmHWM`` at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measured(kind: str, side: int, threads: int, repeats: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        call(kind, 64)[0]()  # load code, pools and threads before memory is counted
        run, pixels = call(kind, side)
        before = memory("VmRSS")
        result = run()
        scratch = memory("VmHWM") - before - result.numel() * result.element_size()
        del result
        best = interleaved({"ours": run}, repeats)["ours"].best if repeats else 0.0
    return {"scratch": max(scratch, 0), "seconds_per_pixel": best / pixels}


# ---- the checks


def measure(kind: str, side: int, *, threads: int = 1, repeats: int = 0) -> dict[str, float]:
    """``scratch`` [bytes] and ``seconds_per_pixel``. Huge pages only for timing: they round memory up."""
    found: dict[str, float] = run_fresh(
        measured, kind, side, threads, repeats, THP_MEM_ALLOC_ENABLE="1" if repeats else "0"
    )
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("kind", PASSES)
def test_scratch_memory_is_constant(kind: str) -> None:
    sides = (*SIDES, LARGEST) if NIGHTLY and kind == "fprop" else SIDES
    scratch = {side: measure(kind, side)["scratch"] for side in sides}
    words = ", ".join(f"{side}²: {size / 2**20:.0f} MiB" for side, size in scratch.items())
    assert max(scratch.values()) <= SCRATCH, words
    assert scratch[sides[-1]] - scratch[sides[1]] <= SLACK, words


@nightly
@pytest.mark.parametrize("kind", PASSES)
def test_time_per_pixel_does_not_grow(kind: str) -> None:
    sides = (*SIDES, LARGEST) if kind == "fprop" else SIDES
    taken = {side: measure(kind, side, repeats=20 if side <= 512 else 5)["seconds_per_pixel"] for side in sides}
    words = ", ".join(f"{side}²: {seconds * 1e9:.0f} ns" for side, seconds in taken.items())
    assert max(taken.values()) <= GROWTH * taken[sides[0]], words


@nightly
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.parametrize("kind", PASSES)
def test_two_threads(kind: str) -> None:
    one, two = (measure(kind, 1024, threads=count, repeats=7)["seconds_per_pixel"] for count in (1, 2))
    assert one / two >= SPEEDUP, f"{one / two:.2f} times as fast as one"
