"""How long measuring may take, and how that is divided: among the convolutions by their share of the model's time.

What takes a thousandth of the time cannot make a model faster, and a layer that takes a third of it deserves a third of
the measuring. Layers are measured in that order, so that what there is no time for is what matters least.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .recording import Call, Layer, Recording

SECONDS = 60.0
"""Of measuring, at most, unless the caller says otherwise."""
FOR_LAYERS = 0.65
"""Share of them for the layers one by one, their errors included; the rest is for the whole model."""
FOR_TIMING = 0.7
"""Share of a layer's part that is for timing. Errors, which are compared with float64, take the rest."""
TINY = 0.001
"""Share of the time of all convolutions below which one is not measured."""


class Budget:
    """Begins with its making."""

    def __init__(self, recording: Recording, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._began = clock()
        self._all = sum(map(_seconds, recording.layers)) or 1.0
        self.in_order = sorted(recording.layers, key=_seconds, reverse=True)
        """What takes most comes first."""

    def why_not(self, layer: Layer) -> str:
        """Why a layer is not to be measured; empty where it is."""
        share = _seconds(layer) / self._all
        if share < TINY:
            return f"it takes {share:.2%} of the time of all convolutions: too little to measure, and to gain"
        if self._clock() - self._began > FOR_LAYERS * self._seconds:
            return (
                f"it takes {share:.2%} of the time of all convolutions, and the {self._seconds:g} seconds of measuring "
                "were spent on those that take more; optimize(..., seconds=) gives it more"
            )
        return ""

    def for_call(self, call: Call) -> float:
        """Seconds for the timing of a layer on one of its inputs."""
        return FOR_LAYERS * FOR_TIMING * self._seconds * call.seconds / self._all

    def for_model(self) -> float:
        """Seconds that are left, for the model as a whole."""
        return max(0.0, self._seconds - (self._clock() - self._began))


def _seconds(layer: Layer) -> float:
    return sum(call.seconds for call in layer.calls.values())
