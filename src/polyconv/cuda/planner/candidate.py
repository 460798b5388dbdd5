"""Interface of a kernel family: a module with ``candidates(problem)`` and ``all_kernels()``, all instances they use.

A candidate is a kernel, or a chain of kernels, with fixed template arguments. For any problem it gives a refusal, the
expected error, the tasks (priced by cuda/planner/cost.py) and the launches. Launches are made for the chosen candidate
alone, from the tasks it was priced by. So the planner, the exporter and the tests treat all kernels alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from ...numerics.prediction import Way, direct_error, rounding_error
from ...problem import Problem
from ...selection import Weighable
from .plan import KernelSpec, Schedule, Task


class CudaCandidate(Weighable, Protocol):
    """One kernel, or a chain of kernels, with fixed template arguments."""

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot compute this problem, or None."""

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterable[Task]:
        """The launches of :meth:`schedule`, in counts."""

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """Launches for a device of ``sms`` multiprocessors and a workspace of ``workspace`` bytes."""

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        """Largest expected error of any element, relative to the output's scale."""


@runtime_checkable
class FastCandidate(Protocol):
    """A candidate with a fast algorithm, whose error depends on how the weights are spread over the taps."""

    def ways(self, problem: Problem) -> tuple[Way, ...]:
        """How the output maps are summed: one entry per kind of phase of a stride."""


class DirectCandidate:
    """A kernel, optionally with a reduction, that sums the products of the definition, which any tolerance allows."""

    direct = True

    @property
    def kernel(self) -> KernelSpec:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return self.kernel.symbol

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        """Lengths of the nested sums of an output element: products in sequence first, then such sums, and so on."""
        raise NotImplementedError

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return direct_error(problem, self.sums(problem, sms, workspace)) + rounding_error(problem)
