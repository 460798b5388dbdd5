"""Example run of a model: which convolutions run, how often, on what inputs, and which activations follow them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...measure.timing import now
from ...model.example_run import Example, Loss, backward, run_model
from .fusion_trace import Flow, prove
from .swapping import Fold, Torchs


@dataclass
class Call:
    """All calls of a module with one input signature, represented by the tensors of the first."""

    x: Tensor
    needs_dx: bool
    output_size: Sequence[int] | None = None
    """``output_size`` argument of a transposed convolution, whose stride leaves the size open."""
    dy: Tensor | None = None
    """Gradient of the output, in training."""
    count: int = 0
    seconds: float = 0.0
    """Forward time of these calls in the example run, the layer's share of the model's time."""


@dataclass(eq=False)
class Layer:
    """One convolution of the model, under the first of its names."""

    name: str
    module: Torchs
    calls: dict[Any, Call] = field(default_factory=dict)
    fold: Fold = field(default_factory=lambda: Fold(None))
    """With the batch normalisation that polyconv's module takes over, if any."""

    def inside(self, activation: str | None = None) -> str:
        """Description of what polyconv's module computes beside the convolution."""
        parts = [part for part in (self.fold.name, activation) if part]
        return f", with {' and '.join(parts)} inside" if parts else ""


@dataclass(frozen=True)
class Recording:
    """Result of the example run."""

    layers: tuple[Layer, ...]
    """Convolutions that ran, in the order of their first calls."""
    idle: tuple[str, ...]
    """Names of the convolutions that did not run."""
    flow: Flow
    seconds: float = 0.0
    """Time of the whole run."""


def runner(model: nn.Module, example: Example, loss: Loss | None) -> Callable[[], object]:
    """A function that runs the model once: forward and, in training, backward with gradients reset."""
    if not model.training:
        return lambda: run_model(model, example)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        backward(run_model(model, example), loss)

    return step


def record(model: nn.Module, convolutions: Mapping[str, Torchs], example: Example, loss: Loss | None) -> Recording:
    """Run the model and record the calls of its convolutions; the runs of the fusion proof warm it up."""
    flow = prove(model, convolutions.values(), example, loss)
    layers = {module: Layer(name, module) for name, module in convolutions.items()}
    device = next((module.weight.device for module in layers), torch.device("cpu"))
    order: dict[Layer, None] = {}
    began: dict[nn.Module, float] = {}

    def start(module: nn.Module, _: Any) -> None:
        began[module] = now(device)

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        x = args[0] if args else kwargs["input"]
        layer = layers[module]  # type: ignore[index]
        output_size = args[1] if args[1:] else kwargs.get("output_size")
        size = None if output_size is None else tuple(output_size)
        signature = (x.shape, x.stride(), x.dtype, x.requires_grad, size)
        call = layer.calls.setdefault(signature, Call(x.detach(), x.requires_grad, size))
        call.count += 1
        call.seconds += now(device) - began[module]
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
        began_all = now(device)
        with torch.enable_grad() if model.training else torch.no_grad():
            output = run_model(model, example)
            if model.training:
                backward(output, loss)
        seconds = now(device) - began_all
    idle = tuple(layer.name for layer in layers.values() if not layer.calls)
    return Recording(tuple(order), idle, flow, seconds)
