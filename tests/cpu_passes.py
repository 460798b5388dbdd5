"""The three passes of one convolution, by operators that take the whole geometry, against PyTorch in float64."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from geometries import laid_out
from polyconv.arguments import Geometry
from polyconv.cpu import native
from polyconv.numerics import reference

BORDERS = ("zeros", "reflect", "replicate", "circular")
IN_LAYOUTS = ("contiguous", "channels_last", "sliced", "expanded", "transposed", "offset")
OUT_LAYOUTS = ("contiguous", "channels_last", "sliced", "transposed")


def load_native() -> None:
    """Loads the extension, or skips the module."""
    if not native.is_available():
        pytest.skip(str(native.why_absent()), allow_module_level=True)


@dataclass(frozen=True)
class Layer:
    """A convolution; padding is top, bottom, left, right."""

    x: tuple[int, int, int, int]
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    border: str = "zeros"

    @property
    def w(self) -> tuple[int, int, int, int]:
        return (self.out_channels, self.x[1] // self.groups, *self.kernel)

    @property
    def y(self) -> tuple[int, int, int, int]:
        top, bottom, left, right = self.padding
        spans = [self.dilation[i] * (self.kernel[i] - 1) + 1 for i in range(2)]
        height = (self.x[2] + top + bottom - spans[0]) // self.stride[0] + 1
        width = (self.x[3] + left + right - spans[1]) // self.stride[1] + 1
        return self.x[0], self.out_channels, height, width

    @property
    def geometry(self) -> list[int]:
        top, _, left, _ = self.padding
        return [*self.stride, top, left, *self.dilation, self.groups, BORDERS.index(self.border)]

    @property
    def moves(self) -> Geometry:
        return Geometry(self.stride, self.padding, self.dilation, self.groups, self.border)


def placed(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """As :func:`laid_out`, for tensors of any size."""
    if layout == "offset":
        return torch.randn(prod(shape) + 3, dtype=dtype)[3:].view(shape)
    return laid_out(shape, layout, dtype)


def poisoned(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """What is not written stays NaN."""
    return placed(shape, layout, dtype).fill_(float("nan"))


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = expected.square().mean().sqrt().item() if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * max(scale, 1e-30))


@dataclass(frozen=True)
class Run:
    """Tensors of one layer in some memory layouts, and what float64 makes of them."""

    layer: Layer
    x: Tensor
    w: Tensor
    bias: Tensor
    dy: Tensor
    expected: dict[str, Tensor]

    @staticmethod
    def make(layer: Layer, dtype: torch.dtype, x_layout: str = "contiguous", y_layout: str = "contiguous") -> Run:
        torch.manual_seed(0)
        x, dy = placed(layer.x, x_layout, dtype), placed(layer.y, y_layout, dtype)
        w = torch.randn(layer.w, dtype=dtype)
        bias = torch.randn(2 * layer.out_channels, dtype=dtype)[::2]
        (dw, db), dx = reference.wgrad(layer.moves, x, dy, layer.w), reference.dgrad(layer.moves, dy, w, layer.x)
        expected = {"y": reference.fprop(layer.moves, x, w, bias), "dx": dx, "dw": dw, "db": db}
        return Run(layer, x, w, bias, dy, expected)

    def fprop(self, family: str, out_layout: str = "contiguous", bias: bool = True) -> Tensor:
        y = poisoned(self.layer.y, out_layout, self.x.dtype)
        given = self.bias if bias else None
        getattr(torch.ops.polyconv_cpu, f"{family}_fprop")(self.x, self.w, given, y, self.layer.geometry)
        return y if bias else y + self.bias[:, None, None]

    def dgrad(self, family: str, out_layout: str = "contiguous") -> Tensor:
        dx = poisoned(self.layer.x, out_layout, self.x.dtype)
        getattr(torch.ops.polyconv_cpu, f"{family}_dgrad")(self.dy, self.w, dx, self.layer.geometry)
        return dx

    def wgrad(self, family: str, bias: bool = True) -> tuple[Tensor, Tensor | None]:
        dw = poisoned(self.layer.w, "contiguous", self.x.dtype)
        db = torch.full((self.layer.out_channels,), float("nan"), dtype=self.x.dtype) if bias else None
        getattr(torch.ops.polyconv_cpu, f"{family}_wgrad")(self.x, self.dy, dw, db, self.layer.geometry)
        return dw, db

    def check(
        self, family: str, tolerance: float, *, out_layout: str = "contiguous", bias: bool = True, dgrad: bool = True
    ) -> None:
        before = [t.clone() for t in (self.x, self.w, self.bias, self.dy)]
        close(self.fprop(family, out_layout, bias), self.expected["y"], tolerance)
        if dgrad:
            close(self.dgrad(family, out_layout), self.expected["dx"], tolerance)
        dw, db = self.wgrad(family, bias)
        close(dw, self.expected["dw"], tolerance)
        if db is not None:
            close(db, self.expected["db"], tolerance)
        assert all(torch.equal(a, b) for a, b in zip(before, (self.x, self.w, self.bias, self.dy), strict=True))


@st.composite
def layers(draw: st.DrawFn, depthwise: bool = False) -> Layer:
    """Any geometry that gives at least one output."""
    groups = draw(st.integers(1, 19)) if depthwise else draw(st.sampled_from([1, 1, 2, 3]))
    per_group = 1 if depthwise else draw(st.integers(1, 5))
    out_per_group = draw(st.sampled_from([1, 1, 1, 2, 3])) if depthwise else draw(st.integers(1, 10))
    kernel = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    stride = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 1, 2, 3, 5]))
    dilation = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 1, 2, 3, 17]))
    border = draw(st.sampled_from(BORDERS))
    spans = [dilation[i] * (kernel[i] - 1) + 1 for i in range(2)]
    size = draw(st.integers(1, 21)), draw(st.integers(1, 40))
    padding: Any = []
    for axis in range(2):
        if border == "zeros":
            sides = draw(st.integers(-3, 12)), draw(st.integers(-3, 12))
        else:
            most = {"reflect": size[axis] - 1, "replicate": 12, "circular": size[axis]}[border]
            sides = draw(st.integers(0, min(most, 12))), draw(st.integers(0, min(most, 12)))
        padding += sides
    height = max(size[0], spans[0] - padding[0] - padding[1], 1 - min(padding[0], 0) - min(padding[1], 0))
    width = max(size[1], spans[1] - padding[2] - padding[3], 1 - min(padding[2], 0) - min(padding[3], 0))
    x = draw(st.integers(1, 3)), groups * per_group, height, width
    return Layer(x, groups * out_per_group, kernel, stride, tuple(padding), dilation, groups, border)


def same_bits_for_any_threads(run: Run, family: str) -> None:
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append([run.fprop(family), run.dgrad(family), *run.wgrad(family)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
