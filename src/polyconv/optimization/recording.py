"""What a model does with its example inputs: which convolutions run, how often, on what, and what follows them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..rehearsal import Example, Loss, backward, run_model
from .flow import Flow, prove
from .swapping import Torchs


@dataclass
class Call:
    """What a module was called with, however often: the first such tensors stand for all."""

    x: Tensor
    needs_dx: bool
    """The input wants a gradient."""
    output_size: Sequence[int] | None = None
    """What a transposed convolution was asked for, where its stride leaves that open."""
    dy: Tensor | None = None
    """The gradient that came back, in training."""
    count: int = 0
    seconds: float = 0.0
    """Of all these calls in the example run, forward: its share of the model's time."""


@dataclass(eq=False)
class Layer:
    """One convolution of the model, under the first of its names."""

    name: str
    module: Torchs
    calls: dict[Any, Call] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """What the example run showed."""

    layers: tuple[Layer, ...]
    """Those that ran, in the order of their first calls."""
    idle: tuple[str, ...]
    """Names of the convolutions that did not run."""
    flow: Flow
    seconds: float = 0.0
    """Of the whole run."""


def runner(model: nn.Module, example: Example, loss: Loss | None) -> Callable[[], None]:
    """One run of the model as it is: forward, and in training backward, with fresh gradients."""
    if not model.training:
        return lambda: _discard(run_model(model, example))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        backward(run_model(model, example), loss)

    return step


def _discard(_: Any) -> None:
    return


def record(model: nn.Module, convolutions: Mapping[str, Torchs], example: Example, loss: Loss | None) -> Recording:
    """Run the model and write down what its convolutions are called with. The runs of the proof warm up."""
    flow = prove(model, convolutions.values(), example, loss)
    layers = {module: Layer(name, module) for name, module in convolutions.items()}
    order: dict[Layer, None] = {}
    began: dict[nn.Module, float] = {}

    def start(module: nn.Module, _: Any) -> None:
        began[module] = time.perf_counter()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        x = args[0] if args else kwargs["input"]
        layer = layers[module]  # type: ignore[index]
        output_size = args[1] if args[1:] else kwargs.get("output_size")
        size = None if output_size is None else tuple(output_size)
        signature = (x.shape, x.stride(), x.dtype, x.requires_grad, size)
        call = layer.calls.setdefault(signature, Call(x.detach(), x.requires_grad, size))
        call.count += 1
        call.seconds += time.perf_counter() - began[module]
        order[layer] = None
        if output.requires_grad and call.dy is None:

            def keep(gradient: Tensor, call: Call = call) -> None:
                call.dy = gradient.detach() if call.dy is None else call.dy

            output.register_hook(keep)

    with ExitStack() as stack:
        for module in layers:
            for handle in (
                module.register_forward_pre_hook(start),
                module.register_forward_hook(note, prepend=True, with_kwargs=True),
            ):
                stack.callback(handle.remove)
        began_all = time.perf_counter()
        with torch.enable_grad() if model.training else torch.no_grad():
            output = run_model(model, example)
            if model.training:
                backward(output, loss)
        seconds = time.perf_counter() - began_all
    idle = tuple(layer.name for layer in layers.values() if not layer.calls)
    return Recording(tuple(order), idle, flow, seconds)
