"""Lowering protocol: a problem rewritten into other problems, and the run of the first made from theirs.

Every rewrite has this form. :func:`polyconv.lowering.lower.lower` applies the unconditional ones before planning; the
two forms of a volume and the folded border are candidates that a planner weighs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ..problem import Problem

if TYPE_CHECKING:  # planners import this module, and need no torch
    from ..backend import Run


class Lowering(Protocol):
    """A problem as other problems."""

    @property
    def problem(self) -> Problem:
        """The problem before the rewrite."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Distinct problems after the rewrite; empty if nothing is computed."""

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        """Build the run of :attr:`problem` from the runs of :attr:`problems`."""

    def in_words(self) -> str:
        """Text for ``explain``."""


class Rewrite:
    """Base of lowerings that follow from the problem alone. Not a dataclass: those make importing polyconv slower."""

    __slots__ = ("problem",)

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
