"""Three axes as pictures: whatever the way, a volume is problems of pictures, and each of these has a plan of its own.

:mod:`polyconv.sheets` and :mod:`polyconv.stacks` are the ways. A plan here is the same for both, and for any backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, Protocol, TypeVar

from .accuracy import Way
from .problem import Problem, Shape, Strides


class PictureCall(Protocol):
    """One problem of pictures, on views of the tensors of the whole."""

    @property
    def problem(self) -> Problem: ...


class Parts(Protocol):
    """A problem over three axes as problems of pictures."""

    @property
    def problem(self) -> Problem:
        """The whole."""

    @property
    def name(self) -> str:
        """By which it can be chosen: how each picture is computed is the picture's own choice."""

    @property
    def axis(self) -> int:
        """The axis that is cut across."""

    @property
    def calls(self) -> Sequence[PictureCall]:
        """In the order in which they run."""

    @property
    def beside(self) -> tuple[int, int]:
        """Bytes that PyTorch copies or adds beside these calls, and in how many launches."""

    def predicted_error(self, errors: Iterable[float]) -> float:
        """From those of the pictures."""

    def in_words(self) -> str:
        """A line that comes before the pictures."""


class PicturePlan(Protocol):
    """A plan of any backend for one problem of pictures."""

    @property
    def name(self) -> str: ...
    @property
    def predicted_error(self) -> float: ...
    @property
    def cost(self) -> float: ...
    def explain(self, *, verbose: bool = False) -> str: ...


P = TypeVar("P", bound=PicturePlan)


@dataclass(frozen=True, slots=True)
class VolumePlan(Generic[P]):
    """A problem over three axes, as the plans of its pictures."""

    parts: Parts
    plans: dict[Problem, P]
    """By the problem; problems that differ in nothing have one plan."""

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
        """None: of the weights of a volume nothing is kept, so that they are never known."""
        return ()

    @property
    def pictures_cost(self) -> float:
        """Of all pictures, in the planner's unit; not of what is copied, or added apart."""
        return sum(self.plans[call.problem].cost for call in self.parts.calls)

    def times(self, problem: Problem) -> int:
        """How often a problem of pictures is solved."""
        return sum(call.problem == problem for call in self.parts.calls)

    def in_words(self, *, verbose: bool = False) -> Iterator[str]:
        """Lines that say what is computed, with the plans of the pictures in their own words."""
        yield f"  {self.parts.in_words()}"
        for problem, plan in self.plans.items():
            first, *others = plan.explain(verbose=verbose).splitlines()
            yield f"    {self.times(problem)} times {first}"
            yield from (f"    {line}" for line in others)


def planned_parts(parts: Parts, plan: Callable[[Problem], P]) -> VolumePlan[P]:
    """The plan for a problem over three axes, from what plans its pictures."""
    return VolumePlan(parts, {picture: plan(picture) for picture in pictures_of(parts)})


def pictures_of(parts: Parts) -> tuple[Problem, ...]:
    """The problems of pictures, each once."""
    return tuple(dict.fromkeys(call.problem for call in parts.calls))


def scattered_bytes(picture: Problem, most: int) -> int:
    """What memory moves for elements that have no neighbours, each in the ``most`` bytes that are moved at once."""
    tensors = ((picture.x_shape, picture.x_strides), (picture.y_shape, picture.y_strides))
    return sum(prod(shape) * min(most, _apart(shape, strides) * picture.element_bytes) for shape, strides in tensors)


def _apart(shape: Shape, strides: Strides) -> int:
    """How far apart all elements of an image are, at least; 0 if some lie side by side. Images come one by one."""
    nearest = min((stride for extent, stride in zip(shape[1:], strides[1:], strict=True) if extent > 1), default=1)
    return nearest if nearest > 1 else 0
