"""What every family of kernels offers the planner: a module with ``candidates(problem)`` and ``all_kernels()``.

A candidate is a kernel (or a chain of them) with its template arguments settled and nothing else. It can be asked about
any problem whether it takes it, how far it would stray, how much work it would be (from which plan/cost.py knows what
it costs), and at last what to launch. Only the one that is chosen is asked that, and its launches are made of the tasks
that it was weighed by. So the planner, the exporter and the tests treat all kernels alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from ..accuracy import Way, direct_error
from ..problem import Problem
from ..select import Weighable
from .plan import KernelSpec, Schedule, Task


class CudaCandidate(Weighable, Protocol):
    """One kernel, or a chain, with its template arguments."""

    def refusal(self, problem: Problem) -> str | None:
        """Why it cannot compute this problem, or None."""

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterable[Task]:
        """What :meth:`schedule` launches, in counts."""

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The launches, for a device of ``sms`` multiprocessors and scratch memory of ``workspace`` bytes."""

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        """The largest error of any element to be expected, relative to the output's scale."""


@runtime_checkable
class FastCandidate(Protocol):
    """One that sums output maps by a fast algorithm, whose error depends on how the weights are spread over taps."""

    def ways(self, problem: Problem) -> tuple[Way, ...]:
        """How it does."""


class DirectCandidate:
    """One kernel that sums the products of the definition, which any tolerance allows; it is called what its kernel is.

    A kernel may have others after it: one that adds up partial sums.
    """

    direct = True

    @property
    def kernel(self) -> KernelSpec:
        raise NotImplementedError

    @property
    def name(self) -> str:
        return self.kernel.symbol

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        """How one element of the result is summed: so many products in sequence, so many of these sums, and so on."""
        raise NotImplementedError

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return direct_error(problem, self.sums(problem, sms, workspace))
