"""Lowering protocol: a problem rewritten into other problems, and the run of the first made from theirs.

Every rewrite has this form. :func:`polyconv.lowering.lower.lower` applies the unconditional ones before planning; the
two forms of a volume and the folded border are candidates that a planner weighs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..problem import Problem

if TYPE_CHECKING:  # planners import this module, and need no torch
    from torch import Tensor

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


IsAhead = Callable[[Lowering, "Lowering | None"], bool]
"""Whether a lowering is modelled to take no longer than another of its problem, or, with None, than the problem."""


class WeightPart(NamedTuple):
    """Part of a weight, made for one of a lowering's problems."""

    owner: Tensor
    """The weight itself, by which weight caches identify it."""
    name: bytes
    """Tells the parts of a weight apart."""
    make: Callable[[], Tensor]


def run_with_part(run: Run, tensors: dict[str, Tensor], part: WeightPart) -> None:
    """Run a problem with a part of a weight as ``w``. A backend's run with a method ``with_part`` makes the part only
    if its weight cache does not have it."""
    with_part: Callable[[dict[str, Tensor], WeightPart], None] | None = getattr(run, "with_part", None)
    if with_part is None:
        tensors["w"] = part.make()
        run(tensors)
    else:
        with_part(tensors, part)


class Rewrite:
    """Base of lowerings that follow from the problem alone. Not a dataclass: those make importing polyconv slower."""

    __slots__ = ("problem",)

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @property
    def extra_traffic(self) -> tuple[int, int]:
        """PyTorch's copies beside the problems: (bytes, launches)."""
        return 0, 0
