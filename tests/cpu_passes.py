"""2-D convolutions for the native CPU operators: edge cases, memory layouts, and results in float64."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from polyconv.arguments import Geometry
from polyconv.cpu import native
from polyconv.numerics import reference
from polyconv.settings import X86_SETS

BORDERS = ("zeros", "reflect", "replicate", "circular")
IN_LAYOUTS = ("contiguous", "channels_last", "sliced", "expanded", "transposed", "offset")
OUT_LAYOUTS = ("contiguous", "channels_last", "sliced", "transposed")
WRITABLE = ("contiguous", "channels_last", "window", "sliced")
READABLE = (*WRITABLE, "one scalar", "one row")


def load_native() -> None:
    """Load the extension, or skip the module."""
    if not native.is_available():
        pytest.skip(str(native.why_absent()), allow_module_level=True)


def _has(name: str) -> bool:
    try:
        native.instruction_set(name)
    except RuntimeError:
        return False
    finally:
        native.instruction_set("best")
    return True


@contextmanager
def on_instruction_set(name: str) -> Iterator[None]:
    """Run the kernels of an instruction set, or skip the test if the processor lacks it."""
    if not _has(name):
        pytest.skip(f"this processor has no {name}")
    native.instruction_set(name)
    try:
        yield
    finally:
        native.instruction_set("best")


SETS = ("neon",) if platform.machine() == "aarch64" else X86_SETS
instruction_sets = st.sampled_from(SETS).filter(_has)
"""For property tests: an instruction set of this processor."""


@dataclass(frozen=True)
class Layer:
    """A convolution; padding is top, bottom, left, right."""

    x: tuple[int, int, int, int]
    out_channels: int
    kernel: tuple[int, int]
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
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

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input, weight, bias and output gradient: the same values every time."""
        torch.manual_seed(0)
        return torch.randn(self.x), torch.randn(self.w), torch.randn(self.out_channels), torch.randn(self.y)


EDGES = {
    "one output": Layer((1, 1, 5, 9), 1, (5, 9)),
    "one column": Layer((2, 3, 20, 3), 5, (3, 3)),
    "one row": Layer((1, 3, 3, 70), 9, (3, 3)),
    "channels that fill no register tile": Layer((1, 5, 17, 41), 13, (3, 3), (1, 1, 1, 1)),
    "padding wider than the kernel": Layer((1, 4, 9, 11), 8, (3, 3), (5, 7, 6, 20)),
    "cropped input": Layer((1, 4, 19, 50), 8, (3, 3), (-2, -3, -4, 0)),
    "W1 in small": Layer((2, 8, 40, 60), 16, (5, 9), (2, 2, 4, 4), (2, 3)),
    "W3 in small": Layer((1, 8, 30, 150), 16, (5, 9)),
    "a dilation longer than a vector": Layer((1, 3, 30, 90), 8, (3, 3), (18, 18, 18, 18), (18, 18)),
    "a dilation longer than the image": Layer((1, 2, 8, 8), 4, (3, 3), (12, 12, 12, 12), (12, 12)),
    "groups": Layer((2, 12, 15, 33), 18, (3, 5), (1, 1, 2, 2), groups=3),
    "depthwise": Layer((1, 6, 15, 33), 6, (3, 3), (1, 1, 1, 1), groups=6),
    "a kernel longer than any scheme": Layer((1, 3, 40, 60), 8, (11, 21), (5, 5, 10, 10)),
    "one row of taps": Layer((1, 8, 9, 77), 8, (1, 7), (0, 0, 3, 3)),
    "one column of taps": Layer((1, 8, 40, 30), 8, (7, 1), (3, 3, 0, 0)),
    "more channels than a register tile": Layer((2, 70, 9, 10), 53, (3, 3), (1, 1, 1, 1)),
    "one tap": Layer((2, 20, 9, 11), 24, (1, 1)),
    "many small images": Layer((70, 4, 5, 5), 6, (3, 3), (1, 1, 1, 1)),
}

BORDERED = {
    "reflected": Layer((2, 5, 11, 13), 7, (5, 3), (2, 2, 1, 1), border="reflect"),
    "replicated": Layer((2, 5, 11, 13), 7, (3, 5), (1, 1, 6, 2), (1, 2), border="replicate"),
    "circular": Layer((2, 5, 11, 13), 7, (3, 9), (1, 1, 4, 4), border="circular"),
}

STRIDED = {
    "stride 2": Layer((2, 5, 21, 33), 9, (3, 3), (1, 1, 1, 1), stride=(2, 2)),
    "ResNet's first layer in small": Layer((2, 3, 40, 44), 24, (7, 7), (3, 3, 3, 3), stride=(2, 2)),
    "stride and dilation": Layer((1, 4, 41, 37), 6, (3, 5), (2, 2, 3, 3), (4, 3), (6, 2)),
    "a stride that divides the dilation": Layer((1, 5, 30, 64), 8, (3, 3), (4, 4, 4, 4), (2, 4), (2, 2)),
    "a stride longer than the kernel": Layer((2, 8, 19, 64), 8, (1, 2), stride=(2, 5)),
    "AlexNet's first layer in small": Layer((1, 3, 47, 51), 16, (11, 11), (2, 2, 2, 2), stride=(4, 4)),
    "reflected and strided": Layer((1, 4, 21, 22), 8, (5, 5), (2, 2, 2, 2), stride=(3, 2), border="reflect"),
}


def poisoned(shape: tuple[int, ...], layout: str = "contiguous", dtype: torch.dtype = torch.float32) -> Tensor:
    """NaN in a memory layout, gaps between elements included."""

    def full(*size: int) -> Tensor:
        return torch.full(size, torch.nan, dtype=dtype)

    if layout == "contiguous":
        return full(*shape)
    if layout == "offset":
        return full(prod(shape) + 3)[3:].view(shape)
    n, c, h, w = shape
    if layout == "channels_last":
        return full(n, h, w, c).permute(0, 3, 1, 2)
    if layout == "transposed":
        return full(n, c, w, h).transpose(2, 3)
    if layout == "columns_outermost":
        return full(w, h, c, n).permute(3, 2, 1, 0)
    if layout == "window":
        return full(n + 1, c + 3, h + 2, w + 5)[1:, 2:-1, 1:-1, 3:-2]
    assert layout == "sliced"
    return full(n, c + 1, h + 2, 3 * w + 5)[:, 1:, 1:-1, 2 : 3 * w + 2 : 3]


def arranged(values: Tensor, layout: str) -> Tensor:
    """The values in a memory layout; some of them, repeated, if that has strides of 0."""
    if layout == "one scalar":
        return values[:1, :1, :1, :1].expand(values.shape)
    if layout in ("expanded", "one row"):
        return (values[:, :, :1] if layout == "one row" else values[:, :1, :1]).expand(values.shape)
    return poisoned(tuple(values.shape), layout, values.dtype).copy_(values)


def placed(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    return arranged(torch.randn(shape, dtype=dtype), layout)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Per element, relative to it and to the tensor's rms. Unwritten elements are NaN, and fail."""
    scale = expected.square().mean().sqrt().item() if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * max(scale, 1e-30))


@dataclass(frozen=True)
class Run:
    """Tensors of one layer in some memory layouts, with float64 results."""

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
        dw = poisoned(self.layer.w, dtype=self.x.dtype)
        db = poisoned((self.layer.out_channels,), dtype=self.x.dtype) if bias else None
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

    def passes(self, family: str) -> list[Tensor]:
        dw, db = self.wgrad(family)
        assert db is not None
        return [self.fprop(family), self.dgrad(family), dw, db]


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
    return Layer(x, groups * out_per_group, kernel, tuple(padding), dilation, stride, groups, border)


@st.composite
def wide_layers(draw: st.DrawFn) -> Layer:
    """Geometries with images, channels and dilations of more than a vector, some strided."""
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    kernel = draw(st.integers(1, 7)), draw(st.integers(1, 11))
    dilation = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3, 4, 5, 6, 9, 16, 19]))
    stride = (draw(st.integers(1, 4)), draw(st.integers(1, 4))) if draw(st.booleans()) else (1, 1)
    border = draw(st.sampled_from(["zeros", *BORDERS]))
    padding = tuple(draw(st.integers(-2 if border == "zeros" else 0, 6)) for _ in range(4))
    height = max(1, dilation[0] * (kernel[0] - 1) - padding[0] - padding[1] + draw(st.integers(1, 30)))
    width = max(1, dilation[1] * (kernel[1] - 1) - padding[2] - padding[3] + draw(st.integers(1, 120)))
    # A crop leaves at least one row and one column; reflection needs them.
    height = max(height, 5 - min(0, *padding[:2]), 1 if border == "zeros" else 7)
    width = max(width, 5 - min(0, *padding[2:]), 1 if border == "zeros" else 7)
    x = draw(st.integers(1, 3)), groups * draw(st.integers(1, 40)), height, width
    k = groups * draw(st.integers(1, 40))
    return Layer(x, k, kernel, padding, dilation, stride, groups, border)  # type: ignore[arg-type]


def same_bits_for_any_threads(compute: Callable[[], Sequence[Tensor]]) -> None:
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 5, 2):
            torch.set_num_threads(count)
            results.append(compute())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
