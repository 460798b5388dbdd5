"""The weight gradient, and small or strided maps, with channels in the lanes of vectors (``csrc/cpu/channel_*``)."""

from __future__ import annotations

from collections.abc import Iterator

from ..problem import Problem
from .candidates import Candidate
from .device import CpuDevice


def candidates(problem: Problem, device: CpuDevice) -> Iterator[Candidate]:
    yield from ()
