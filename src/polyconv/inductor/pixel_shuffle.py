"""Pixel shuffles behind a convolution in channels_last.

PyTorch's order of the channels makes the shuffle gather single floats. With another order of the layer's weights, the
channels of a pixel of the result are side by side, and the shuffle copies whole vectors.
"""

from __future__ import annotations

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
    if list(out.args[1]) != [batch, channels, height * rows, width * columns]:  # type: ignore[arg-type]
        return None
    return PixelShuffle(out, batch, channels, rows, columns, height, width)


def _only_user(node: Node, target: Any) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _call(graph: Graph, target: Any, x: Node, *rest: Any, **options: Any) -> Node:
    node = graph.call_function(target, (x, *rest), options)
    value = x.meta["val"]
    with value.fake_mode:
        node.meta["val"] = target(value, *rest, **options)
    return node
