"""Limit of a workload's batch by memory and by time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ..problem import Pass
from .workloads import Workload

MOST_MULTIPLICATIONS = 40e9
"""Most multiply-adds of one call, unless the caller sets the batch: a few seconds for the slowest candidate."""
SHARE_OF_MEMORY = 0.7
"""Usable share of the available memory; the rest is for workspaces and other programs."""
COPIES = 3
"""Copies of input and output: NCHW, channels_last, and the result or conversion of the running candidate."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Number of images that run, out of the workload's batch."""

    images: int
    whole: int
    reason: str = ""
    """Why the batch was reduced; empty if it was not."""

    def __str__(self) -> str:
        return str(self.whole) if self.images == self.whole else f"{self.images} of {self.whole}"


def cut_batch(workload: Workload, asked: int | None, available: int, most: float = MOST_MULTIPLICATIONS) -> Batch:
    """Choose the batch. ``asked`` replaces the limit of multiply-adds; ``available`` memory [bytes] limits both."""
    whole = workload.input[0]
    limits = [(whole, "")]
    if asked is not None:
        limits.append((asked, f"--batch {asked}"))
    else:
        per_image = with_batch(workload, 1).problem(Pass.FPROP).multiplications
        limits.append((int(most // per_image), f"at most {most / 1e9:g}e9 multiply-adds per call"))
    fitting = int(SHARE_OF_MEMORY * available // bytes_per_image(workload))
    limits.append((fitting, f"{available / 2**30:.1f} GiB of memory are available"))
    images, reason = min(limits, key=lambda limit: limit[0])
    images = max(images, 1)
    return Batch(images, whole, "" if images == whole else reason)


def with_batch(workload: Workload, images: int) -> Workload:
    """The workload with another batch."""
    return replace(workload, input=(images, *workload.input[1:]))


def bytes_per_image(workload: Workload) -> int:
    """Memory [bytes] per image in a benchmark, with the output's float64 reference."""
    problem = with_batch(workload, 1).problem(Pass.FPROP)
    x, y = prod(problem.x_shape), prod(problem.y_shape)
    return 4 * COPIES * (x + y) + 8 * max(x, y)


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory [bytes] available without swapping, by Linux's estimate; elsewhere 8 GiB are assumed."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * 2**30
