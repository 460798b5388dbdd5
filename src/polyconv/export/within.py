"""A fast way inside an exported file: only where its error is known to be within the tolerance.

The error of a fast algorithm was predicted when the file was written, and the error model stays behind. Whoever calls
the file with a longer sum, or with another kernel, gets direct summation, the next way of the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

from ..plan.plan import Schedule
from ..problem import Extents, Pass, Problem


class Launcher(Protocol):
    """What is left of a way once it has been chosen."""

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot compute this problem, or None."""

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The launches."""


def summed(problem: Problem) -> int:
    """What one element of the result sums over, beside taps: channels, or pixels of all images."""
    c, k = problem.channels_per_group
    if problem.kind is Pass.WGRAD:
        return problem.batch * prod(problem.out_size)
    return k if problem.kind is Pass.DGRAD else c


@dataclass(frozen=True)
class Within:
    """A way for sums no longer than those it was chosen for."""

    way: Launcher
    kernel: Extents
    stride: Extents
    dilation: Extents
    longest: int
    """The largest :func:`summed`."""

    def refusal(self, problem: Problem) -> str | None:
        if (problem.kernel, problem.stride, problem.dilation) != (self.kernel, self.stride, self.dilation):
            return "its error was predicted for another kernel"
        if summed(problem) > self.longest:
            return f"its error was predicted for sums over {self.longest}, not {summed(problem)}"
        return self.way.refusal(problem)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        return self.way.schedule(problem, sms, workspace)
