"""Duels of whole networks: a network of PyTorch's against the same after :func:`polyconv.replace`, and nothing else.

A step of training is the forward pass, the backward pass and one step of gradient descent. How much memory each side
takes at its peak is asked of processes of their own, each of which runs one side alone.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor, nn

from ..cpu import native
from ..measure.timing import threads
from ..replacement import replace
from . import zoo
from .cases import Case, Cases, Mode
from .contests import Contest, begin
from .duels import Duel, Memory, block, fight, has_layout, prepared, race
from .zoo import Network

RATE = 1e-6
"""Of the descent: small, so that numbers stay what they are through many steps."""
CALLS = 3
"""After so many, a process has taken all the memory that it will take."""


def contests(networks: Sequence[Network], cases: Cases) -> list[Contest[Duel]]:
    """All of them, network by network. A signal has one layout only."""
    return [
        Contest(f"{network.name}, {case}", partial(_contest, network, case, cases))
        for network in networks
        for case in cases
        if has_layout(len(network.image) - 1, case.layout)
    ]


def _contest(network: Network, case: Case, cases: Cases) -> Duel:
    module, x = _made(network, case)
    return Duel(
        name=network.name,
        what="×".join(map(str, x.shape[2:])),
        kind="",
        case=case,
        memory=_memory(network, case, cases.benchmark),
        **fight(module, x, case, cases, _call),
    )


def _made(network: Network, case: Case) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return network.build(), torch.randn(network.input(case.batch))


def _call(module: nn.Module, x: Tensor, mode: Mode) -> Callable[[], object]:
    if mode is Mode.INFERENCE:
        return lambda: module(x)
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    with torch.no_grad():
        dy = torch.randn_like(module(x))
    dy /= dy.numel() ** 0.5

    def step() -> None:
        optimiser.zero_grad()
        module(x).backward(dy)
        optimiser.step()

    return step


# ---- memory


def _memory(network: Network, case: Case, benchmark: bool) -> Memory:
    return Memory(_alone(network.name, case, False, False), _alone(network.name, case, True, benchmark))


def _alone(name: str, case: Case, swapped: bool, benchmark: bool) -> int:
    """The peak of a new process: a copy of one that has imported what is needed and computed nothing."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, *zoo.modules()])
    isa = native.instruction_set() if native.is_available() else ""
    with ProcessPoolExecutor(1, context, begin, (isa,)) as pool:
        return pool.submit(_peak, name, case, swapped, benchmark).result()


def _peak(name: str, case: Case, swapped: bool, benchmark: bool) -> int:
    module, x = prepared(*_made(zoo.NETWORKS[name], case), case)
    if swapped:
        replace(module)
    with threads(case.threads), block(case.mode):
        call = _call(module, x, case.mode)
        if benchmark:
            race(call)
        for _ in range(CALLS):
            call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
