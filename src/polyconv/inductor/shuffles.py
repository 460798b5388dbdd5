"""Shuffles of channels_last images: pixel shuffles behind a convolution, channel shuffles behind a concatenation, and
transposed convolutions that become a convolution and a pixel shuffle.

PyTorch's order of the channels makes a pixel shuffle gather single floats. With another order of the layer's weights,
the channels of a pixel of the result are side by side, and the shuffle copies whole vectors. A channel shuffle whose
groups are the concatenated tensors becomes a concatenation along a new last axis: each tensor is copied once, where
Inductor writes the concatenation and then gathers from it with a division per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class PixelShuffle:
    """A pixel shuffle in a graph of ATen's operators."""

    out: Node
    batch: int
    channels: int
    rows: int
    columns: int
    """Of the block of pixels that a pixel becomes."""
    height: int
    width: int

    def reordered(self, per_output: Tensor) -> Tensor:
        """Weights or biases with the output channels of each pixel of the result side by side."""
        blocks: Tensor = per_output.unflatten(0, (self.channels, self.rows, self.columns))
        return blocks.movedim(0, 2).flatten(0, 2).contiguous()

    def insert(self, graph: Graph, x: Node) -> None:
        """Replaces the shuffle by one of the reordered ``x``."""
        split = [self.batch, self.height, self.width, self.rows, self.columns, self.channels]
        joined = [self.batch, self.height * self.rows, self.width * self.columns, self.channels]
        with graph.inserting_before(self.out):
            node = _call(graph, aten.permute.default, x, [0, 2, 3, 1])
            node = _call(graph, aten.reshape.default, node, split)
            node = _call(graph, aten.permute.default, node, [0, 1, 3, 2, 4, 5])
            node = _call(graph, aten.clone.default, node, memory_format=torch.contiguous_format)
            node = _call(graph, aten.reshape.default, node, joined)
            node = _call(graph, aten.permute.default, node, [0, 3, 1, 2])
        self.out.replace_all_uses_with(node)
        graph.eliminate_dead_code()


def pixel_shuffle_of(node: Node) -> PixelShuffle | None:
    """The pixel shuffle that alone reads the value of a node, as ATen decomposes it."""
    split = _only_user(node, aten.reshape.default)
    permuted = split and _only_user(split, aten.permute.default)
    copied = permuted and _only_user(permuted, aten.clone.default)
    out = copied and _only_user(copied, aten.reshape.default)
    if split is None or permuted is None or copied is None or out is None:
        return None
    sizes: Any = split.args[1]
    if len(sizes) != 6 or list(permuted.args[1]) != [0, 1, 4, 2, 5, 3]:  # type: ignore[arg-type]
        return None
    if any(not isinstance(size, int) for size in sizes):  # a dynamic size
        return None
    batch, channels, rows, columns, height, width = sizes
    if tuple(node.meta["val"].shape) != (batch, channels * rows * columns, height, width):
        return None
    if list(out.args[1]) != [batch, channels, height * rows, width * columns]:  # type: ignore[arg-type]
        return None
    return PixelShuffle(out, batch, channels, rows, columns, height, width)


def interleave_channels(graph: Graph) -> None:
    """Replaces channel shuffles of concatenated tensors, as many as the shuffle has groups, by their interleaving."""
    for out in graph.find_nodes(op="call_function", target=aten.reshape.default):
        parts = _shuffled(out)
        if parts is None:
            continue
        with graph.inserting_before(out):
            last = [_call(graph, aten.permute.default, part, [0, 2, 3, 1]) for part in parts]
            node = _call(graph, aten.cat.default, [_call(graph, aten.unsqueeze.default, part, -1) for part in last], -1)
            batch, channels, height, width = out.meta["val"].shape
            node = _call(graph, aten.reshape.default, node, [batch, height, width, channels])
            node = _call(graph, aten.permute.default, node, [0, 3, 1, 2])
        out.replace_all_uses_with(node)
    graph.eliminate_dead_code()


def _shuffled(out: Node) -> list[Node] | None:
    """The tensors whose channels a node interleaves, as ATen decomposes it."""
    copied = _only_input(out, aten.clone.default)
    permuted = copied and _only_input(copied, aten.permute.default)
    split = permuted and _only_input(permuted, aten.reshape.default)
    joined = split and _only_input(split, aten.cat.default)
    if permuted is None or split is None or joined is None or list(permuted.args[1]) != [0, 2, 1, 3, 4]:  # type: ignore[arg-type]
        return None
    parts: Any = joined.args[0]
    sizes = [tuple(each.meta["val"].shape) for each in (split, out, *parts)]
    if any(not isinstance(size, int) for shape in sizes for size in shape) or len(sizes[0]) != 5:  # or a dynamic size
        return None
    batch, groups, channels, height, width = sizes[0]
    fits = all(shape == (batch, channels, height, width) for shape in sizes[2:])
    axis = joined.args[1] if len(joined.args) > 1 else 0
    is_shuffle = sizes[1] == (batch, groups * channels, height, width)
    return list(parts) if fits and is_shuffle and len(parts) == groups and axis in (1, -3) else None


def _only_input(node: Node, target: Any) -> Node | None:
    """The first argument of a node if it is a call of ``target`` with no other users."""
    x = node.args[0]
    return x if isinstance(x, Node) and x.target is target and len(x.users) == 1 else None


def _only_user(node: Node, target: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _call(graph: Graph, target: Any, x: Node | list[Node], *rest: Any, **options: Any) -> Node:
    node = graph.call_function(target, (x, *rest), options)
    values: Any = [each.meta["val"] for each in x] if isinstance(x, list) else x.meta["val"]
    first: Any = values[0] if isinstance(x, list) else values
    with first.fake_mode:
        node.meta["val"] = target(values, *rest, **options)
    return node


def by_phases(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], *_: Any
) -> Tensor:
    """A transposed convolution with few phases: a convolution whose channels are the pixels of all phases. Its kernel
    has zeros, but the phases one by one would fill a small part of each vector."""
    weights = weights_of_phases(w, bias, stride[0], padding[0])
    return torch.pixel_shuffle(torch.conv2d(x, *weights, padding=1), stride[0])


def weights_of_phases(w: Tensor, bias: Tensor | None, stride: int, padding: int) -> tuple[Tensor, Tensor | None]:
    """Weights of 3x3 taps, and biases. Tap u of phase a is tap a + padding - stride (u - 1) of the other kernel."""
    inputs, outputs, taps, _ = w.shape
    before, after = stride - padding, 2 * stride + padding - taps
    blocks = torch.nn.functional.pad(w, (before, after) * 2).reshape(inputs, outputs, 3, stride, 3, stride)
    weights = blocks.flip(2, 4).permute(1, 3, 5, 0, 2, 4).reshape(-1, inputs, 3, 3)
    return weights, None if bias is None else bias.repeat_interleave(stride**2)
