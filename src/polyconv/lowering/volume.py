"""Plans of volumes (3-D) for any backend: :mod:`polyconv.lowering.volume_sum` and
:mod:`polyconv.lowering.volume_stack` lower them to 2-D problems, which are planned separately. :class:`WholeVolume` is
for kernels with three axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from ..numerics.prediction import Way
from ..problem import AXES, Problem, Shape, Strides
from .base import Lowering

if TYPE_CHECKING:  # planners import this module, and need no torch
    from ..backend import Run

WHOLE = "whole volumes"
"""Candidate name of :class:`WholeVolume`."""


class Call2d(Protocol):
    """One 2-D problem on views of the 3-D tensors."""

    @property
    def problem(self) -> Problem: ...


class Parts(Lowering, Protocol):
    """A 3-D problem as 2-D problems."""

    @property
    def name(self) -> str:
        """Candidate name; the candidates of the 2-D problems are chosen separately."""

    @property
    def axis(self) -> int:
        """Axis across which the volume is sliced."""

    @property
    def calls(self) -> Sequence[Call2d]:
        """2-D problems in execution order."""

    @property
    def additions(self) -> int:
        """Largest number of additions to one element of the result."""

    @property
    def extra_traffic(self) -> tuple[int, int]:
        """PyTorch's copies and additions: (bytes, launches)."""

    def predicted_error(self, errors: Iterable[float]) -> float:
        """Predicted error, from those of the 2-D problems."""


class WholeCall(NamedTuple):
    problem: Problem


@dataclass(frozen=True, slots=True)
class WholeVolume:
    """A 3-D problem for a kernel that takes it as it is: nothing is sliced, copied or added."""

    problem: Problem
    name: str = WHOLE
    axis: int = 0
    additions: int = 0
    extra_traffic: tuple[int, int] = (0, 0)

    @property
    def calls(self) -> tuple[WholeCall, ...]:
        return (WholeCall(self.problem),)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (self.problem,)

    def predicted_error(self, errors: Iterable[float]) -> float:
        return max(errors)

    def in_words(self) -> str:
        return f"1 problem over {', '.join(AXES[3])}:"

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        return runs[self.problem]


class Plan2d(Protocol):
    """A backend's plan for one 2-D problem."""

    @property
    def name(self) -> str: ...
    @property
    def predicted_error(self) -> float: ...
    @property
    def cost(self) -> float: ...
    def explain(self, *, verbose: bool = False) -> str: ...


P = TypeVar("P", bound=Plan2d)


@dataclass(frozen=True, slots=True)
class VolumePlan(Generic[P]):
    """A 3-D problem and the plans of its distinct 2-D problems."""

    parts: Parts
    plans: dict[Problem, P]

    @property
    def problem(self) -> Problem:
        return self.parts.problem

    @property
    def choice(self) -> str:
        return self.parts.name

    @property
    def name(self) -> str:
        return f"{self.choice} ({', '.join(dict.fromkeys(plan.name for plan in self.plans.values()))})"

    @property
    def predicted_error(self) -> float:
        return self.parts.predicted_error(plan.predicted_error for plan in self.plans.values())

    @property
    def ways(self) -> tuple[Way, ...]:
        """Empty: no plan of a volume is made for known weights."""
        return ()

    @property
    def parts_cost(self) -> float:
        """Cost of all 2-D problems [planner's unit], without extra traffic."""
        return sum(self.plans[call.problem].cost for call in self.parts.calls)

    def times(self, problem: Problem) -> int:
        return sum(call.problem == problem for call in self.parts.calls)

    def in_words(self, *, verbose: bool = False) -> Iterator[str]:
        """Lines for ``explain``: the heading and the plans of the 2-D problems."""
        yield f"  {self.parts.in_words()}"
        for problem, plan in self.plans.items():
            first, *others = plan.explain(verbose=verbose).splitlines()
            yield f"    {self.times(problem)} times {first}"
            yield from (f"    {line}" for line in others)


def planned_parts(parts: Parts, plan: Callable[[Problem], P]) -> VolumePlan[P]:
    """Plan the 2-D problems of a 3-D problem."""
    return VolumePlan(parts, {part: plan(part) for part in parts.problems})


def scattered_bytes(problem: Problem, most: int) -> int:
    """Memory traffic of tensors without adjacent elements [bytes]: up to ``most``, one transaction, per element."""
    tensors = ((problem.x_shape, problem.x_strides), (problem.y_shape, problem.y_strides))
    return sum(prod(shape) * min(most, _apart(shape, strides) * problem.element_bytes) for shape, strides in tensors)


def _apart(shape: Shape, strides: Strides) -> int:
    """Smallest stride within an image [elements]; 0 if it has adjacent elements. The batch stride is ignored."""
    nearest = min((stride for extent, stride in zip(shape[1:], strides[1:], strict=True) if extent > 1), default=1)
    return nearest if nearest > 1 else 0
