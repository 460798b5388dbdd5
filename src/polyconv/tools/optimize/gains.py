"""Selection of the layers to swap: those faster by a margin above the measurement noise, identical on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from ...autotune import rank_consensus
from .measurement import Measurement
from .recording import Layer
from .swapping import Fusion

Measurements = Mapping[Layer, Sequence[Measurement]]
"""A measurement per layer and distinct input."""


@dataclass(frozen=True)
class Gains:
    """Layers to swap and activations to fuse."""

    swapped: tuple[Layer, ...]
    fusions: tuple[Fusion, ...]
    reasons: Mapping[Layer, str]
    """Every layer, swapped or not -> why."""

    @property
    def fused(self) -> set[nn.Module]:
        return {conv for fusion in self.fusions for conv in fusion.convolutions}


def gains_of(measurements: Measurements, fusable: Sequence[Fusion], margin: float) -> Gains:
    """Select swaps and fusions that save more than ``margin``; convolutions that share an activation are one unit."""
    layers = {layer.module: layer for layer in measurements}
    fusions: list[Fusion] = []
    reasons: dict[Layer, str] = {}
    swapped: list[Layer] = []
    for fusion in fusable:
        together = [layers[conv] for conv in fusion.convolutions]  # type: ignore[index]
        theirs, apart, fused = (sum(_seconds(layer, measurements)[i] for layer in together) for i in range(3))
        gains = fused <= apart and fused < (1 - margin) * theirs
        if agreed(f"fuse {margin} {[layer.name for layer in together]}", gains):
            fusions.append(fusion)
            swapped += together
            reasons.update((layer, f"faster{layer.inside(fusion.activation)}") for layer in together)
    for layer in measurements:
        if layer in reasons:
            continue
        theirs, apart, _ = _seconds(layer, measurements)
        if agreed(
            f"swap {margin} {layer.name} {[t.shape for t in measurements[layer]]}", apart < (1 - margin) * theirs
        ):
            swapped.append(layer)
            reasons[layer] = f"faster{layer.inside()}"
        elif all(measurement.same_kernel for measurement in measurements[layer]):
            reasons[layer] = "same kernel: PyTorch's own is the fastest plan"
        else:
            reasons[layer] = "PyTorch is as fast" if apart < (1 + margin) * theirs else "PyTorch is faster"
    return Gains(tuple(swapped), tuple(fusions), reasons)


def _seconds(layer: Layer, measurements: Measurements) -> tuple[float, float, float]:
    """Time of all calls of a layer in one run of the model [s]: PyTorch's, ours, ours fused."""
    theirs = apart = fused = 0.0
    for call, measurement in zip(layer.calls.values(), measurements[layer], strict=True):
        theirs += call.count * measurement.torch_seconds
        apart += call.count * measurement.seconds
        fused += call.count * (measurement.seconds if measurement.fused_seconds is None else measurement.fused_seconds)
    return theirs, apart, fused


def agreed(what: str, decision: bool) -> bool:
    """The decision of the first rank that makes it, adopted by all."""
    return agreed_word(what, "yes" if decision else "no") == "yes"


def agreed_word(what: str, word: str) -> str:
    """As :func:`agreed`, for a string."""
    return rank_consensus.agree("optimize", what, word)
