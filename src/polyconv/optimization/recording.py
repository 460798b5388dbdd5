"""What a model does with its example inputs: which convolutions run, how often, on what, and what follows them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .flow import Flow

Example = Tensor | Sequence[Any] | Mapping[str, Any]
"""One argument, positional arguments, or arguments by name."""
Loss = Callable[[Any], Tensor]
"""From the model's output to the number whose gradient is computed."""


@dataclass
class Call:
    """What a module was called with, however often: the first such tensors stand for all."""

    x: Tensor
    needs_dx: bool
    """The input wants a gradient."""
    dy: Tensor | None = None
    """The gradient that came back, in training."""
    count: int = 0


@dataclass(eq=False)
class Layer:
    """One ``nn.Conv2d`` of the model, under the first of its names."""

    name: str
    module: nn.Conv2d
    calls: dict[Any, Call] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """What the example run showed."""

    layers: tuple[Layer, ...]
    """Those that ran, in the order of their first calls."""
    idle: tuple[str, ...]
    """Names of the convolutions that did not run."""
    flow: Flow


def runner(model: nn.Module, example: Example, loss: Loss | None) -> Callable[[], None]:
    """One run of the model as it is: forward, and in training backward, with fresh gradients."""
    if not model.training:
        return lambda: _discard(_call(model, example))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        backward(_call(model, example), loss)

    return step


def _discard(_: Any) -> None:
    return


def _call(model: nn.Module, example: Example) -> Any:
    if isinstance(example, Tensor):
        return model(example)
    return model(**example) if isinstance(example, Mapping) else model(*example)


def backward(output: Any, loss: Loss | None) -> None:
    """Compute the gradients of a loss, or of the outputs weighted at random: their plain sum often has none at all.

    Behind a normalisation, say, the sum does not depend on anything.
    """
    if loss is not None:
        loss(output).backward()
        return
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise ValueError(
            "the model is in training mode, but nothing that it returns has a gradient: call model.eval() first, or "
            "name a loss: polyconv.optimize(model, inputs, loss=lambda output: ...)"
        )
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(leaf.shape, generator=draw).to(leaf.device, leaf.dtype) for leaf in leaves]
    torch.autograd.backward(leaves, weights)


@contextmanager
def preserved(model: nn.Module, example: Example) -> Iterator[None]:
    """Put back what running a model changes: buffers, gradients (of the example, too), random generators."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    leaves = (leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.is_leaf)
    gradients = [(tensor, tensor.grad) for tensor in (*model.parameters(), *leaves)]
    for tensor, _ in gradients:
        tensor.grad = None
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer  # a model may have put another one in its place
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for tensor, gradient in gradients:
            tensor.grad = gradient


def record(model: nn.Module, convolutions: Mapping[str, nn.Conv2d], example: Example, loss: Loss | None) -> Recording:
    """Run the model once and write down what its convolutions are called with."""
    flow = Flow(model, convolutions.values())
    layers = {module: Layer(name, module) for name, module in convolutions.items()}
    order: dict[Layer, None] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        x = args[0] if args else kwargs["input"]
        layer = layers[module]  # type: ignore[index]
        signature = (x.shape, x.stride(), x.dtype, x.requires_grad)
        call = layer.calls.setdefault(signature, Call(x.detach(), x.requires_grad))
        call.count += 1
        order[layer] = None
        if output.requires_grad and call.dy is None:

            def keep(gradient: Tensor, call: Call = call) -> None:
                call.dy = gradient.detach() if call.dy is None else call.dy

            output.register_hook(keep)

    with ExitStack() as stack:
        for module in layers:
            handle = module.register_forward_hook(note, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        with torch.enable_grad() if model.training else torch.no_grad():
            with flow:
                output = _call(model, example)
            flow.returned(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
            if model.training:
                backward(output, loss)
    del output
    gc.collect()  # what is alive after this is kept by someone
    flow.finish()
    idle = tuple(layer.name for layer in layers.values() if not layer.calls)
    return Recording(tuple(order), idle, flow)
