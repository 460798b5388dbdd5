"""Time budget of the measurements, divided among the convolutions by their share of the model's time.

The most expensive layers are measured first, so that a budget that runs out drops those that matter least.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .recording import Call, Layer, Recording

SECONDS = 60.0
"""Default budget [s]."""
FOR_LAYERS, LEAST_FOR_LAYERS = 0.65, 0.25
"""Share of the budget for the single layers, their errors included; the rest is for the whole model. The second is the
lower limit where a slow model needs more."""
RUNS = 24
"""Runs of the whole model to reserve time for: four variants, each with two warm-up runs and three or four rounds."""
FOR_TIMING = 0.7
"""Share of a layer's budget for timing; the rest is for its error, a comparison with float64."""


class Budget:
    """Divides the budget; its clock starts on construction."""

    def __init__(self, recording: Recording, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._began = clock()
        self._all = sum(map(_seconds, recording.layers)) or 1.0
        left = seconds - RUNS * recording.seconds
        self._for_layers = max(LEAST_FOR_LAYERS * seconds, min(FOR_LAYERS * seconds, left))
        self.in_order = sorted(recording.layers, key=_seconds, reverse=True)

    def why_not(self, layer: Layer) -> str:
        """Reason for not measuring a layer; empty if it is to be measured."""
        if self._clock() - self._began <= self._for_layers:
            return ""
        return (
            f"it takes {_seconds(layer) / self._all:.2%} of the time of all convolutions, and the {self._seconds:g} "
            "seconds of measuring were spent on those that take more; optimize(..., seconds=) gives it more"
        )

    def for_call(self, call: Call) -> float:
        """Time for timing a layer on one of its inputs [s]."""
        return FOR_TIMING * self._for_layers * call.seconds / self._all

    def for_model(self) -> float:
        """Time left for the whole model [s]."""
        return max(0.0, self._seconds - (self._clock() - self._began))


def _seconds(layer: Layer) -> float:
    return sum(call.seconds for call in layer.calls.values())
