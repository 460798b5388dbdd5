"""Prologues in a frozen graph: concatenation, normalisation per channel and ReLU in front of a 1x1 convolution.

Inductor writes the concatenated and the normalised tensor to memory. polyconv's pointwise kernel computes blocks of
them while it reads its input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .private import hint

aten = torch.ops.aten


class Prologue(NamedTuple):
    """The input of a layer as ``scale * cat(parts) + shift``, clamped at zero if ``clamped``."""

    parts: list[Node]
    scale: Tensor
    shift: Tensor
    clamped: bool

    @property
    def normalisation(self) -> Tensor:
        """Factors and summands as ``compiled_convolution`` takes them."""
        return torch.stack([self.scale, self.shift]).float()


def prologue_of(gm: GraphModule, x: Node) -> Prologue | None:
    """The longest prologue that ends in ``x``, of values that nothing else reads; None if it is ReLU alone."""
    channels = hint(x.meta["val"].shape[1])
    scale, shift = torch.ones(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64)
    node, clamped = x, x.target is aten.relu.default and len(x.users) == 1
    if clamped:
        (node,) = x.args  # type: ignore[assignment]
    last = node
    while (step := _affine(gm, node, channels)) is not None:
        node, factor, summand = step
        scale, shift = scale * factor, shift + scale * summand
    parts = _joined(node)
    return Prologue(parts or [node], scale, shift, clamped) if parts or node is not last else None


def _affine(gm: GraphModule, node: Node, channels: int) -> tuple[Node, Any, Any] | None:
    """A node that multiplies or adds a constant per channel, as its input, the factor and the summand."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor) or node.kwargs or len(node.users) != 1:
        return None
    operands: Any = node.args
    if node.target is not aten.sub.Tensor and operands[0].op == "get_attr":
        operands = operands[::-1]
    x, other = operands
    if not isinstance(other, Node) or other.op != "get_attr" or x.meta["val"].shape != node.meta["val"].shape:
        return None
    value = getattr(gm, str(other.target))
    if tuple(value.shape)[-3:] != (channels, 1, 1) or value.numel() != channels:
        return None
    value = value.detach().double().flatten()
    if node.target is aten.mul.Tensor:
        return x, value, 0.0
    return x, 1.0, value if node.target is aten.add.Tensor else -value


def _joined(node: Node) -> list[Node]:
    """The tensors that a node concatenates along the channels; none for another node."""
    if node.target is not aten.cat.default or len(node.users) != 1 or tuple(node.args[1:]) not in ((1,), (-3,)):
        return []
    parts: Any = node.args[0]
    return list(parts) if all(part.meta["val"].dtype == node.meta["val"].dtype for part in parts) else []
