"""Epilogues in a graph of ATen's operators: the residual and the activation that follow a convolution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..activation import Activation

aten = torch.ops.aten

X = object()
"""In a pattern: the input of the activation."""

_COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)
_A, _B = "a", "b"

_SIXTHS = (aten.clamp_max.default, (aten.clamp_min.default, (aten.add.Tensor, X, 3), 0), 6)
PATTERNS: dict[str, Any] = {
    "relu": (aten.relu.default, X),
    "silu": (aten.div.Tensor, X, (aten.add.Tensor, (aten.exp.default, (aten.neg.default, X)), 1)),
    "hardswish": (aten.div.Tensor, (aten.mul.Tensor, X, _SIXTHS), 6),
    "hardsigmoid": (aten.div.Tensor, _SIXTHS, 6),
    "hardtanh": (aten.clamp_max.default, (aten.clamp_min.default, X, _A), _B),
    "gelu": (
        aten.mul.Tensor,
        (aten.mul.Tensor, X, 0.5),
        (aten.add.Tensor, (aten.erf.default, (aten.mul.Tensor, X, 0.7071067811865476)), 1),
    ),
    "leaky_relu": (aten.where.self, (aten.gt.Scalar, X, 0), X, (aten.mul.Tensor, X, _A)),
    "sigmoid": (aten.sigmoid.default, X),
}
"""Activations as ATen decomposes them, those first of which another one is a part. Letters stand for any number."""

_DEPTH = 5
"""Most operators in a row from the input of an activation to its result."""


class Epilogue(NamedTuple):
    """What follows a convolution and can be computed with it."""

    last: Node
    """The node whose value the fused layer returns."""
    residual: Node | None
    activation: Activation = Activation.NONE


def epilogue_of(convolution: Node) -> Epilogue:
    """The longest epilogue of a convolution. No value inside of it is used elsewhere."""
    last, residual = convolution, None
    if len(last.users) == 1:
        user = next(iter(last.users))
        other = _added_to(last, user)
        if other is not None:
            last, residual = user, other
    for name, pattern in PATTERNS.items():
        for root in _reached_from(last):
            found: dict[str, float] = {}
            inside: set[Node] = {root}
            if _matches(root, pattern, last, found, inside) and _is_closed(last, root, inside):
                try:
                    return Epilogue(root, residual, Activation.of(name, *(found[letter] for letter in sorted(found))))
                except ValueError:  # such as a clamp whose bounds are in the wrong order
                    continue
    return Epilogue(last, residual)


def _added_to(node: Node, user: Node) -> Node | None:
    """The other summand if ``user`` adds a tensor of the same size to ``node``."""
    if user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return None
    first, second = user.args
    other = second if first is node else first
    if not isinstance(other, Node) or other is node:
        return None
    mine, its = node.meta.get("val"), other.meta.get("val")
    if not (isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor)):
        return None
    return other if mine.shape == its.shape and mine.dtype == its.dtype else None


def _reached_from(node: Node) -> Iterator[Node]:
    level = [node]
    for _ in range(_DEPTH):
        level = list(dict.fromkeys(user for each in level for user in each.users))
        yield from level


def _matches(value: Any, pattern: Any, x: Node, found: dict[str, float], inside: set[Node]) -> bool:
    """True if ``value`` computes the pattern from ``x``. Collects numbers that stand for letters, and inner nodes."""
    if pattern is X:
        return value is x
    if isinstance(pattern, str):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        found[pattern] = float(value)
        return True
    if not isinstance(pattern, tuple):
        return not isinstance(value, Node) and bool(value == pattern)
    operator, *wanted = pattern
    if not isinstance(value, Node) or value.target is not operator or value.kwargs or len(value.args) != len(wanted):
        return False
    inside.add(value)
    orders = [value.args, value.args[::-1]] if operator in _COMMUTATIVE else [value.args]
    return any(all(_matches(v, p, x, found, inside) for v, p in zip(args, wanted, strict=True)) for args in orders)


def _is_closed(x: Node, root: Node, inside: set[Node]) -> bool:
    """True if nothing outside of the pattern reads ``x`` or an inner node."""
    return all(user in inside for node in (x, *(inside - {root})) for user in node.users)
