"""Lowering of signals (1-D) to 2-D problems of height 1, on views.

Only this module and :meth:`polyconv.problem.Problem.as_2d` convert. Layers above see the user's tensors and
problem; backends, tuning entries and weight caches see 2-D problems.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor

from ..backend import Run

HEIGHT = 2
"""Dimension that is inserted."""


def picture(tensor: Tensor) -> Tensor:
    """View with a height of 1 if the tensor is a signal or its weight, else the tensor."""
    return tensor.unsqueeze(HEIGHT) if tensor.dim() == HEIGHT + 1 else tensor


def on_pictures(run: Run) -> Run:
    """Wrap the run of a 2-D problem to take 1-D tensors."""

    def run_on_pictures(tensors: MutableMapping[str, Tensor]) -> None:
        given = {name: picture(tensor) for name, tensor in tensors.items()}
        if "w" in tensors:
            given["owner"] = tensors["w"]
        pictures = dict(given)
        run(pictures)
        for name, tensor in pictures.items():
            if tensor is not given[name]:  # the backend returned a result buffer of its own
                tensors[name] = tensor.squeeze_(HEIGHT)  # in place: autograd forbids writing to a view

    return run_on_pictures
