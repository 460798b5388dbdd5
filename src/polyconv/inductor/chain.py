"""Chains of layers that run as one call, a few rows at a time: the tensors between them stay in the cache.

A chain is a depthwise convolution with the convolution before it, the 1x1 convolution behind it, or both: the block of
MobileNet and EfficientNet. The wide tensor between expansion and depthwise convolution never reaches memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from ..activation import Activation
from ..cpu import planner
from ..cpu.engines import depthwise, pointwise
from ..cpu.plan import CpuCandidate
from .layer import Layer

_ALIGNMENT = 16
"""Floats of a cache line, at which the weights of each layer begin."""


@dataclass(slots=True)
class Link:
    """A layer of a graph, as it may be part of a chain."""

    number: int
    """Place among the layers of the graph."""
    layer: Layer
    out: Node
    """The node that has the layer's value."""
    runs: CpuCandidate | None
    """What runs for the layer alone; None for Inductor's own call."""
    linked: CpuCandidate
    """What runs in a chain."""

    @property
    def is_depthwise(self) -> bool:
        return self.linked.engine == depthwise.NAME


def link_of(number: int, layer: Layer, out: Node, runs: CpuCandidate | None) -> Link | None:
    """The layer as a link, or None if chains do not take it."""
    channels, outputs = layer.x_shape[1], layer.w.shape[0]
    engine = pointwise.NAME if layer.groups == 1 else depthwise.NAME
    if layer.prologue is not None or layer.is_transposed or layer.dilation != (1, 1):
        return None
    if layer.groups > 1 and not layer.groups == channels == outputs:
        return None
    offered = planner.offered(layer.problem, planner.here())
    found = next((one for one in offered if one.refusal is None and one.engine == engine and one.direct), None)
    return None if found is None else Link(number, layer, out, runs, found)


def chains(links: Sequence[Link]) -> Iterator[list[Link]]:
    """All chains of a graph. No layer is in two of them."""
    by_input = {link.layer.x: link for link in links if len(link.layer.x.users) == 1}
    by_output = {link.out: link for link in links}
    taken: set[Node] = set()
    for link in links:
        if not link.is_depthwise or link.out in taken:
            continue
        before, behind = by_output.get(link.layer.x), by_input.get(link.out)
        chain = [link]
        if before is not None and link.layer.x in by_input and before.out not in taken and not before.is_depthwise:
            chain.insert(0, before)
        if behind is not None and behind.layer.w.shape[2:] == (1, 1) and not behind.is_depthwise:
            chain.append(behind)
        if len(chain) > 1 and _fits(chain):
            taken.update(each.out for each in chain)
            yield chain


def _fits(chain: Sequence[Link]) -> bool:
    """Only the last layer has a residual, and all activations have the same parameters, or none."""
    epilogues = [link.layer.epilogue for link in chain]
    return all(each.residual is None for each in epilogues[:-1]) and len(_parameters(chain)) <= 1


def _parameters(chain: Sequence[Link]) -> set[tuple[float, float]]:
    activations = [link.layer.epilogue.activation for link in chain]
    return {each.ab for each in activations if each is not Activation.NONE and each.parameters}


@dataclass(frozen=True, slots=True)
class ChainCall:
    """Arguments of ``compiled_convolution`` for a chain, but the input and the residual."""

    weights: Tensor
    bias: Tensor
    numbers: list[int]
    ab: tuple[float, float]


def chain_call(chain: Sequence[Link]) -> ChainCall:
    """Packs the weights of a chain, one layer after another."""
    weights, biases, numbers = [], [], []
    for link in chain:
        packed = link.layer.weights_for(link.linked)
        flat = packed.permute(2, 3, 1, 0).reshape(-1) if packed.dim() == 4 else packed
        weights.append(torch.nn.functional.pad(flat, (0, -flat.numel() % _ALIGNMENT)))
        bias = link.layer.bias_value
        biases.append(torch.zeros(link.layer.w.shape[0], dtype=torch.float32) if bias is None else bias)
        numbers += link.layer.numbers(link.linked)
    ab = next(iter(_parameters(chain)), (0.0, 0.0))
    return ChainCall(torch.cat(weights), torch.cat(biases), numbers, ab)
