"""How long measuring may take, and how that is divided: among the convolutions by their share of the model's time.

A layer that takes a third of the time deserves a third of the measuring. Layers are measured in that order, so that
what there is no time for is what matters least.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .recording import Call, Layer, Recording

SECONDS = 60.0
"""Of measuring, at most, unless the caller says otherwise."""
FOR_LAYERS, LEAST_FOR_LAYERS = 0.65, 0.25
"""Share of them for the layers one by one, their errors included; the rest is for the whole model. And where that would
not do for the model, because it is slow."""
RUNS = 24
"""Of the whole model: four ways to run it, each twice to warm up, and three rounds at the least, or four."""
FOR_TIMING = 0.7
"""Share of a layer's part that is for timing. Errors, which are compared with float64, take the rest."""


class Budget:
    """Begins with its making."""

    def __init__(self, recording: Recording, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._began = clock()
        self._all = sum(map(_seconds, recording.layers)) or 1.0
        left = seconds - RUNS * recording.seconds
        self._for_layers = max(LEAST_FOR_LAYERS * seconds, min(FOR_LAYERS * seconds, left))
        self.in_order = sorted(recording.layers, key=_seconds, reverse=True)
        """What takes most comes first."""

    def why_not(self, layer: Layer) -> str:
        """Why a layer is not to be measured; empty where it is."""
        if self._clock() - self._began <= self._for_layers:
            return ""
        return (
            f"it takes {_seconds(layer) / self._all:.2%} of the time of all convolutions, and the {self._seconds:g} "
            "seconds of measuring were spent on those that take more; optimize(..., seconds=) gives it more"
        )

    def for_call(self, call: Call) -> float:
        """Seconds for the timing of a layer on one of its inputs."""
        return FOR_TIMING * self._for_layers * call.seconds / self._all

    def for_model(self) -> float:
        """Seconds that are left, for the model as a whole."""
        return max(0.0, self._seconds - (self._clock() - self._began))


def _seconds(layer: Layer) -> float:
    return sum(call.seconds for call in layer.calls.values())
