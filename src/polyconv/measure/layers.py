"""Layers of real networks, stored as numbers, so that measuring needs nothing but the package; and samples of them.

``data/layers.json`` has every distinct Conv2d of a hundred networks at their own image size. It is written by
``benchmarks/collect_layers.py``, which needs ``polyconv[zoo]``. ``data/layers_extra.json`` has layers of networks that
do not classify images: 1-D, transposed, dilated, asymmetric and long kernels. A profile without these would not cover
polyconv's main use, and would choose ATen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from ..problem import IMAGE_CHANNELS, Pass, Problem
from .workloads import Workload, workload

SEED = 0


@lru_cache(maxsize=1)
def every() -> tuple[Workload, ...]:
    """The layers of ``layers.json`` with batch 1, network by network in call order: ``resnet50/4``."""
    found = []
    for name, (c, h, w, k, *moves, groups, bias, uses) in _numbered(_read("layers.json")):
        pairs = (moves[i : i + 2] for i in range(0, 8, 2))
        found.append(_layer(name, c, (h, w), [k, *pairs, groups], bias=bool(bias), uses=uses))
    return tuple(found)


@lru_cache(maxsize=1)
def extra() -> tuple[Workload, ...]:
    """The layers of ``layers_extra.json`` with batch 1: ``family/vocoder/4``, ``pixels/unet/2``, ``photographs/1``."""
    found = []
    networks = {name: network["layers"] for name, network in _read("layers_extra.json").items()}
    for name, (channels, size, *numbers, transposed) in _numbered(networks):
        others = {"output_padding": 0} if transposed else {}
        found.append(_layer(name, channels, size, numbers, bias=len(size) == 1, **others))
    return tuple(found)


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


def _read(file: str) -> dict[str, Any]:
    found = json.loads((files(__package__) / "data" / file).read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name not in ("about", "columns")}


def _numbered(networks: Mapping[str, Sequence[Sequence[Any]]]) -> Iterator[tuple[str, Sequence[Any]]]:
    for network, layers in networks.items():
        yield from ((f"{network}/{number}", layer) for number, layer in enumerate(layers, 1))


def _layer(name: str, channels: int, size: Sequence[int], numbers: Sequence[Any], **others: Any) -> Workload:
    columns = ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    entry = dict(zip(columns, numbers, strict=True))
    return workload({"id": name, "input": (1, channels, *size), **entry, **others}, "layers")
