"""What every family of kernels offers the planner: a module with ``candidates(problem)`` and ``all_kernels()``.

A candidate is a kernel (or a chain of them) with its template arguments settled and nothing else. It can be asked about
any problem whether it takes it, how far it would stray, how much work it would be (from which plan/cost.py knows what
it costs), and at last what to launch. Only the one that is chosen is asked that, and its launches are made of the tasks
that it was weighed by. So the planner, the exporter and the tests treat all kernels alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..problem import Problem
from ..select import Weighable
from .plan import Schedule, Task


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
