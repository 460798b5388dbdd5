"""Duels of single layers: ``torch.nn.Conv2d`` against ``polyconv.Conv2d``, module against module.

The modules are called as a network calls them, so that what surrounds a kernel counts as it does there. A step of
training is the forward pass and the gradients that autograd is asked for; an image of up to four channels is a
network's input, which needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.layers import class_of
from ..measure.workloads import Workload
from ..problem import IMAGE_CHANNELS, Pass
from .cases import Case, Cases, Mode
from .contests import Contest
from .duels import Duel, fight


def contests(layers: Sequence[Workload], cases: Cases) -> list[Contest[Duel]]:
    """All of them, layer by layer."""
    return [
        Contest(f"{layer.name}, {case}", partial(_contest, layer, case, cases)) for layer in layers for case in cases
    ]


def _contest(layer: Workload, case: Case, cases: Cases) -> Duel:
    torch.manual_seed(0)
    problem = layer.problem(Pass.FPROP)
    sizes: Any = layer.kernel, layer.stride, layer.padding, layer.dilation, layer.groups, layer.bias
    module = nn.Conv2d(layer.input[1], layer.out_channels, *sizes)
    x = torch.randn(case.batch, *layer.input[1:])
    _, _, height, width = layer.input
    return Duel(
        name=layer.name,
        what=f"{problem.in_brief} at {height}×{width}",
        kind=class_of(layer),
        case=case,
        uses=layer.uses,
        **fight(module, x, case, cases, call_of),
    )


def call_of(module: nn.Module, x: Tensor, mode: Mode) -> Callable[[], object]:
    """What is timed: the module's call, or a step of its training."""
    if mode is Mode.INFERENCE:
        return lambda: module(x)
    x = x.detach().requires_grad_(x.shape[1] > IMAGE_CHANNELS)
    wanted = [tensor for tensor in (x, *module.parameters()) if tensor.requires_grad]
    with torch.no_grad():
        dy = torch.randn_like(module(x))
    return lambda: torch.autograd.grad(module(x), wanted, dy)
