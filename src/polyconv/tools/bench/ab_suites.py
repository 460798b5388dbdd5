"""A/B suites: single layers (``torch.nn.Conv2d`` against ``polyconv.Conv2d``), those of issues, and whole networks.

Layers are called as modules, so dispatch overhead counts as in a network. A training step of a layer is the forward
pass and its gradients; an input of up to four channels is taken to be a network's, which needs no gradient. A layer of
changing lengths runs in a process per side, because its caches are what is measured.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ... import settings
from ...autotune import online
from ...lowering.reshape import as_image
from ...measure import accuracy
from ...measure.layers import class_of
from ...measure.operands import Operands
from ...measure.timing import Timing, threads
from ...measure.workloads import Workload
from ...model.replace import replace
from ...problem import IMAGE_CHANNELS, Pass
from . import model_zoo
from .ab_compare import (
    AGAIN,
    OURS,
    TORCH,
    Duel,
    Errors,
    Memory,
    Prepare,
    block,
    enabled,
    fight,
    has_layout,
    prepared,
)
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
    module, x = layer_of(layer, case)
    return Duel(
        name=layer.name,
        what=_in_words(layer),
        kind=class_of(layer),
        case=case,
        uses=layer.uses,
        **fight(module, x, case, cases, call_of),
    )


def layer_of(layer: Workload, case: Case) -> tuple[nn.Module, Tensor]:
    """The layer's module and its input, the same in every process."""
    torch.manual_seed(0)
    sizes = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "groups", "bias")}
    sizes |= {"output_padding": layer.output_padding} if layer.transposed else {}
    module = getattr(nn, layer.module)(layer.input[1], layer.out_channels, layer.kernel, **sizes)
    with torch.no_grad():
        module.weight.mul_(layer.weight_scale)
    dtype = getattr(torch, layer.dtype)
    return module.to(dtype), torch.randn(case.batch, *layer.input[1:]).to(dtype)


def _in_words(layer: Workload) -> str:
    problem = layer.problem(Pass.FPROP)
    if layer.transposed:  # described as the convolution whose input gradient it is
        problem = replaced(problem, in_channels=problem.out_channels, out_channels=problem.in_channels)
    lengths = f"{layer.lengths:,} lengths" if layer.lengths > 1 else "×".join(map(str, layer.input[2:]))
    return f"{'transposed ' * layer.transposed}{problem.in_brief} at {lengths}"


def call_of(module: nn.Module, x: Tensor, mode: Mode) -> Callable[[], object]:
    """The call to time: the module's forward pass or training step."""
    if mode is Mode.INFERENCE:
        return lambda: module(x)
    x = x.detach().requires_grad_(x.shape[1] > IMAGE_CHANNELS)
    wanted = [tensor for tensor in (x, *module.parameters()) if tensor.requires_grad]
    with torch.no_grad():
        dy = module(x)
        dy.copy_(_gradient(dy.shape))
    return lambda: torch.autograd.grad(module(x), wanted, dy)


def _gradient(shape: Sequence[int]) -> Tensor:
    """Incoming gradient, the same on every side and in every layout and precision."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# ---- issues

WHOLE, SAMPLE = 4e8, 1e8
"""Largest problem whose errors are measured whole, and size of a sample [multiply-adds]: a second or so in float64."""


def issue_contests(layers: Sequence[Workload], cases: Cases) -> list[Contest[Duel]]:
    """Each layer with its own batch; a training step only of those that are trained."""
    return [
        Contest(f"{layer.name}, {case}", partial(_one_length if layer.lengths == 1 else _lengths, layer, case, cases))
        for layer in layers
        for case in replaced(cases, batches=layer.input[:1])
        if has_layout(layer.rank, case.layout) and (layer.trained or case.mode is Mode.INFERENCE)
    ]


def _one_length(layer: Workload, case: Case, cases: Cases) -> Duel:
    make = partial(layer_of, layer, case)
    module, x = make()
    return Duel(
        name=layer.name,
        what=_in_words(layer),
        kind="",
        case=case,
        memory=_memory(make, call_of, case, cases),
        **fight(module, x, case, cases, call_of, errors_of(layer, case, module, x)),
    )


def errors_of(layer: Workload, case: Case, module: Any, x: Tensor) -> Errors:
    """Measures results of :func:`call_of`: the output, or the largest error of the gradients of input and weight."""
    kinds = [Pass.FPROP]
    if case.mode is Mode.TRAINING:
        kinds = [Pass.DGRAD, Pass.WGRAD] if x.shape[1] > IMAGE_CHANNELS else [Pass.WGRAD]

    def measured(results: Mapping[str, Any]) -> dict[str, float]:
        found = dict.fromkeys(results, 0.0)
        for place, kind in enumerate(kinds):
            problem = layer.problem(kind)
            dy = _gradient(problem.x_shape if layer.transposed else problem.y_shape).to(x.dtype)
            read, written = (dy, x) if layer.transposed else (x, dy)
            bias = module.bias.detach() if problem.bias and problem.kind is Pass.FPROP else None
            problem, operands = problem.as_2d(), Operands(read, module.weight.detach(), bias, written).as_images()
            tensors = [as_image(one if isinstance(one, Tensor) else one[place]) for one in results.values()]
            unit = accuracy.rounding(problem, operands)
            figures = accuracy.measure_all(problem, operands, tensors, whole=WHOLE, sample=SAMPLE, unit=unit)
            found = {side: max(found[side], one.error) for side, one in zip(found, figures, strict=True)}
        return found

    return measured


def _lengths(layer: Workload, case: Case, cases: Cases) -> Duel:
    found = {side: _alone(partial(_sweep, layer, case, side == OURS, cases.benchmark)) for side in (TORCH, OURS, AGAIN)}
    return Duel(
        name=layer.name,
        what=_in_words(layer),
        kind="",
        case=case,
        timings={side: timing for side, (timing, _) in found.items()},
        difference=None,
        plans={},
        memory=Memory(found[TORCH][1], found[OURS][1]),
    )


def _sweep(layer: Workload, case: Case, swapped: bool, benchmark: bool) -> tuple[Timing, int]:
    """Mean time per call over all lengths in random order, and the resident size at the end [bytes]."""
    most = layer.input[-1] + layer.lengths - 1
    module, x = prepared(*layer_of(replaced(layer, input=(*layer.input[:-1], most)), case), case)
    if swapped:
        replace(module)
    lengths = list(range(layer.input[-1], most + 1))
    random.Random(0).shuffle(lengths)
    with threads(case.threads), block(case.mode), settings.use(benchmark=benchmark):
        began, cpu = time.perf_counter(), time.process_time()
        for length in lengths:
            module(x[..., :length].contiguous())
        mean = (time.perf_counter() - began) / len(lengths)
        cpu = (time.process_time() - cpu) / len(lengths)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Timing(mean, mean, cpu), pages * resource.getpagesize()


# ---- networks

RATE = 1e-12
"""Learning rate, small so that weights barely change over many steps, even by the gradients of random networks."""
CALLS = 3
"""Calls after which a process has reached its peak memory."""


def network_contests(networks: Sequence[Network], cases: Cases) -> list[Contest[Duel]]:
    """All comparisons, network by network. 1-D networks have only one layout."""
    packages = model_zoo.modules() if any(network.package for network in networks) else []
    return [
        Contest(f"{network.name}, {case}", partial(_network_contest, network, case, cases, packages))
        for network in networks
        for case in cases
        if has_layout(len(network.image) - 1, case.layout)
    ]


def _network_contest(network: Network, case: Case, cases: Cases, packages: Sequence[str]) -> Duel:
    module, x = made(network, case)
    return Duel(
        name=network.name,
        what="×".join(map(str, x.shape[2:])),
        kind="",
        case=case,
        memory=_memory(partial(made, network, case), network_call, case, cases, packages),
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


T = TypeVar("T")


def _memory(
    make: Callable[[], tuple[nn.Module, Tensor]],
    prepare: Prepare,
    case: Case,
    cases: Cases,
    packages: Sequence[str] = (),
) -> Memory:
    return Memory(*(_alone(partial(_peak, make, prepare, case, side), packages) for side in (None, cases)))


def _alone(measured: Callable[[], T], packages: Sequence[str] = ()) -> T:
    """Call a function in a new process, forked from one that has imported the packages, and return its result."""
    with worker([__name__, *packages]) as pool:
        return pool.submit(measured).result()


def _peak(make: Callable[[], tuple[nn.Module, Tensor]], prepare: Prepare, case: Case, ours: Cases | None) -> int:
    """Peak resident size of this process after calls of one side, PyTorch's if ``ours`` is None [bytes]."""
    module, x = prepared(*make(), case)
    if ours is not None and not ours.enable:
        replace(module)
    with threads(case.threads), block(case.mode):
        call = prepare(module, x, case.mode)
        if ours is not None and ours.enable:
            call = enabled(call)
        if ours is not None and ours.benchmark:
            online.autotune(call)
        for _ in range(CALLS):
            call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
