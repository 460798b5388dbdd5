"""One axis as pictures: kernels know height and width, so they are given a signal as a picture that is one pixel high.

Here and in :meth:`polyconv.problem.Problem.as_picture`, and nowhere else. Everything above has the tensors and the
problem that the user has; backends, what was measured for them, and what is kept of weights have pictures.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor

from ..readiness import Run

HEIGHT = 2
"""The dimension that a picture has and a signal has not."""


def picture(tensor: Tensor) -> Tensor:
    """The same memory with a height of 1, if the tensor is a signal or a weight over one axis."""
    return tensor.unsqueeze(HEIGHT) if tensor.dim() == HEIGHT + 1 else tensor


def on_pictures(run: Run) -> Run:
    """What takes tensors over one axis, from what takes pictures."""

    def run_on_pictures(tensors: MutableMapping[str, Tensor]) -> None:
        given = {name: picture(tensor) for name, tensor in tensors.items()}
        if "w" in tensors:
            given["owner"] = tensors["w"]
        pictures = dict(given)
        run(pictures)
        for name, tensor in pictures.items():
            if tensor is not given[name]:  # the backend had the result in memory of its own
                tensors[name] = tensor.squeeze_(HEIGHT)  # in place: a view could not be written to under autograd

    return run_on_pictures
