"""Prologues in a frozen graph: concatenation, normalisation per channel and ReLU in front of a 1x1 convolution, or the
gate of a squeeze-and-excitation block.

Inductor writes the concatenated, the normalised and the gated tensor to memory. polyconv's pointwise kernel computes
blocks of them while it reads its input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .private import hint, value_of

aten = torch.ops.aten


class Prologue(NamedTuple):
    """Input of a layer as ``scale * cat(parts) + shift``, clamped at zero if ``clamped``, or as ``gate * parts[0]``."""

    parts: list[Node]
    scale: Tensor
    shift: Tensor
    clamped: bool
    gate: Node | None = None
    """Computed factors, one per channel, in place of ``scale``."""

    def __str__(self) -> str:
        return "a gated input" if self.gate is not None else f"{len(self.parts)} normalised tensors"

    @property
    def normalisation(self) -> Tensor:
        """Factors and summands as ``compiled_convolution`` takes them; for a gate factors of one."""
        return (self.scale if self.gate is not None else torch.stack([self.scale, self.shift])).float()


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
    if parts or node is not last:
        return Prologue(parts or [node], scale, shift, clamped)
    gated = None if clamped else _gated(x, channels)
    return None if gated is None else Prologue(gated[:1], scale, shift, clamped, gated[1])


def _affine(gm: GraphModule, node: Node, channels: int) -> tuple[Node, Any, Any] | None:
    """A node that multiplies or adds a constant per channel, as its input, the factor and the summand."""
    if node.target not in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor) or node.kwargs or len(node.users) != 1:
        return None
    operands: Any = node.args
    if node.target is not aten.sub.Tensor and operands[0].op == "get_attr":
        operands = operands[::-1]
    x, other = operands
    if not isinstance(other, Node) or other.op != "get_attr":
        return None
    if any(getattr(x.meta["val"], of) != getattr(node.meta["val"], of) for of in ("shape", "dtype")):
        return None
    value = value_of(gm, other)
    if tuple(value.shape)[-3:] != (channels, 1, 1) or value.numel() != channels:
        return None
    value = value.detach().double().flatten()
    if node.target is aten.mul.Tensor:
        return x, value, 0.0
    return x, 1.0, value if node.target is aten.add.Tensor else -value


def _gated(node: Node, channels: int) -> list[Node] | None:
    """A product of an image and of computed factors, one per channel, as these two. Only of a batch of one."""
    if node.target is not aten.mul.Tensor or len(node.users) != 1:
        return None
    operands: Any = node.args
    if not all(isinstance(each, Node) and each.op == "call_function" for each in operands):
        return None
    x, gate = sorted(operands, key=lambda each: tuple(each.meta["val"].shape) == (1, channels, 1, 1))
    x_value, gate_value = (each.meta["val"] for each in (x, gate))
    fits = tuple(gate_value.shape) == (1, channels, 1, 1) and x_value.shape == node.meta["val"].shape
    return [x, gate] if fits and x_value.dtype == gate_value.dtype == torch.float32 else None


def _joined(node: Node) -> list[Node]:
    """The tensors that a node concatenates along the channels; none for another node."""
    if node.target is not aten.cat.default or len(node.users) != 1 or tuple(node.args[1:]) not in ((1,), (-3,)):
        return []
    parts: Any = node.args[0]
    return list(parts) if all(part.meta["val"].dtype == node.meta["val"].dtype for part in parts) else []
