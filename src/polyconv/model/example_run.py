"""Run a model once on example inputs and restore its state; shared by the tools that try out a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_leaves

Example = Tensor | Sequence[Any] | Mapping[str, Any]
"""One argument, positional arguments, or arguments by name."""
Loss = Callable[[Any], Tensor]
"""Maps the model's output to the number whose gradient is computed."""


def run_model(model: nn.Module, example: Example) -> Any:
    """Call the model with an example. Returns its output."""
    if isinstance(example, Tensor):
        return model(example)
    if isinstance(example, Mapping):
        return model(**example)
    if not isinstance(example, Sequence) or isinstance(example, str):
        raise TypeError(
            "the inputs of a model are a tensor, a tuple or list of positional arguments, or a dict of named ones; "
            f"got {type(example).__name__}: {example!r}"
        )
    return model(*example)


def backward(output: Any, loss: Loss | None) -> None:
    """Differentiate a loss, or the randomly weighted outputs: their plain sum is constant after a normalisation."""
    if loss is not None:
        loss(output).backward()
        return
    leaves = differentiable(output)
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(leaf.shape, generator=draw).to(leaf.device, leaf.dtype) for leaf in leaves]
    torch.autograd.backward(leaves, weights)


def differentiable(output: Any) -> list[Tensor]:
    """Outputs of a model that require a gradient. Raises ValueError if there are none."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise ValueError(
            "a backward pass is wanted, but nothing that the model returns has a gradient: call model.eval() first for "
            "a forward pass alone, or name a loss: loss=lambda output: ..."
        )
    return leaves


def refuse_lazy(model: nn.Module, then: str) -> None:
    """Raise if the model has an uninitialised lazy module: running it would fix its shape, which cannot be restored."""
    for name, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__} that has seen no input yet, and would not be left "
                f"as it was: call the model once, then {then}"
            )


@contextmanager
def preserved(model: nn.Module, example: Example) -> Iterator[None]:
    """Restore what running a model changes: buffers, gradients (also of the example), random generators."""
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
                module._buffers[name] = buffer  # the model may have assigned another one
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for tensor, gradient in gradients:
            tensor.grad = gradient
