"""Whether a changed model computes what it computed before: outputs, and in training gradients, on the example.

The proof of :mod:`polyconv.optimization.flow` is about tensors; this is the check of the whole. The allowed deviation
comes from the predicted errors of the plans: the model as it was runs once more with noise of that size in the
convolutions that are swapped, which shows what the rest of the model makes of such an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..rehearsal import Example, Loss, backward, preserved, run_model

FACTOR = 8.0
"""Noise, in units of the predicted error: errors that are alike add up faster than noise, and rare events, such as an
activation that changes its side, have to be among those of the noise."""
DRAWS = 2
"""Runs with noise."""
ROUNDING = 2.0**-19
"""Allowed deviation beside it, relative to the largest element: 16 roundings of float32."""

Results = dict[str, Tensor]
"""Outputs and gradients, by name."""


def why_different(
    model: nn.Module,
    example: Example,
    loss: Loss | None,
    changed: AbstractContextManager[object],
    errors: Mapping[nn.Module, float],
) -> str:
    """How the results of the changed model differ by more than predicted; empty if they do not.

    Args:
        model: as it was.
        example: its inputs.
        loss: in training, the loss.
        changed: changes the model in a ``with`` block.
        errors: predicted errors of the convolutions that are swapped, relative to the scale of their results.
    """
    before = _results(model, example, loss)
    allowed = {name: ROUNDING * _largest(expected) for name, expected in before.items()}
    _allow(allowed, before, [_results(model, example, loss)])  # a model that is not deterministic
    noisy = []
    for seed in range(DRAWS):
        with _noise(errors, seed):
            noisy.append(_results(model, example, loss))
    _allow(allowed, before, noisy)
    with changed:
        after = _results(model, example, loss)
    for name, expected in before.items():
        deviation = _deviation(after.get(name), expected)
        if not deviation <= allowed[name]:
            return f"{name} differs by {deviation:.1e}, where at most {allowed[name]:.1e} was predicted"
    return ""


def _allow(allowed: dict[str, float], before: Results, others: Sequence[Results]) -> None:
    for name, expected in before.items():
        allowed[name] += max(_deviation(other.get(name), expected) for other in others)


def _results(model: nn.Module, example: Example, loss: Loss | None) -> Results:
    """One run from the same state: buffers and random generators are put back after it."""
    with preserved(model, example), torch.enable_grad() if model.training else torch.inference_mode():
        output = run_model(model, example)
        results = {
            f"output {place}": leaf.detach().clone()
            for place, leaf in enumerate(tree_leaves(output))
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        }
        if model.training:
            backward(output, loss)
            named = dict(model.named_parameters())
            leaves = (leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor) and leaf.is_leaf)
            named.update({f"input {place}": leaf for place, leaf in enumerate(leaves)})  # type: ignore[misc]
            for name, tensor in named.items():
                if tensor.grad is not None:
                    results[f"the gradient of {name}"] = tensor.grad.detach().clone()
    return results


def _noise(errors: Mapping[nn.Module, float], seed: int) -> ExitStack:
    """Let convolutions err by :data:`FACTOR` times what is predicted, in a ``with`` block.

    Errors are relative to the scale of a result (:mod:`polyconv.scale`), the rms of its terms times the root of their
    number; noise in an operand, relative to the operand's rms, has an effect of that size, also on the gradients.
    """
    draws: dict[torch.device, torch.Generator] = {}

    def noise(like: Tensor, size: Any) -> Tensor:
        draw = draws.setdefault(like.device, torch.Generator(like.device).manual_seed(seed))
        uniform = torch.empty_like(like, requires_grad=False).uniform_(-1.0, 1.0, generator=draw)
        return torch.add(like, size * uniform)

    def follow(module: nn.Module, error: float) -> list[Any]:
        def enter(
            _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (noise(args[0], error * _rms(args[0])), *args[1:]), kwargs
            return args, {**kwargs, "input": noise(kwargs["input"], error * _rms(kwargs["input"]))}

        def leave(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            result = noise(output, error * output.detach().abs())  # the bias is no term of a product
            if result.requires_grad:
                result.register_hook(lambda gradient: noise(gradient, error * _rms(gradient)))
            return result

        return [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]

    stack = ExitStack()
    for module, error in errors.items():
        for handle in follow(module, FACTOR * error):
            stack.callback(handle.remove)
    return stack


def _rms(tensor: Tensor) -> Tensor:
    return tensor.detach().square().mean().sqrt()


def _largest(tensor: Tensor, unless_finite: float = 0.0) -> float:
    tensor = tensor.nan_to_num(unless_finite, unless_finite, unless_finite)
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _deviation(result: Tensor | None, expected: Tensor) -> float:
    """The largest of any element; infinite for another shape, and where only one of two elements is finite."""
    if result is None or result.shape != expected.shape:
        return inf
    same = (result == expected) | (result.isnan() & expected.isnan())
    return _largest((result.double() - expected.double()).masked_fill(same, 0.0), unless_finite=inf)
