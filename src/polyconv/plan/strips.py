"""Plans for depthwise convolutions with common kernels: one thread per strip of rows, bound by memory alone.

Forward and input gradient are kernels/depthwise_strip.cuh; the input gradient of a strided convolution is
kernels/depthwise_scatter.cuh; the weight gradient is kernels/depthwise_strip_wgrad.cuh. Whatever these refuse is left
to the general kernels of plan/depthwise.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from ..problem import PaddingMode, Pair, Pass, Problem
from . import layout
from .cost import LAUNCH_US, memory_us
from .depthwise import MOST_CHANNELS
from .device import CudaDevice
from .errors import int32
from .gather import Roles, pixel_strides, roles, round_up
from .layout import DIVIDEND_LIMIT, FastDivisor, StripParams, StripWgradParams
from .plan import KernelSpec, Launch, Schedule
from .wgrad import reduction

THREADS = 128
MOST_ROWS = 64
"""Rows of a strip: its halo rows, which the strip below reads again, are few among so many."""
LEAST_ROWS = 4
KERNELS: dict[int, tuple[Pair, ...]] = {
    1: ((3, 3), (5, 5), (7, 7), (3, 1), (1, 3), (5, 1), (1, 5), (3, 7), (7, 3)),
    2: ((3, 3), (5, 5)),
}
"""Stride along both axes -> the kernels that are compiled for it."""


@dataclass(frozen=True, slots=True)
class Strips:
    """What fprop and dgrad share: one thread per column of a strip."""

    taps: Pair
    stride: int
    scatters: bool
    """dgrad of a strided convolution: each position writes a cell of stride x stride elements."""

    @property
    def name(self) -> str:
        return self.kernel.symbol

    @property
    def direct(self) -> bool:
        return True

    @property
    def kernel(self) -> KernelSpec:
        (h, w), stem = self.taps, "depthwise_scatter" if self.scatters else "depthwise_strip"
        return KernelSpec(
            stem=stem,
            symbol=f"{stem}_{h}x{w}" + f"_stride{self.stride}" * (self.stride > 1),
            body=f"polyconv::{stem}<{h}, {w}, {self.stride}>(params);",
            params="polyconv::StripParams",
            params_bytes=ctypes.sizeof(StripParams),
            threads=THREADS,
            min_blocks=8 if h * w <= 25 else 5,
        )

    def refusal(self, problem: Problem) -> str | None:
        reason = _refusal(problem, self.taps, self.stride)
        if reason is not None:
            return reason
        if self.scatters != (problem.kind is Pass.DGRAD and self.stride > 1):
            return "only the gradient of a strided convolution is scattered"
        if problem.kind is Pass.DGRAD and problem.channels_per_group[1] > 1:
            return "the gradient of a channel sums over several outputs"
        rows, columns = self._positions(problem)
        planes = problem.batch * problem.groups * roles(problem).outputs
        if planes * columns * -(-rows // LEAST_ROWS) >= DIVIDEND_LIMIT:
            return "too many strips to number"
        return None

    def _positions(self, problem: Problem) -> Pair:
        """Positions along a column and along a row: written elements, or cells of them."""
        if not self.scatters:
            return roles(problem).written_size
        (height, width), (top, _, left, _) = problem.in_size, problem.padding
        first_h, first_w = top // self.stride, left // self.stride
        return (height - 1 + top) // self.stride - first_h + 1, (width - 1 + left) // self.stride - first_w + 1

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The one launch; no workspace."""
        r = roles(problem)
        channels = problem.groups * r.outputs
        rows, columns = self._positions(problem)
        p = StripParams(rows=rows, rows_per_strip=rows_per_strip(rows, columns * problem.batch * channels, sms))
        row_strips = -(-rows // p.rows_per_strip)
        p.strips = int32(columns * row_strips * problem.batch * channels, "the number of strips")
        p.source_batch, p.source_channel = r.source_strides[:2]
        p.written_batch, p.written_channel = r.written_strides[:2]
        p.source_row, p.written_row = (
            pixel_strides(r.source_strides, r.source)[0],
            pixel_strides(r.written_strides, r.written)[0],
        )
        p.source_height, p.source_width = r.source_size
        p.written_height, p.written_width = r.written_size
        p.w_channel, p.w_row, p.w_column = problem.w_strides[0], problem.w_strides[2], problem.w_strides[3]
        top, _, left, _ = problem.padding
        if self.scatters:
            p.first_row, p.first_column = top // self.stride, left // self.stride
            p.cell_row, p.cell_column = p.first_row * self.stride - top, p.first_column * self.stride - left
        elif problem.kind is Pass.DGRAD:
            # Taps run against the outputs: the last one meets the first output.
            last_h, last_w = self.taps[0] - 1, self.taps[1] - 1
            p.first_row, p.first_column = top - last_h, left - last_w
            p.w_first = last_h * p.w_row + last_w * p.w_column
            p.w_row, p.w_column = -p.w_row, -p.w_column
        else:
            p.first_row, p.first_column = -top, -left
        p.columns, p.row_strips = FastDivisor.of(columns), FastDivisor.of(row_strips)
        p.channels, p.multiplier = FastDivisor.of(channels), FastDivisor.of(r.outputs)
        where = {"source": r.source, "w": "w", "written": r.written}
        if problem.kind is Pass.FPROP and problem.bias:
            where["bias"] = "bias"
        grid = (-(-p.strips // THREADS), 1, 1)
        launch = Launch(self.kernel, grid, (THREADS, 1, 1), 0, bytes(p), layout.slots(StripParams, **where))
        return Schedule((launch,), 0, (self.taps[0] * self.taps[1] + problem.bias,))


def _refusal(problem: Problem, taps: Pair, stride: int) -> str | None:
    if not problem.depthwise:
        return f"{problem.in_channels} input channels in {problem.groups} groups are not depthwise"
    if problem.kernel != taps or problem.stride != (stride, stride):
        return f"made for a kernel of {taps[0]}x{taps[1]} with stride {stride}"
    if any(step > 1 and extent > 1 for step, extent in zip(problem.dilation, taps)):
        return "the taps are not neighbours"
    if problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding):
        return f"a {problem.padding_mode} border"
    if any(strides[3] != 1 for strides in (problem.x_strides, problem.y_strides)):
        return "columns are not neighbours in memory"
    return None


def rows_per_strip(rows: int, columns: int, sms: int) -> int:
    """Rows of a strip, all alike: as many as allowed, but enough strips (of so many columns) to fill the device."""
    most = min(MOST_ROWS, max(LEAST_ROWS, rows * columns // (8 * 1024 * sms)))
    return -(-rows // -(-rows // most))


@dataclass(frozen=True, slots=True)
class StripsWgrad:
    """The weight gradient: all taps at once, one thread per column of a strip."""

    taps: Pair
    stride: int

    @property
    def name(self) -> str:
        return self.kernel.symbol

    @property
    def direct(self) -> bool:
        return True

    @property
    def kernel(self) -> KernelSpec:
        h, w = self.taps
        return KernelSpec(
            stem="depthwise_strip_wgrad",
            symbol=f"depthwise_strip_wgrad_{h}x{w}" + f"_stride{self.stride}" * (self.stride > 1),
            body=f"polyconv::depthwise_strip_wgrad<{h}, {w}, {self.stride}, {THREADS}>(params);",
            params="polyconv::StripWgradParams",
            params_bytes=ctypes.sizeof(StripWgradParams),
            threads=THREADS,
            min_blocks=8 if h * w <= 9 else 5 if h * w <= 25 else 3,
        )

    def refusal(self, problem: Problem) -> str | None:
        reason = _refusal(problem, self.taps, self.stride)
        if reason is None and problem.out_channels > MOST_CHANNELS:
            reason = f"more than {MOST_CHANNELS} channels"
        if reason is None and problem.batch * problem.out_size[1] * problem.out_size[0] >= DIVIDEND_LIMIT:
            reason = "too many strips to number"
        return reason

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The partial sums, then their reduction."""
        area = self.taps[0] * self.taps[1]
        columns_padded = round_up(area + problem.bias, 4)
        (rows, columns), channels = problem.out_size, problem.out_channels
        p = StripWgradParams(height=problem.in_size[0], width=problem.in_size[1], channels=channels)
        p.rows, p.rows_per_strip = rows, rows_per_strip(rows, columns * problem.batch * channels, sms)
        row_strips = -(-rows // p.rows_per_strip)
        p.columns_padded, p.bias = columns_padded, problem.bias
        p.x_batch, p.x_channel = problem.x_strides[:2]
        p.dy_batch, p.dy_channel = problem.y_strides[:2]
        p.x_row, p.dy_row = (
            pixel_strides(problem.x_strides, "x")[0],
            pixel_strides(problem.y_strides, "the gradient of y")[0],
        )
        p.pad_top, p.pad_left = problem.padding[0], problem.padding[2]
        p.columns, p.row_strips = FastDivisor.of(columns), FastDivisor.of(row_strips)
        p.multiplier = FastDivisor.of(problem.channels_per_group[1])
        p.strips = problem.batch * row_strips * columns
        # Rounds of a block: as many as leave sixteen blocks per multiprocessor, and partial sums that fit the workspace.
        rounds = -(-p.strips // THREADS)
        most = max(1, min(workspace // (4 * channels * columns_padded), -(-16 * sms // channels)))
        p.strips_per_slice = THREADS * -(-rounds // most)
        slices = -(-p.strips // p.strips_per_slice)
        where = {"x": "x", "dy": "y", "partial": "workspace"}
        slots = layout.slots(StripWgradParams, **where)
        first = Launch(self.kernel, (slices, channels, 1), (THREADS, 1, 1), 0, bytes(p), slots)
        second = reduction(problem, slices, area, columns_padded)
        in_thread = p.rows_per_strip * (p.strips_per_slice // THREADS)
        sums = (in_thread, 2, 2, 2, 2, 2, THREADS // 32, slices)
        return Schedule((first, second), 4 * slices * channels * columns_padded, sums)
