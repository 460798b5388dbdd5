"""Convolutions to execute as machine code: named suites, one line per edge case.

``Shape`` is one convolution; all three passes are executed. They are small because the emulator runs every thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from polyconv.cuda.planner.depthwise import strip
from polyconv.lowering.border import Cropped
from polyconv.lowering.lower import lower
from polyconv.problem import Pass, Problem, channels_last_strides, output_size

MODES = ("zeros", "reflect", "replicate", "circular")
Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Shape:
    """One convolution over images or volumes, and the memory layout of its tensors."""

    x: tuple[int, ...]
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0, 0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    bias: bool = True
    mode: str = "zeros"
    layout: str = "contiguous"
    """``contiguous``, ``channels_last``, ``sliced`` (x and dy are windows of larger images) or ``expanded`` (dy)."""

    @property
    def w(self) -> tuple[int, ...]:
        return (self.out_channels, self.x[1] // self.groups, *self.kernel)

    def problem(self, kind: Pass, x: Tensor, w: Tensor, dy: Tensor) -> Problem:
        aligned = x.data_ptr() % 16 == 0 and dy.data_ptr() % 16 == 0
        return Problem.make(
            kind,
            self.x,
            self.w,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            padding_mode=self.mode,
            bias=self.bias,
            x_strides=x.stride(),
            w_strides=w.stride(),
            y_strides=self.y_strides(kind, dy),
            vector_aligned=aligned,
            dtype=str(x.dtype).removeprefix("torch."),
        )

    def lowered(self, kind: Pass, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Problem, Tensor]:
        """The problem that a GPU runs, and its input: a view where a border follows negative padding."""
        problem = self.problem(kind, x, w, dy)
        if isinstance(lowering := lower(problem, "cuda"), Cropped):
            (problem,) = lowering.problems
            for dim, kept in enumerate(lowering.ranges, start=2):
                x = x.narrow(dim, kept.start, len(kept))
        return problem, x

    def y_strides(self, kind: Pass, dy: Tensor) -> tuple[int, ...]:
        """fprop writes a dense y; the gradients read dy in its layout."""
        if kind is not Pass.FPROP:
            return dy.stride()
        shape = tuple(dy.shape)
        return channels_last_strides(shape) if self.layout == "channels_last" else torch.empty(shape).stride()

    def tensors(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """x, w, bias, dy: standard normal, with w scaled so that outputs are of order one."""

        def randn(*size: int) -> Tensor:
            return torch.randn(size).to(dtype)

        n, c, *size = self.x
        w = randn(*self.w) / prod(self.w[1:]) ** 0.5
        bias = randn(self.out_channels) if self.bias else None
        y = (n, self.out_channels, *output_size(size, self.kernel, self))
        if self.layout == "channels_last":
            last = torch.channels_last if len(size) == 2 else torch.channels_last_3d
            return (
                randn(*self.x).to(memory_format=last),
                w.to(memory_format=last),
                bias,
                randn(*y).to(memory_format=last),
            )
        if self.layout == "sliced":
            (h, wd), (r, s) = size, self.kernel
            x = randn(n, c + 1, h + 2, wd + 3)[:, 1:, 1:-1, 2:-1]
            return x, randn(w.shape[0], w.shape[1], r, s + 1)[..., 1:] * 0.2, bias, randn(*y, 2)[..., 1]
        if self.layout == "expanded":
            return randn(*self.x), w, bias, randn().expand(y)
        return randn(*self.x), w, bias, randn(*y)


def same(r: int, s: int, dh: int = 1, dw: int = 1) -> tuple[int, int, int, int]:
    """torch's "same" padding: an odd pixel goes after."""
    h, w = dh * (r - 1), dw * (s - 1)
    return (h // 2, h - h // 2, w // 2, w - w // 2)


EDGES = {
    "one pixel, one channel": Shape((1, 1, 1, 1), 1, (1, 1)),
    "kernel as large as the image": Shape((2, 8, 5, 7), 4, (5, 7)),
    "kernel larger than the image, padded": Shape((1, 8, 3, 3), 9, (7, 5), padding=(3, 3, 2, 2)),
    "last tile of pixels ragged": Shape((1, 8, 13, 11), 8, (3, 3), padding=(1, 1, 1, 1)),
    "exactly one tile": Shape((1, 8, 8, 16), 64, (1, 1)),
    "tiles across images": Shape((7, 8, 5, 5), 16, (3, 3), padding=(1, 1, 1, 1)),
    "channels not a multiple of eight": Shape((1, 13, 9, 9), 11, (3, 3), padding=(1, 1, 1, 1)),
    "channels a multiple of eight": Shape((1, 24, 9, 9), 40, (3, 3), padding=(1, 1, 1, 1)),
    "more than one channel tile": Shape((1, 16, 6, 6), 200, (3, 3), padding=(1, 1, 1, 1), bias=False),
    "long row": Shape((1, 8, 1, 300), 8, (1, 9), padding=(0, 0, 4, 4)),
    "long column": Shape((1, 8, 300, 1), 8, (9, 1), padding=(4, 4, 0, 0)),
    "even kernel, same": Shape((2, 8, 9, 8), 8, (4, 2), padding=same(4, 2)),
    "five by nine, dilated": Shape((1, 32, 14, 30), 64, (5, 9), padding=(2, 2, 4, 4), dilation=(2, 3)),
    "dilation wider than the image": Shape((1, 8, 7, 7), 8, (3, 3), padding=(9, 9, 9, 9), dilation=(9, 9)),
    "stride two, odd": Shape((2, 8, 11, 9), 8, (3, 3), stride=(2, 2), padding=(1, 1, 1, 1)),
    "stride two, even": Shape((2, 8, 12, 8), 8, (3, 3), stride=(2, 2), padding=(1, 1, 1, 1)),
    "stride three by two": Shape((1, 8, 13, 10), 8, (5, 4), stride=(3, 2), padding=(2, 1, 0, 3)),
    "stride larger than the kernel": Shape((1, 8, 17, 16), 8, (2, 3), stride=(5, 4)),
    "stride and dilation with a common factor": Shape((1, 8, 17, 19), 8, (3, 3), stride=(4, 6), dilation=(2, 4)),
    "stride beyond one launch's phases": Shape((1, 8, 31, 23), 8, (3, 3), stride=(11, 9), padding=(1, 1, 1, 1)),
    "eleven by eleven, stride four, three channels": Shape((1, 3, 39, 39), 96, (11, 11), (4, 4), (2, 2, 2, 2)),
    "different padding on each side": Shape((1, 8, 9, 9), 8, (3, 3), padding=(0, 3, 2, 1)),
    "cropped": Shape((2, 8, 12, 11), 8, (3, 3), padding=(-2, 1, 1, -3)),
    "rows of padding only": Shape((1, 8, 4, 4), 8, (3, 3), padding=(5, 5, 0, 0)),
    "no bias": Shape((1, 8, 9, 9), 8, (3, 3), bias=False),
    "two groups": Shape((2, 16, 8, 8), 24, (3, 3), padding=(1, 1, 1, 1), groups=2),
    "groups of one input channel pair": Shape((1, 12, 8, 8), 18, (3, 3), groups=6),
    "resnext groups": Shape((1, 64, 8, 8), 64, (3, 3), padding=(1, 1, 1, 1), groups=8),
    "groups, strided, dilated": Shape((1, 16, 15, 14), 16, (3, 2), (2, 3), (2, 2, 1, 1), (2, 1), groups=4),
    "pointwise": Shape((2, 24, 8, 6), 40, (1, 1)),
    "pointwise, ragged": Shape((2, 13, 7, 5), 9, (1, 1)),
    "pointwise, strided": Shape((2, 16, 9, 9), 16, (1, 1), stride=(2, 2)),
    "pointwise, padded": Shape((2, 16, 7, 5), 16, (1, 1), padding=(1, 1, 1, 1)),
    "channels_last": Shape((2, 16, 9, 9), 24, (3, 3), padding=(1, 1, 1, 1), layout="channels_last"),
    "channels_last, odd channels": Shape((2, 5, 9, 9), 7, (3, 3), padding=(1, 1, 1, 1), layout="channels_last"),
    "channels_last, strided": Shape((1, 8, 9, 9), 8, (3, 3), (2, 2), (1, 1, 1, 1), layout="channels_last"),
    "channels_last, groups": Shape((1, 16, 9, 9), 16, (3, 3), padding=(1, 1, 1, 1), groups=2, layout="channels_last"),
    "windows of larger tensors": Shape((2, 8, 9, 9), 8, (3, 3), padding=(1, 1, 1, 1), layout="sliced"),
    "gradient of a sum": Shape((2, 8, 9, 9), 8, (3, 3), padding=(1, 1, 1, 1), layout="expanded"),
    "gradient of a sum, pointwise": Shape((2, 16, 8, 8), 8, (1, 1), layout="expanded"),
}

DEPTHWISE = {
    "3x3": Shape((2, 5, 17, 19), 5, (3, 3), padding=(1, 1, 1, 1), groups=5),
    "multiplier two": Shape((2, 4, 9, 10), 8, (3, 3), padding=(1, 1, 1, 1), groups=4),
    "multiplier three, strided": Shape((1, 3, 20, 21), 9, (5, 3), (2, 3), (2, 2, 1, 1), groups=3),
    "many images": Shape((9, 3, 8, 8), 3, (3, 3), padding=(1, 1, 1, 1), groups=3),
    "5x5 stride two": Shape((2, 4, 23, 22), 4, (5, 5), stride=(2, 2), padding=(2, 2, 2, 2), groups=4),
    "7x7": Shape((1, 3, 20, 20), 3, (7, 7), padding=(3, 3, 3, 3), groups=3),
    "31x31": Shape((1, 2, 36, 36), 2, (31, 31), padding=(15, 15, 15, 15), groups=2),
    "3x1": Shape((2, 4, 40, 33), 4, (3, 1), groups=4, bias=False),
    "3x7, no padding": Shape((1, 3, 18, 70), 3, (3, 7), groups=3, bias=False),
    "5x5": Shape((2, 3, 19, 11), 3, (5, 5), padding=(2, 2, 2, 2), groups=3),
    "1x5 and one row": Shape((3, 2, 1, 37), 2, (1, 5), padding=(0, 0, 2, 2), groups=2),
    "1x3, no bias": Shape((1, 3, 9, 8), 3, (1, 3), groups=3, bias=False),
    "5x1 and one column": Shape((2, 3, 70, 1), 3, (5, 1), padding=(4, 4, 0, 0), groups=3),
    "7x3": Shape((1, 4, 12, 9), 4, (7, 3), padding=(3, 3, 1, 1), groups=4),
    "3x3 stride two, odd padding": Shape((2, 3, 14, 17), 3, (3, 3), (2, 2), (1, 0, 0, 1), groups=3),
    "3x3 stride two, cropped": Shape((1, 3, 15, 18), 3, (3, 3), (2, 2), (-3, 1, -1, 2), groups=3),
    "stride two beyond the image": Shape((1, 2, 4, 5), 2, (5, 5), (2, 2), (6, 7, 5, 8), groups=2),
    "taller than a strip": Shape((1, 2, 131, 5), 2, (3, 3), padding=(1, 1, 1, 1), groups=2),
    "dilation 6": Shape((1, 3, 33, 33), 3, (3, 3), padding=(6, 6, 6, 6), dilation=(6, 6), groups=3),
    "dilation 18": Shape((1, 2, 33, 33), 2, (3, 3), padding=(18, 18, 18, 18), dilation=(18, 18), groups=2),
    "halo too large for a tile": Shape((1, 2, 70, 150), 2, (3, 3), (1, 1), (40, 40, 99, 99), (40, 99), groups=2),
    "stride three, dilation two": Shape((1, 3, 25, 26), 3, (3, 4), (3, 3), (2, 1, 0, 3), (2, 2), groups=3),
    "stride nine": Shape((1, 2, 40, 40), 2, (3, 3), (9, 9), (1, 1, 1, 1), groups=2),
    "channels_last": Shape((2, 6, 9, 9), 6, (3, 3), padding=(1, 1, 1, 1), groups=6, layout="channels_last"),
    "channels_last, 7x7": Shape((1, 33, 8, 9), 33, (7, 7), padding=(3, 3, 3, 3), groups=33, layout="channels_last"),
    "channels_last, 5x5 stride two": Shape(
        (1, 35, 11, 10), 35, (5, 5), (2, 2), (2, 1, 0, 3), groups=35, layout="channels_last"
    ),
    "channels_last, multiplier": Shape(
        (2, 6, 9, 7), 12, (3, 3), padding=(1, 1, 1, 1), groups=6, layout="channels_last"
    ),
    "windows": Shape((2, 4, 9, 9), 4, (3, 3), padding=(1, 1, 1, 1), groups=4, layout="sliced"),
    "gradient of a sum": Shape((2, 4, 9, 9), 4, (3, 3), padding=(1, 1, 1, 1), groups=4, layout="expanded"),
    "cropped": Shape((1, 3, 20, 20), 3, (3, 3), padding=(-3, 1, 2, -4), groups=3),
}

_BORDER = {
    "dense": Shape((2, 8, 7, 9), 8, (3, 3), padding=(1, 1, 1, 1)),
    "odd channels, all sides": Shape((1, 5, 8, 7), 6, (3, 4), padding=(1, 3, 2, 4)),
    "as wide as allowed": Shape((1, 4, 5, 6), 4, (3, 3), padding=(4, 4, 5, 5)),
    "strided": Shape((1, 4, 9, 10), 4, (3, 3), stride=(2, 3), padding=(2, 1, 3, 2)),
    "dilated": Shape((1, 4, 9, 10), 4, (3, 2), padding=(4, 4, 3, 3), dilation=(4, 3)),
    "groups": Shape((1, 8, 7, 7), 8, (3, 3), padding=(1, 1, 1, 1), groups=2),
    "depthwise": Shape((2, 4, 9, 10), 4, (3, 3), padding=(2, 2, 2, 2), groups=4),
    "depthwise, strided": Shape((1, 3, 12, 13), 6, (3, 5), (2, 2), (1, 2, 3, 4), groups=3),
    "one row": Shape((1, 4, 2, 12), 4, (1, 3), padding=(1, 1, 1, 1)),
    "cropped on one side": Shape((1, 4, 9, 9), 4, (3, 3), padding=(-2, 2, 3, -1)),
    "channels_last": Shape((1, 8, 7, 7), 8, (3, 3), padding=(1, 1, 1, 1), layout="channels_last"),
}
BORDERS = {f"{mode}, {name}": replace(shape, mode=mode) for mode in MODES[1:] for name, shape in _BORDER.items()} | {
    "replicate, one pixel": Shape((1, 4, 1, 1), 4, (3, 3), padding=(3, 2, 2, 4), mode="replicate"),
    "circular, twice the image": Shape((1, 4, 3, 4), 4, (3, 3), padding=(3, 3, 4, 4), mode="circular"),
}

KERNELBENCH = {
    "kb50": Shape((2, 3, 27, 27), 96, (11, 11), (4, 4), (2, 2, 2, 2)),
    "kb55": Shape((1, 64, 6, 14), 128, (3, 3), bias=False),
    "kb56": Shape((1, 64, 8, 12), 128, (5, 7), bias=False),
    "kb62": Shape((1, 32, 9, 20), 64, (5, 9), bias=False),
    "kb63": Shape((2, 16, 12, 14), 128, (3, 3), bias=False),
    "kb80": Shape((1, 32, 13, 29), 64, (5, 9), padding=(2, 2, 4, 4), dilation=(2, 3), bias=False),
    "kb82": Shape((1, 64, 18, 20), 64, (3, 3), groups=64, bias=False),
    "kb83": Shape((3, 8, 34, 21), 8, (3, 1), groups=8, bias=False),
    "kb84": Shape((1, 128, 10, 20), 128, (3, 3), groups=128, bias=False),
    "kb85": Shape((1, 128, 9, 24), 128, (3, 7), groups=128, bias=False),
    "kb86": Shape((1, 64, 17, 18), 64, (3, 3), padding=(1, 1, 1, 1), groups=64, bias=False),
    "kb86 pointwise": Shape((1, 64, 17, 18), 128, (1, 1), bias=False),
    "kb87": Shape((1, 64, 12, 17), 128, (1, 1), bias=False),
}
"""The twelve Conv2d problems of KernelBench with all channels and a smaller image."""

SUITES = {"edges": EDGES, "depthwise": DEPTHWISE, "borders": BORDERS, "kernelbench": KERNELBENCH}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any convolution small enough for the emulator."""
    kernel = (draw(st.integers(1, 5)), draw(st.integers(1, 6)))
    dilation = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    stride = (draw(st.sampled_from([1, 1, 1, 2, 3, 4])), draw(st.sampled_from([1, 1, 1, 2, 3, 5])))
    mode = draw(st.sampled_from(["zeros", *MODES]))
    kind = draw(st.sampled_from(["dense", "dense", "grouped", "depthwise"]))
    if kind == "dense":
        groups, channels, outputs = 1, draw(st.sampled_from([1, 2, 3, 5, 8, 12, 16, 24])), draw(st.integers(1, 40))
    elif kind == "grouped":
        groups = draw(st.integers(2, 4))
        channels, outputs = draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(1, 9))
    else:
        groups, channels, outputs = draw(st.integers(2, 6)), 1, draw(st.integers(1, 3))
        if draw(st.booleans()):  # a kernel size with its own instances
            (_, each), kernels = draw(st.sampled_from(list(strip.KERNELS.items())))
            kernel, stride, dilation, outputs = draw(st.sampled_from(kernels)), (each, each), (1, 1), 1
    size, sides = [], []
    for axis in (0, 1):
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        before, after = draw(st.integers(-2, 6)), draw(st.integers(-2, 6))
        crop = max(-before, 0) + max(-after, 0)
        least = max(1, reach - before - after, crop + 1)
        if mode != "zeros":
            least = max(least, crop + max(before, after, 0) + 1)
        size.append(least + draw(st.integers(0, 12)))
        sides += [before, after]
    return Shape(
        (draw(st.integers(1, 3)), groups * channels, *size),
        groups * outputs,
        kernel,
        stride,
        (sides[0], sides[1], sides[2], sides[3]),
        dilation,
        groups,
        draw(st.booleans()),
        mode,
        draw(st.sampled_from(["contiguous", "contiguous", "channels_last", "sliced", "expanded"])),
    )


@st.composite
def zero_bordered(
    draw: st.DrawFn,
    channels: st.SearchStrategy[int],
    outputs: st.SearchStrategy[int],
    taps: tuple[int, int] = (7, 10),
    strides: tuple[tuple[int, ...], tuple[int, ...]] = ((1, 1, 1, 2, 3), (1, 1, 1, 2, 4)),
) -> Shape:
    """A small convolution for fast kernels, with these channels per group on both sides, at most these taps, and one of
    these strides along either axis."""
    kernel = (draw(st.integers(1, taps[0])), draw(st.integers(1, taps[1])))
    dilation = (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    stride = (draw(st.sampled_from(strides[0])), draw(st.sampled_from(strides[1])))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    of_source, of_result = draw(channels), draw(outputs)
    size, sides = [], []
    for axis in (0, 1):
        reach = dilation[axis] * (kernel[axis] - 1) + 1
        before, after = draw(st.integers(-2, 6)), draw(st.integers(-2, 6))
        least = max(1, reach - before - after, max(-before, 0) + max(-after, 0) + 1)
        size.append(least + draw(st.integers(0, 9)))
        sides += [before, after]
    return Shape(
        (draw(st.integers(1, 3)), groups * of_source, size[0], size[1]),
        groups * of_result,
        kernel,
        stride,
        (sides[0], sides[1], sides[2], sides[3]),
        dilation,
        groups,
        draw(st.booleans()),
        "zeros",
        draw(st.sampled_from(["contiguous", "contiguous", "channels_last", "sliced", "expanded"])),
    )


def explore(drawn: st.SearchStrategy[Drawn], run: Callable[[Drawn], object], *, part: int = 0, each: int) -> None:
    """Runs this many random geometries, the same every time, in parts for several test workers."""

    @seed(part)
    @settings(max_examples=each, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(drawn)
    def explored(one: Drawn) -> None:
        torch.manual_seed(part)
        run(one)

    explored()


def geometries_of(drawn: st.SearchStrategy[Drawn], *, parts: int, each: int) -> set[Drawn]:
    """Parameters of the parts, each geometry once."""
    found: set[Drawn] = set()
    for part in range(parts):
        explore(drawn, found.add, part=part, each=each)
    return found
