"""Lowering of signals (1-D) to 2-D problems of height 1, on views.

Only this module and :meth:`polyconv.problem.Problem.as_2d` convert. Layers above see the user's tensors and
problem; backends, tuning entries and weight caches see 2-D problems.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from torch import Tensor

from ..backend import Run
from ..problem import Problem
from .base import Rewrite

HEIGHT = 2
"""Dimension that is inserted."""


def as_image(tensor: Tensor) -> Tensor:
    """View with a height of 1 if the tensor is a signal or its weight, else the tensor."""
    return tensor.unsqueeze(HEIGHT) if tensor.dim() == HEIGHT + 1 else tensor


class Signal(Rewrite):
    """A 1-D problem as a 2-D problem."""

    __slots__ = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (self.problem.as_2d(),)

    def adapt(self, runs: Mapping[Problem, Run]) -> Run:
        (run,) = runs.values()

        def run_on_views(tensors: MutableMapping[str, Tensor]) -> None:
            given = {name: as_image(tensor) for name, tensor in tensors.items()}
            if "w" in tensors:
                given["owner"] = tensors["w"]
            views = dict(given)
            run(views)
            for name in given.keys() - views.keys():
                del tensors[name]  # used up by the run
            for name, tensor in views.items():
                if tensor is not given[name]:  # the backend returned a result buffer of its own
                    tensors[name] = tensor.squeeze_(HEIGHT)  # in place: autograd forbids writing to a view

        return run_on_views

    def in_words(self) -> str:
        return "as a 2-D problem of height 1"
