"""Convolutions of the whole geometry and memory layouts of all kinds, for the kernels that hold channels in the lanes.

Importing this loads the native extension, or skips the module that does.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from polyconv.arguments import Geometry
from polyconv.cpu import native
from polyconv.numerics import reference

if not native.is_available():
    pytest.skip(str(native.why_absent()), allow_module_level=True)

BORDERS = ("zeros", "reflect", "replicate", "circular")


@dataclass(frozen=True)
class Case:
    """A convolution; padding is top, bottom, left, right."""

    x: tuple[int, int, int, int]
    out_channels: int
    kernel: tuple[int, int]
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    groups: int = 1
    border: int = 0

    @property
    def y(self) -> tuple[int, int, int, int]:
        top, bottom, left, right = self.padding
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        extents = self.x[2] + top + bottom, self.x[3] + left + right
        height, width = ((e - s) // t + 1 for e, s, t in zip(extents, spans, self.stride, strict=True))
        return self.x[0], self.out_channels, height, width

    @property
    def dw(self) -> tuple[int, int, int, int]:
        return self.out_channels, self.x[1] // self.groups, *self.kernel

    @property
    def geometry(self) -> list[int]:
        return [*self.stride, self.padding[0], self.padding[2], *self.dilation, self.groups, self.border]

    def tensors(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        return torch.randn(self.x), torch.randn(self.y)

    @property
    def moves(self) -> Geometry:
        return Geometry(self.stride, self.padding, self.dilation, self.groups, BORDERS[self.border])

    def reference(self, x: Tensor, dy: Tensor) -> Tensor:
        return reference.wgrad(self.moves, x, dy, self.dw)[0]


def close(found: Tensor, expected: Tensor) -> None:
    """Per element: 1e-4 of the output's scale and 1e-4 of the value. What was not written is NaN, and fails."""
    scale = float(expected.square().mean().sqrt())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 * scale)


def poisoned(shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, float("nan"))


CASES = {
    "one output": Case((1, 1, 5, 9), 1, (5, 9)),
    "one column": Case((2, 3, 20, 3), 5, (3, 3)),
    "one row": Case((1, 3, 3, 70), 9, (3, 3)),
    "channels that fill no register tile": Case((1, 5, 17, 41), 13, (3, 3), (1, 1, 1, 1)),
    "more channels than a register tile": Case((2, 70, 9, 10), 53, (3, 3), (1, 1, 1, 1)),
    "padding wider than the kernel": Case((1, 4, 9, 11), 8, (3, 3), (5, 7, 6, 20)),
    "cropped input": Case((1, 4, 19, 50), 8, (3, 3), (-2, -3, -4, 0)),
    "W1 in small": Case((2, 8, 40, 60), 16, (5, 9), (2, 2, 4, 4), (2, 3)),
    "W3 in small": Case((1, 8, 30, 150), 16, (5, 9)),
    "a dilation longer than a vector": Case((1, 3, 30, 90), 8, (3, 3), (18, 18, 18, 18), (18, 18)),
    "a dilation longer than the image": Case((1, 2, 8, 8), 4, (3, 3), (12, 12, 12, 12), (12, 12)),
    "groups": Case((2, 12, 15, 33), 18, (3, 5), (1, 1, 2, 2), groups=3),
    "depthwise": Case((1, 6, 15, 33), 6, (3, 3), (1, 1, 1, 1), groups=6),
    "a kernel longer than any scheme": Case((1, 3, 40, 60), 8, (11, 21), (5, 5, 10, 10)),
    "one tap": Case((2, 20, 9, 11), 24, (1, 1)),
    "one row of taps": Case((1, 8, 9, 77), 8, (1, 7), (0, 0, 3, 3)),
    "one column of taps": Case((1, 8, 40, 30), 8, (7, 1), (3, 3, 0, 0)),
    "many small images": Case((70, 4, 5, 5), 6, (3, 3), (1, 1, 1, 1)),
    "reflected": Case((2, 5, 11, 13), 7, (5, 3), (2, 2, 1, 1), border=1),
    "replicated": Case((2, 5, 11, 13), 7, (3, 5), (1, 1, 6, 2), (1, 2), border=2),
    "circular": Case((2, 5, 11, 13), 7, (3, 9), (1, 1, 4, 4), border=3),
}

STRIDED = {
    "stride 2": Case((2, 5, 21, 33), 9, (3, 3), (1, 1, 1, 1), stride=(2, 2)),
    "first layer of a network": Case((2, 3, 40, 44), 24, (7, 7), (3, 3, 3, 3), stride=(2, 2)),
    "stride and dilation": Case((1, 4, 41, 37), 6, (3, 5), (2, 2, 3, 3), (4, 3), (6, 2)),
    "a stride longer than the kernel": Case((2, 8, 19, 23), 8, (1, 2), stride=(2, 3)),
    "stride 4": Case((1, 3, 47, 51), 16, (11, 11), (2, 2, 2, 2), stride=(4, 4)),
    "a reflected strided one": Case((1, 4, 21, 22), 8, (5, 5), (2, 2, 2, 2), stride=(3, 2), border=1),
}


@st.composite
def cases(draw: st.DrawFn, strided: bool) -> Case:
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    kernel = draw(st.integers(1, 7)), draw(st.integers(1, 11))
    dilation = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3, 4, 5, 9, 19]))
    stride = (draw(st.integers(1, 4)), draw(st.integers(1, 4))) if strided else (1, 1)
    border = draw(st.sampled_from([0, 0, 1, 2, 3]))
    padding = tuple(draw(st.integers(0 if border else -2, 6)) for _ in range(4))
    height = max(1, dilation[0] * (kernel[0] - 1) - padding[0] - padding[1] + draw(st.integers(1, 30)))
    width = max(1, dilation[1] * (kernel[1] - 1) - padding[2] - padding[3] + draw(st.integers(1, 120)))
    # A crop leaves at least one row and one column, a reflection has them to read.
    height = max(height, 5 - min(0, *padding[:2]), 7 if border else 1)
    width = max(width, 5 - min(0, *padding[2:]), 7 if border else 1)
    x = draw(st.integers(1, 3)), groups * draw(st.integers(1, 40)), height, width
    k = groups * draw(st.integers(1, 40))
    return Case(x, k, kernel, padding, dilation, stride, groups, border)  # type: ignore[arg-type]


LAYOUTS = ("dense", "channels last", "slice", "every second column", "one scalar", "a row for all")


def laid_out(dense: Tensor, layout: str) -> Tensor:
    """The same values, or as many of them as the layout can hold, elsewhere in memory."""
    n, c, h, w = dense.shape
    if layout == "channels last":
        return dense.contiguous(memory_format=torch.channels_last)
    if layout == "slice":
        wide = torch.randn(n + 1, c + 3, h + 2, w + 5)
        wide[1:, 2:-1, 1:-1, 3:-2] = dense
        return wide[1:, 2:-1, 1:-1, 3:-2]
    if layout == "every second column":
        wide = torch.randn(n, c, h, 2 * w)
        wide[..., ::2] = dense
        return wide[..., ::2]
    if layout == "one scalar":
        return dense[0, 0, 0, 0].expand(dense.shape)
    return dense[:, :, :1].expand(dense.shape) if layout == "a row for all" else dense
