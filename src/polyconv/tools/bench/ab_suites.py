"""A/B suites: single layers (``torch.nn.Conv2d`` against ``polyconv.Conv2d``) and whole networks.

Layers are called as modules, so dispatch overhead counts as in a network. A training step of a layer is the forward
pass and its gradients; an input of up to four channels is taken to be a network's, which needs no gradient.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...measure.layers import class_of
from ...measure.timing import threads
from ...measure.workloads import Workload
from ...model.replace import replace
from ...problem import IMAGE_CHANNELS, Pass
from . import model_zoo
from .ab_compare import Duel, Memory, autotune, block, fight, has_layout, prepared
from .cases import Case, Cases, Mode
from .model_zoo import Network
from .runner import Contest, worker


def layer_contests(layers: Sequence[Workload], cases: Cases) -> list[Contest[Duel]]:
    return [
        Contest(f"{layer.name}, {case}", partial(_layer_contest, layer, case, cases))
        for layer in layers
        for case in cases
    ]


def _layer_contest(layer: Workload, case: Case, cases: Cases) -> Duel:
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
    """The call to time: the module's forward pass or training step."""
    if mode is Mode.INFERENCE:
        return lambda: module(x)
    x = x.detach().requires_grad_(x.shape[1] > IMAGE_CHANNELS)
    wanted = [tensor for tensor in (x, *module.parameters()) if tensor.requires_grad]
    with torch.no_grad():
        dy = torch.randn_like(module(x))
    return lambda: torch.autograd.grad(module(x), wanted, dy)


RATE = 1e-12
"""Learning rate, small so that weights barely change over many steps, even by the gradients of random networks."""
CALLS = 3
"""Calls after which a process has reached its peak memory."""


def network_contests(networks: Sequence[Network], cases: Cases) -> list[Contest[Duel]]:
    """All comparisons, network by network. 1-D networks have only one layout."""
    return [
        Contest(f"{network.name}, {case}", partial(_network_contest, network, case, cases))
        for network in networks
        for case in cases
        if has_layout(len(network.image) - 1, case.layout)
    ]


def _network_contest(network: Network, case: Case, cases: Cases) -> Duel:
    module, x = made(network, case)
    return Duel(
        name=network.name,
        what="×".join(map(str, x.shape[2:])),
        kind="",
        case=case,
        memory=_memory(network, case, cases.benchmark),
        **fight(module, x, case, cases, network_call),
    )


def made(network: Network, case: Case) -> tuple[nn.Module, Tensor]:
    """The network and its input, the same in every process."""
    torch.manual_seed(0)
    return model_zoo.randomised(network.build()), torch.randn(network.input(case.batch))


def network_call(
    module: nn.Module, x: Tensor, mode: Mode, compiled: Callable[[Tensor], Tensor] | None = None
) -> Callable[[], object]:
    """The call to time: inference or a training step, of the module or of what it was compiled to."""
    called = module if compiled is None else compiled
    if mode is Mode.INFERENCE:
        return lambda: called(x)
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    with torch.no_grad():
        dy = module(x)
        # In every layout and precision the same values.
        dy.copy_(torch.randn(dy.shape, generator=torch.Generator().manual_seed(0)) / dy.numel() ** 0.5)

    def step() -> None:
        optimiser.zero_grad()
        called(x).backward(dy)
        optimiser.step()

    return step


# ---- memory


def _memory(network: Network, case: Case, benchmark: bool) -> Memory:
    return Memory(_alone(network.name, case, False, False), _alone(network.name, case, True, benchmark))


def _alone(name: str, case: Case, swapped: bool, benchmark: bool) -> int:
    """Peak resident size [bytes] of a process of its own."""
    with worker([__name__, *model_zoo.modules()]) as pool:
        return pool.submit(_peak, name, case, swapped, benchmark).result()


def _peak(name: str, case: Case, swapped: bool, benchmark: bool) -> int:
    module, x = prepared(*made(model_zoo.NETWORKS[name], case), case)
    if swapped:
        replace(module)
    with threads(case.threads), block(case.mode):
        call = network_call(module, x, case.mode)
        if benchmark:
            autotune(call)
        for _ in range(CALLS):
            call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
