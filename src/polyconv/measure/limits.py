"""How many images of a workload's batch are run: as many as memory holds and patience bears."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ..problem import Pass
from .workloads import Workload

MOST_MULTIPLICATIONS = 40e9
"""Multiply-adds of one call, at most, unless the caller names a batch: a few seconds for the slowest candidate."""
SHARE_OF_MEMORY = 0.7
"""Of the memory that is available now; the rest is for the candidates' own scratch memory and for other programs."""
COPIES = 3
"""Of input and output: NCHW, channels_last, and what the running candidate returns or converts to."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The images that run, out of those that the workload has."""

    images: int
    whole: int
    reason: str = ""
    """Why not all of them; empty if all."""

    def __str__(self) -> str:
        return str(self.whole) if self.images == self.whole else f"{self.images} of {self.whole}"


def cut_batch(workload: Workload, asked: int | None, available: int, most: float = MOST_MULTIPLICATIONS) -> Batch:
    """The batch to run. ``asked`` replaces the limit of multiply-adds; memory (in bytes) limits both."""
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
    """The same workload on fewer images."""
    return replace(workload, input=(images, *workload.input[1:]))


def bytes_per_image(workload: Workload) -> int:
    """Memory that one image takes in the contest, the output's float64 reference included."""
    problem = with_batch(workload, 1).problem(Pass.FPROP)
    x, y = prod(problem.x_shape), prod(problem.y_shape)
    return 4 * COPIES * (x + y) + 8 * max(x, y)


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that programs can get without swapping, as Linux estimates them; elsewhere 8 GiB is assumed."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * 2**30
