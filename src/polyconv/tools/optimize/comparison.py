"""End-to-end check of a changed model: outputs, and in training gradients, against the original on the example.

The allowed deviation follows from the predicted errors of the plans: the original model also runs with noise of that
size in the convolutions to be swapped, which shows how the rest of the model propagates such an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...model.example_run import Example, Loss, backward, preserved, run_model

FACTOR = 8.0
"""Noise amplitude in units of the predicted error. Correlated errors add up faster than noise, and rare events, such
as a sign change before an activation, must also occur in the runs with noise."""
DRAWS = 2
"""Number of runs with noise."""
ROUNDING = 2.0**-19
"""Further allowed deviation, relative to the largest element: 16 roundings of float32."""

Results = dict[str, Tensor]
"""Outputs and gradients, by name."""


def why_different(
    model: nn.Module,
    example: Example,
    loss: Loss | None,
    changed: AbstractContextManager[object],
    errors: Mapping[nn.Module, float],
) -> str:
    """Describe a deviation of the changed model's results that exceeds the prediction; empty if there is none.

    ``changed`` is a context manager that changes the model, ``errors`` holds the predicted errors of the swapped
    convolutions, relative to the scale of their results.
    """
    before = _results(model, example, loss)
    allowed = {name: ROUNDING * _largest(expected) for name, expected in before.items()}
    _allow(allowed, before, [_results(model, example, loss)])  # nondeterminism of the model
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
    """Results of one run; buffers and random generators are restored after it, so that all runs start alike."""
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
    """Context manager that adds noise of :data:`FACTOR` times the predicted error to convolutions.

    Errors are relative to the scale of a result (:mod:`polyconv.numerics.scale`): the rms of its terms times the root
    of their number. Noise relative to an operand's rms has an effect of that size, also on the gradients.
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
            result = noise(output, error * output.detach().abs())  # for the bias, which noise in the input misses
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
    """Largest deviation of any element; infinite if shapes differ or unequal elements are not both finite."""
    if result is None or result.shape != expected.shape:
        return inf
    same = (result == expected) | (result.isnan() & expected.isnan())
    return _largest((result.double() - expected.double()).masked_fill(same, 0.0), unless_finite=inf)
