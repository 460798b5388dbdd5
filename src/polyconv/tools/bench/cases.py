"""Configurations of an A/B comparison: mode, layout, batch and threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from ...problem import Word


class Layout(Word):
    """Memory format of input and weights, on both sides."""

    NCHW = "nchw"
    CHANNELS_LAST = "channels_last"


class Mode(Word):
    """A call in inference mode, or a training step."""

    INFERENCE = "inference"
    TRAINING = "training"


class Peer(Word):
    """Graph compilers that whole networks are measured against."""

    COMPILE = "compile"
    AOTINDUCTOR = "aotinductor"
    ONNXRUNTIME = "onnxruntime"
    OPENVINO = "openvino"


@dataclass(frozen=True, slots=True)
class Case:
    mode: Mode
    layout: Layout
    batch: int
    threads: int

    def __str__(self) -> str:
        return f"{self.mode}, {self.layout}, batch {self.batch}, {self.threads} threads"


@dataclass(frozen=True, slots=True)
class Cases:
    """Requested configurations, as a Cartesian product, and rounds of each."""

    modes: Sequence[Mode] = tuple(Mode)
    layouts: Sequence[Layout] = tuple(Layout)
    batches: Sequence[int] = (1, 8)
    threads: Sequence[int] = (1,)
    repeats: int = 7
    benchmark: bool = False
    """Autotune ours before timing, as :func:`polyconv.benchmark` does."""
    enable: bool = False
    """Ours is PyTorch's module called under :func:`polyconv.enable`, instead of one with replaced layers."""

    def __iter__(self) -> Iterator[Case]:
        for case in product(self.modes, self.layouts, self.batches, self.threads):
            yield Case(*case)
