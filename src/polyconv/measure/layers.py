"""Layers of real networks: every distinct Conv2d of a hundred networks at their own image size, and samples of them.

``layers.json`` stores them as numbers, so measuring needs nothing but the package. It is written by
``benchmarks/collect_layers.py``, which needs ``polyconv[zoo]``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.resources import files

from ..problem import IMAGE_CHANNELS, Pass, Problem
from .workloads import Workload

SEED = 0


@lru_cache(maxsize=1)
def every() -> tuple[Workload, ...]:
    """All layers with batch 1, network by network in call order: ``resnet50/4``."""
    text = files(__package__).joinpath("layers.json").read_text(encoding="utf-8")
    networks = {name: layers for name, layers in json.loads(text).items() if name not in ("about", "columns")}
    return tuple(
        _read(f"{network}/{number}", layer)
        for network, layers in networks.items()
        for number, layer in enumerate(layers, 1)
    )


def sample(layers: Iterable[Workload], size: int | None, seed: int = SEED) -> list[Workload]:
    """Random sample, reproducible by seed; a smaller sample is a prefix of a larger one."""
    drawn = list(layers)
    random.Random(seed).shuffle(drawn)
    return drawn[:size]


def class_of(layer: Workload) -> str:
    """Class of a layer; layers of a class gain or lose for the same reason."""
    problem = layer.problem(Pass.FPROP).as_2d()
    taps = "×".join(map(str, problem.kernel))
    stride = f" stride {max(problem.stride)}" if max(problem.stride) > 1 else ""
    dilation = " dilated" if max(problem.dilation) > 1 else ""
    return f"{'transposed ' * layer.transposed}{_role(problem)}{taps}{stride}{dilation}{_map(problem)}"


def described(layer: Workload) -> str:
    """Name and class, the text that is searched for words."""
    return f"{layer.name} {class_of(layer)}"


def has_any(text: str, words: Sequence[str]) -> bool:
    """True if the text contains one of the words, or if there are none."""

    def plain(text: str) -> str:
        return text.lower().replace("×", "x")

    return not words or any(plain(word) in plain(text) for word in words)


def _role(problem: Problem) -> str:
    if problem.in_channels <= IMAGE_CHANNELS:
        return "stem "
    if problem.groups > 1:
        return "depthwise " if problem.depthwise else "grouped "
    return ""


def _map(problem: Problem) -> str:
    """Class of map size: fixed costs per call weigh more on a small map."""
    if problem.in_channels <= IMAGE_CHANNELS:
        return ""
    pixels = problem.in_size[0] * problem.in_size[1]
    if pixels == 1:
        return ", one pixel"
    return ", up to 8×8" if pixels <= 64 else ", up to 20×20" if pixels <= 400 else ", larger maps"


def _read(name: str, numbers: list[int]) -> Workload:
    c, h, w, k, kernel_h, kernel_w, stride_h, stride_w, high, wide, dilation_h, dilation_w, groups, bias, uses = numbers
    return Workload(
        name=name,
        id=name,
        suite="layers",
        input=(1, c, h, w),
        out_channels=k,
        kernel=(kernel_h, kernel_w),
        stride=(stride_h, stride_w),
        padding=(high, wide),
        dilation=(dilation_h, dilation_w),
        groups=groups,
        bias=bool(bias),
        uses=uses,
    )
