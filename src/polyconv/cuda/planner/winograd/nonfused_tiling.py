"""Sizes of one chain of nonfused launches: how the four kernels of winograd/nonfused_layout.cuh cut their work."""

from __future__ import annotations

from dataclasses import dataclass

from ....algebra.polyphase import DenseAxis
from ....problem import Problem
from ....util.intmath import ceil_div, round_up
from ..implicit_gemm.fprop_dgrad import roles
from ..kernel_params import DIVIDEND_LIMIT
from .axis import ToomAxis

CHUNK = 8
"""Channels that winograd/nonfused_gemm.cuh sums between two barriers."""
INVERSE_THREADS = 128
USUAL_SHARED = 96 * 1024
"""Shared memory per multiprocessor that the launch bound assumes [bytes]. Only Turing (T4) has less: 64 KiB."""
STRETCH_VECTORS = 256
"""Most vectors of a channel per block of winograd/nonfused_output.cuh."""
SLABS_TRIED = 48
"""Most slab sizes that are compared."""


def segments_of(axis: ToomAxis, taps: int) -> int:
    """Segments that an algorithm cuts ``taps`` into: all of m taps but the last, which may have ``longest``."""
    if axis.tiles > 1:
        return len(axis.segments)
    return 1 if taps <= axis.longest else ceil_div(taps - axis.longest, axis.m) + 1


def columns_of(k_tile: int) -> int:
    """Columns per block of winograd/nonfused_gemm.cuh (``kU``)."""
    return 2048 // k_tile


def gemm_shared(w: ToomAxis, k_tile: int) -> int:
    """Shared memory [bytes] (4 * ``kSharedFloats`` in winograd/nonfused_gemm.cuh)."""
    columns = columns_of(k_tile)
    rows = k_tile // 8 * (2 if columns == 128 or w.points < 8 else 4)
    return 4 * w.points * (2 * CHUNK * columns + 2 * CHUNK * k_tile + rows * columns)


def gemm_blocks(w: ToomAxis, k_tile: int, shared_per_sm: int = USUAL_SHARED) -> int:
    """Blocks per multiprocessor: few points make small blocks, two of which load the four schedulers evenly."""
    return 2 if w.points <= 6 and 2 * gemm_shared(w, k_tile) <= shared_per_sm else 1


@dataclass(frozen=True, slots=True)
class Stretches:
    """Cut of a row of outputs for the blocks of winograd/nonfused_output.cuh."""

    count: int
    """Stretches of a row."""
    columns: int
    """Columns of a stretch."""
    lines: int
    """Written channels per block."""
    line_blocks: int
    """Blocks for all written channels of a stretch."""


class Chain:
    """Sizes of the launches for one pair of phases. A plain class because every candidate has one: it is constructed in
    a few microseconds."""

    def __init__(self, problem: Problem, h: DenseAxis, w: DenseAxis, along_h: ToomAxis, along_w: ToomAxis, k_tile: int):
        r = roles(problem)
        self.h, self.w, self.along_h, self.along_w, self.k_tile = h, w, along_h, along_w, k_tile
        self.batch, self.groups, self.channels, self.outputs = problem.batch, problem.groups, r.channels, r.outputs
        self.segments_h, self.segments_w = segments_of(along_h, h.taps), segments_of(along_w, w.taps)
        self.passes = along_w.passes if along_w.tiles > 1 else self.segments_w
        # Channels of a group, times tap classes and segments.
        self.parts_h = len(h.classes) * self.segments_h
        self.channels_all = self.parts_h * len(w.classes) * r.channels
        self.chunks = ceil_div(self.channels_all, CHUNK)
        # Tiles along H of one residue of the dilation of one image, and of all.
        self.tiles_h = ceil_div(h.count, h.dilation * along_h.m)
        self.rows = problem.batch * h.dilation * self.tiles_h
        self.units = ceil_div(w.count, w.dilation * along_w.outputs)
        self.row_columns = self.units * w.dilation
        # Columns of X: those of the outputs, and those that the last unit reads beyond itself. Odd unless few, so that
        # the points of H do not all lie in one memory bank.
        last = along_w.points - 1 + (self.passes - 1) * along_w.m
        columns = self.row_columns + last // along_w.outputs * w.dilation
        self.pitch = columns | 1 if columns >= 16 else columns
        # Vectors of a channel of a row of X, and floats of a whole row.
        self.vectors = along_w.tiles * self.pitch
        self.row_stride = along_h.points * problem.groups * self.chunks * CHUNK * self.vectors * along_w.m
        self.k_tiles = ceil_div(r.outputs, k_tile)
        self.columns_each = columns_of(k_tile)
        self.products = along_h.points * problem.groups * self.k_tiles
        slice_floats = self.chunks * CHUNK * self.passes * along_w.points * k_tile
        self.weight_bytes = round_up(4 * self.products * slice_floats, 256)

    def source_bytes(self, rows: int) -> int:
        """Bytes of X of a slab."""
        return round_up(4 * rows * self.row_stride, 256)

    def column_tiles(self, rows: int) -> int:
        """Column tiles of winograd/nonfused_gemm.cuh in a slab."""
        return ceil_div(rows * self.row_columns, self.columns_each)

    def columns_filled(self, rows: int) -> int:
        """Columns of Y: whole tiles plus 8, so that the points of H do not all lie in one memory bank."""
        return self.column_tiles(rows) * self.columns_each + 8

    def written_bytes(self, rows: int) -> int:
        """Bytes of Y of a slab."""
        each = self.along_h.points * self.groups * self.outputs * self.along_w.outputs
        return round_up(4 * each * self.columns_filled(rows), 256)

    def gemm_tiles(self, rows: int) -> int:
        """Tiles of winograd/nonfused_gemm.cuh in a slab."""
        return self.products * self.column_tiles(rows)

    def items(self, rows: int) -> int:
        """Threads of winograd/nonfused_input.cuh that have work in a slab."""
        return rows * self.groups * self.chunks * CHUNK * self.vectors * self.along_w.m

    def bytes_of(self, rows: int) -> int:
        return self.weight_bytes + self.source_bytes(rows) + self.written_bytes(rows)

    def most_rows(self, workspace: int) -> int:
        """Rows of the largest slab that fits; 0 if not even one row does."""
        per_row = (self.bytes_of(64) - self.weight_bytes) // 64
        rows = min(self.rows, max(0, workspace - self.weight_bytes) // per_row + 1, DIVIDEND_LIMIT // self.row_stride)
        while rows > 0 and self.bytes_of(rows) > workspace:
            rows -= 1
        return rows

    def slab_rows(self, blocks: int, workspace: int) -> int:
        """Rows of a slab with the fewest rounds of the persistent blocks, each launch counted as one more round."""
        most = self.most_rows(workspace)
        least = ceil_div(self.gemm_tiles(self.rows), blocks)  # least rounds, however the rows are cut
        best, fewest = most, 0
        for rows in range(most, most // 2, -max(1, most // SLABS_TRIED)):
            slabs, left = divmod(self.rows, rows)
            launched = slabs + (left > 0)
            if fewest and least + launched >= fewest:
                break  # smaller slabs only add launches
            each = ceil_div(self.gemm_tiles(rows), blocks)
            last = ceil_div(self.gemm_tiles(left), blocks) if left else 0
            rounds = slabs * each + last + launched
            if not fewest or rounds < fewest:
                best, fewest = rows, rounds
        return best

    def stretches(self) -> Stretches:
        parts = self.along_w.tiles
        units = ceil_div(self.units, ceil_div(parts * self.row_columns, STRETCH_VECTORS))
        columns = units * self.w.dilation
        lines = min(self.outputs, max(1, INVERSE_THREADS // (parts * columns)))
        return Stretches(ceil_div(self.units, units), columns, lines, ceil_div(self.outputs, lines))
