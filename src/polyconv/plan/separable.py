"""Plans for fprop and dgrad by fast algorithms in both axes, one after the other (kernels/half_layout.cuh).

Four kernels: the weights are transformed along both axes; the source along H, to memory; per point of H a matrix
product transforms along W on the way in and back on the way out; the last one transforms back along H. What lies
between them takes memory, so tiles of rows are worked off in slabs that fit the workspace.

A kernel instance knows the inner algorithm of an axis and whether two segments are nested. How many segments the taps
make is a number: along W they are further steps of the same sum, along H further channels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..algebra.lattice import DenseAxis, Phase, TapClass, dense_axis
from ..problem import PaddingMode, Pass, Problem
from . import gather, layout
from .epilogue import kernel_with_epilogue, with_epilogue
from .errors import int32
from .gather import Roles, pixel_strides
from .layout import (
    DIVIDEND_LIMIT,
    MAX_PARTS,
    FastDivisor,
    HalfGemmParams,
    HalfInverseParams,
    HalfTransformParams,
    SourcePart,
    TapPart,
    TransformWeightsParams,
)
from .plan import KernelSpec, Launch, Schedule, Work
from .rounding import round_up
from .toom import ToomAxis

CHUNK = 8
"""Channels that half_gemm.cuh sums between two barriers."""
THREADS = 256
"""Of the kernels that only move and transform."""
INVERSE_THREADS = 128
LEAST_SHARED = 96 * 1024
"""Bytes of shared memory that a multiprocessor has at least."""
STRETCH_VECTORS = 256
"""Vectors of a channel that a block of half_inverse.cuh takes at most."""
WEIGHT_THREADS = 32 * CHUNK
SLABS_TRIED = 48
"""Sizes of a slab that are weighed at most."""

DIRECT = ToomAxis(1, (1,))
F23 = ToomAxis(2, (3,))
F43 = ToomAxis(4, (3,))
F45 = ToomAxis(4, (5,))
F45_NESTED = ToomAxis(4, (4, 5), 2)
H_AXES = (DIRECT, F23, F43, F45)
W_AXES = (F23, F43, F45, F45_NESTED)


def k_tiles(w: ToomAxis) -> tuple[int, ...]:
    """Written channels per block of the matrix product. Two sets of accumulators leave no registers for the least."""
    return (64, 32) if w.tiles > 1 else (64, 32, 16)


def segments_of(axis: ToomAxis, taps: int) -> int:
    """Segments that an algorithm cuts so many taps into: all of m taps but the last, which may have ``longest``."""
    if axis.tiles > 1:
        return len(axis.segments)
    return 1 if taps <= axis.longest else -(-(taps - axis.longest) // axis.m) + 1


def fitted(axis: ToomAxis, taps: int) -> ToomAxis:
    """What an instance does with so many taps; fewer than its algorithm takes are filled up with zeros."""
    count = segments_of(axis, taps)
    if axis.is_direct:
        return ToomAxis(1, (max(1, taps),))
    if axis.tiles > 1 or count == 1:
        return axis
    return ToomAxis(axis.m, (*[axis.m] * (count - 1), taps - (count - 1) * axis.m))


def axis_refusal(axis: ToomAxis, taps: int) -> str | None:
    if axis.tiles > 1:
        inner = f"{axis.m + 1} to {axis.taps} taps"
        return None if axis.m < taps <= axis.taps else f"{axis} nests {inner}, not {taps}"
    if segments_of(axis, taps) > 1 and axis.m > axis.longest:
        return f"{axis} takes at most {axis.longest} taps, not {taps}"
    return None


# ------------------------------------------------------------------------------------------------------------- kernels


def transform_kernel(h: ToomAxis, vector: int) -> KernelSpec:
    return KernelSpec(
        stem="half_transform",
        symbol=f"half_transform_{h.struct.lower()}_by{vector}",
        body=f"polyconv::half_transform<polyconv::{h.struct}, {vector}>(params);",
        params="polyconv::HalfTransformParams",
        params_bytes=ctypes.sizeof(HalfTransformParams),
        threads=THREADS,
        min_blocks=2,
        axes=(h,),
    )


def inverse_kernel(h: ToomAxis, vector: int) -> KernelSpec:
    return KernelSpec(
        stem="half_inverse",
        symbol=f"half_inverse_{h.struct.lower()}_by{vector}",
        body=f"polyconv::half_inverse<polyconv::{h.struct}, {vector}>(params);",
        params="polyconv::HalfInverseParams",
        params_bytes=ctypes.sizeof(HalfInverseParams),
        threads=INVERSE_THREADS,
        min_blocks=5,
        axes=(h,),
    )


def weights_kernel(h: ToomAxis, w: ToomAxis) -> KernelSpec:
    return KernelSpec(
        stem="transform_weights",
        symbol=f"transform_weights_{h.struct.lower()}_{w.struct.lower()}",
        body=f"polyconv::transform_weights<polyconv::{h.struct}, polyconv::{w.struct}>(params);",
        params="polyconv::TransformWeightsParams",
        params_bytes=ctypes.sizeof(TransformWeightsParams),
        threads=WEIGHT_THREADS,
        axes=(h, w),
    )


def gemm_kernel(w: ToomAxis, k_tile: int) -> KernelSpec:
    return KernelSpec(
        stem="half_gemm",
        symbol=f"half_gemm_{w.struct.lower()}_{k_tile}",
        body=f"polyconv::half_gemm<polyconv::{w.struct}, {k_tile}>(params);",
        params="polyconv::HalfGemmParams",
        params_bytes=ctypes.sizeof(HalfGemmParams),
        threads=32 * w.points,
        min_blocks=gemm_blocks(w, k_tile),
        axes=(w,),
    )


def gemm_blocks(w: ToomAxis, k_tile: int) -> int:
    """Blocks per multiprocessor: few points make small blocks, two of which share the four schedulers evenly."""
    return 2 if w.points <= 6 and 2 * gemm_shared(w, k_tile) <= LEAST_SHARED else 1


def columns_of(k_tile: int) -> int:
    """Columns of a block of half_gemm.cuh (``kU``)."""
    return 2048 // k_tile


def gemm_shared(w: ToomAxis, k_tile: int) -> int:
    """Bytes of shared memory (``kSharedFloats`` in half_gemm.cuh)."""
    columns = columns_of(k_tile)
    rows = k_tile // 8 * (2 if columns == 128 or w.points < 8 else 4)
    return 4 * w.points * (2 * CHUNK * columns + 2 * CHUNK * k_tile + rows * columns)


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    for w in W_AXES:
        for k_tile in k_tiles(w):
            yield gemm_kernel(w, k_tile)
        for h in H_AXES:
            yield weights_kernel(h, w)
    for h in H_AXES:
        for vector in sorted({w.m for w in W_AXES}):
            yield transform_kernel(h, vector)
            yield inverse_kernel(h, vector)
            yield kernel_with_epilogue(inverse_kernel(h, vector))


# ---------------------------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Chain:
    """The sizes of one chain of launches: one pair of phases of the lattice."""

    h: DenseAxis
    w: DenseAxis
    way_h: ToomAxis
    way_w: ToomAxis
    k_tile: int
    batch: int
    groups: int
    channels: int
    outputs: int

    @property
    def segments_h(self) -> int:
        return segments_of(self.way_h, self.h.taps)

    @property
    def segments_w(self) -> int:
        return segments_of(self.way_w, self.w.taps)

    @property
    def parts_h(self) -> int:
        return len(self.h.classes) * self.segments_h

    @property
    def channels_all(self) -> int:
        """Channels of a group, classes and segments counted."""
        return self.parts_h * len(self.w.classes) * self.channels

    @property
    def chunks(self) -> int:
        return -(-self.channels_all // CHUNK)

    @property
    def tiles_h(self) -> int:
        """Of one phase of one image."""
        return -(-self.h.count // (self.h.dilation * self.way_h.m))

    @property
    def rows(self) -> int:
        return self.batch * self.h.dilation * self.tiles_h

    @property
    def units(self) -> int:
        return -(-self.w.count // (self.w.dilation * self.way_w.outputs))

    @property
    def row_columns(self) -> int:
        return self.units * self.w.dilation

    @property
    def pitch(self) -> int:
        """Columns of X: those of the outputs and the ones that the last unit reads beyond itself.

        An odd number, unless they are few, so that the points of H do not all lie in one bank of memory.
        """
        last = (
            self.way_w.points
            - 1
            + (self.way_w.passes - 1 if self.way_w.tiles > 1 else self.segments_w - 1) * self.way_w.m
        )
        columns = self.row_columns + last // self.way_w.outputs * self.w.dilation
        return columns | 1 if columns >= 16 else columns

    @property
    def vectors(self) -> int:
        """Of one channel of one row of X."""
        return self.way_w.tiles * self.pitch

    @property
    def k_tiles(self) -> int:
        return -(-self.outputs // self.k_tile)

    @property
    def passes(self) -> int:
        return self.way_w.passes if self.way_w.tiles > 1 else self.segments_w

    @property
    def weight_bytes(self) -> int:
        slice_floats = self.chunks * CHUNK * self.passes * self.way_w.points * self.k_tile
        return round_up(4 * self.way_h.points * self.groups * self.k_tiles * slice_floats, 256)

    @property
    def row_stride(self) -> int:
        return self.way_h.points * self.groups * self.chunks * CHUNK * self.vectors * self.way_w.m

    def source_bytes(self, rows: int) -> int:
        """X of a slab."""
        return round_up(4 * rows * self.row_stride, 256)

    def column_tiles(self, rows: int) -> int:
        """Tiles of columns of half_gemm.cuh in a slab."""
        return -(-rows * self.row_columns // columns_of(self.k_tile))

    def columns_filled(self, rows: int) -> int:
        """Columns of Y: whole tiles, and a few more, so that the points of H do not all lie in one bank of memory."""
        return self.column_tiles(rows) * columns_of(self.k_tile) + 8

    def written_bytes(self, rows: int) -> int:
        """Y of a slab."""
        each = self.way_h.points * self.groups * self.outputs * self.way_w.outputs
        return round_up(4 * each * self.columns_filled(rows), 256)

    def gemm_tiles(self, rows: int) -> int:
        """Tiles of half_gemm.cuh in a slab."""
        return self.way_h.points * self.groups * self.k_tiles * self.column_tiles(rows)

    def bytes_of(self, rows: int) -> int:
        return self.weight_bytes + self.source_bytes(rows) + self.written_bytes(rows)

    def most_rows(self, workspace: int) -> int:
        """Rows of the largest slab that fits; 0 if not even one does."""
        per_row = (self.bytes_of(64) - self.weight_bytes) // 64
        rows = min(self.rows, max(0, workspace - self.weight_bytes) // per_row + 1, DIVIDEND_LIMIT // self.row_stride)
        while rows > 0 and self.bytes_of(rows) > workspace:
            rows -= 1
        return rows

    def slab_rows(self, sms: int, workspace: int) -> int:
        """Rows of a slab: as few rounds of the persistent blocks as possible, then as few slabs."""
        most = self.most_rows(workspace)
        blocks = sms * gemm_blocks(self.way_w, self.k_tile)

        def rounds(rows: int) -> tuple[int, int]:
            slabs, left = divmod(self.rows, rows)
            each = -(-self.gemm_tiles(rows) // blocks)
            last = -(-self.gemm_tiles(left) // blocks) if left else 0
            return slabs * each + last + (slabs + (left > 0)), slabs

        step = max(1, most // SLABS_TRIED)
        return min(range(most, most // 2, -step), key=rounds)


def _dense(phase: Phase) -> DenseAxis:
    """A phase as dense correlations. One that meets no tap is a correlation with none, which writes zeros."""
    if phase.taps:
        return dense_axis(phase)
    return DenseAxis(phase.written_first, phase.written_step, phase.count, 1, 1, (TapClass(0, 0, 0, 0),))


def chains(problem: Problem, h: ToomAxis, w: ToomAxis, k_tile: int) -> Iterator[Chain]:
    r = gather.roles(problem)
    for phase_h in r.phases_h:
        for phase_w in r.phases_w:
            yield Chain(
                _dense(phase_h),
                _dense(phase_w),
                h,
                w,
                k_tile,
                problem.batch,
                problem.groups,
                r.channels,
                r.outputs,
            )


# -------------------------------------------------------------------------------------------------------------- the way


@dataclass(frozen=True)
class SeparableWay:
    """One pair of algorithms and the width in written channels of the matrix product's tile."""

    h: ToomAxis
    w: ToomAxis
    k_tile: int

    direct = False

    @property
    def name(self) -> str:
        return f"separable_{self.h.struct.lower()}_{self.w.struct.lower()}_{self.k_tile}"

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        return (
            weights_kernel(self.h, self.w),
            transform_kernel(self.h, self.w.m),
            gemm_kernel(self.w, self.k_tile),
            inverse_kernel(self.h, self.w.m),
        )

    def refusal(self, problem: Problem) -> str | None:
        if problem.kind is Pass.WGRAD:
            return "only for the forward pass and the input gradient"
        if problem.depthwise:
            return "not for depthwise convolutions"
        r = gather.roles(problem)
        if r.border is not PaddingMode.ZEROS:
            return f"cannot read a {r.border} border"
        if any(
            abs(stride) >= 2**31 for stride in (*r.source_strides[2:], *r.written_strides[2:], *problem.w_strides[2:])
        ):
            return "rows or columns are too far apart"
        if r.many_phases:
            return gather.MANY_PHASES
        for chain in chains(problem, self.h, self.w, self.k_tile):
            why = axis_refusal(self.h, chain.h.taps) or axis_refusal(self.w, chain.w.taps)
            if why:
                return why
            if max(chain.parts_h, len(chain.w.classes)) > MAX_PARTS:
                return f"more than {MAX_PARTS} classes and segments of taps"
            if chain.rows >= DIVIDEND_LIMIT or chain.row_stride >= DIVIDEND_LIMIT:
                return "too many rows"
        return None

    def least_workspace(self, problem: Problem) -> int:
        """Bytes that one row at a time takes."""
        return max(chain.bytes_of(1) for chain in chains(problem, self.h, self.w, self.k_tile))

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The launches. A workspace that is too small for one row of tiles is exceeded by what that takes."""
        r = gather.roles(problem)
        workspace = max(workspace, self.least_workspace(problem))
        found: list[Launch] = []
        used = longest = 0
        for chain in chains(problem, self.h, self.w, self.k_tile):
            rows = chain.slab_rows(sms, workspace)
            used = max(used, chain.bytes_of(rows))
            longest = max(longest, chain.channels_all * chain.passes)
            found.append(_weights(problem, r, chain))
            slabs = {n: _slab(problem, r, chain, n, rows, sms) for n in {rows, chain.rows % rows} if n}
            for first in range(0, chain.rows, rows):
                transform, gemm, inverse = slabs[min(rows, chain.rows - first)]
                found += [
                    _starting_at(first, transform, HalfTransformParams),
                    gemm,
                    _starting_at(first, inverse, HalfInverseParams),
                ]
        return Schedule(tuple(found), used, (longest,))

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        from ..algebra.segments import Scheme2d
        from .accuracy import error_of

        worst = 0.0
        for chain in chains(problem, self.h, self.w, self.k_tile):
            scheme = Scheme2d(fitted(self.h, chain.h.taps).scheme(), fitted(self.w, chain.w.taps).scheme())
            count = len(chain.h.classes) * len(chain.w.classes) * chain.channels
            worst = max(worst, error_of(problem, scheme, count, ()))
        return worst


def ways(problem: Problem) -> Iterator[SeparableWay]:
    """Every way that may be of use for a problem: refused ones, too, so that the planner can say why."""
    if problem.kind is Pass.WGRAD:
        return
    for h in H_AXES:
        for w in W_AXES:
            for k_tile in k_tiles(w):
                yield SeparableWay(h, w, k_tile)


# ------------------------------------------------------------------------------------------------------------- launches


def _weights(problem: Problem, r: Roles, chain: Chain) -> Launch:
    spec = weights_kernel(chain.way_h, chain.way_w)
    p = TransformWeightsParams(
        w_group=problem.channels_per_group[1] * problem.w_strides[0],
        w_output=r.w_output,
        w_channel=r.w_channel,
        w_row=problem.w_strides[2],
        w_column=problem.w_strides[3],
        channels=chain.channels,
        channels_all=chain.channels_all,
        chunks=chain.chunks,
        outputs=chain.outputs,
        k_tile=chain.k_tile,
        k_tiles=chain.k_tiles,
        groups=chain.groups,
        segments=chain.segments_w,
        source_channels=FastDivisor.of(chain.channels),
        classes_w=FastDivisor.of(len(chain.w.classes)),
    )
    m = chain.way_h.m
    for segment in range(chain.segments_h):
        for number, taps in enumerate(chain.h.classes):
            last = segment == chain.segments_h - 1
            count = taps.taps - segment * m if last else min(m, taps.taps - segment * m)
            first = taps.tap_first + segment * m * taps.tap_stride
            p.part_h[segment * len(chain.h.classes) + number] = TapPart(max(0, count), first, taps.tap_stride)
    for number, taps in enumerate(chain.w.classes):
        p.class_w[number] = TapPart(taps.taps, taps.tap_first, taps.tap_stride)
    grid = (int32(chain.groups * chain.k_tiles * chain.chunks, "the number of weight tiles"), 1, 1)
    slots = layout.slots(TransformWeightsParams, w="w", u=("workspace", 0))
    read = 4 * chain.groups * chain.channels * chain.outputs * problem.kernel[0] * problem.kernel[1]
    work = Work(grid[0], grid[0], grid[0] * chain.segments_w, read + chain.weight_bytes)
    return Launch(spec, grid, (spec.threads, 1, 1), 0, bytes(p), slots, work)


def _starting_at(first: int, launch: Launch, struct: type[HalfTransformParams | HalfInverseParams]) -> Launch:
    """The launch of the slab that begins with row ``first``; as made, it begins with row 0."""
    if first == 0:
        return launch
    at = struct.first_row.offset
    return replace(launch, params=launch.params[:at] + first.to_bytes(4, "little") + launch.params[at + 4 :])


def _slab(
    problem: Problem, r: Roles, chain: Chain, rows: int, most_rows: int, sms: int
) -> tuple[Launch, Launch, Launch]:
    """The launches of the first slab."""
    source_at = chain.weight_bytes
    written_at = source_at + chain.source_bytes(most_rows)
    return (
        _transform(r, chain, rows, source_at),
        _gemm(chain, rows, source_at, written_at, sms),
        _inverse(problem, r, chain, rows, written_at),
    )


def _transform(r: Roles, chain: Chain, rows: int, source_at: int) -> Launch:
    h, w = chain.h, chain.w
    channels = chain.chunks * CHUNK
    p = HalfTransformParams(
        source_batch=r.source_strides[0],
        source_channel=r.source_strides[1],
        items=rows * chain.groups * channels * chain.vectors * chain.way_w.m,
        vectors=FastDivisor.of(chain.vectors),
        pitch=FastDivisor.of(chain.pitch),
        rows=FastDivisor.of(rows),
        channels=chain.groups * channels,
        channels_filled=FastDivisor.of(channels),
        source_channels=FastDivisor.of(chain.channels),
        classes_w=FastDivisor.of(len(w.classes)),
        channels_all=chain.channels_all,
        tiles=FastDivisor.of(chain.tiles_h),
        dilation_h=FastDivisor.of(h.dilation),
        dilation_w=FastDivisor.of(w.dilation),
        read_step_h=h.read_step,
        read_step_w=w.read_step,
        outputs_w=chain.way_w.outputs,
    )
    p.source_row, p.source_column = pixel_strides(r.source_strides, r.source)
    for segment in range(chain.segments_h):
        for number in range(len(h.classes)):
            shift = h.read_step * h.dilation * segment * chain.way_h.m
            p.part_h[segment * len(h.classes) + number] = _source_part(h, number, r.source_size[0], shift)
    for number in range(len(w.classes)):
        p.class_w[number] = _source_part(w, number, r.source_size[1], 0)
    spec = transform_kernel(chain.way_h, chain.way_w.m)
    slots = layout.slots(HalfTransformParams, source=r.source, x=("workspace", source_at))
    blocks = -(-p.items // THREADS)
    height, width = r.source_size
    read = 4 * chain.batch * chain.groups * chain.channels * height * width * rows // chain.rows
    work = Work(blocks, blocks, blocks, read + chain.source_bytes(rows))
    return Launch(spec, (blocks, 1, 1), (THREADS, 1, 1), 0, bytes(p), slots, work)


def _source_part(axis: DenseAxis, number: int, extent: int, shift: int) -> SourcePart:
    taps = axis.classes[number]
    needed = taps.read_first + axis.read_step * (axis.count - 1 + axis.dilation * (taps.taps - 1)) + 1
    return SourcePart(taps.read_first + shift, max(0, min(extent, needed)))


def _gemm(chain: Chain, rows: int, source_at: int, written_at: int, sms: int) -> Launch:
    spec = gemm_kernel(chain.way_w, chain.k_tile)
    vector = chain.way_w.m
    channel_stride = chain.vectors * vector
    p = HalfGemmParams(
        tiles=chain.gemm_tiles(rows),
        k_tiles=FastDivisor.of(chain.k_tiles),
        column_tiles=FastDivisor.of(chain.column_tiles(rows)),
        row_columns=FastDivisor.of(chain.row_columns),
        columns=rows * chain.row_columns,
        columns_filled=chain.columns_filled(rows),
        row_stride=chain.row_stride,
        group_stride=chain.chunks * CHUNK * channel_stride,
        channel_stride=channel_stride,
        part_stride=chain.pitch * vector,
        next=chain.w.dilation * vector,
        chunks=chain.chunks,
        segments=chain.segments_w,
        outputs=chain.outputs,
    )
    grid = (min(p.tiles, sms * spec.min_blocks), 1, 1)
    slots = layout.slots(HalfGemmParams, x=("workspace", source_at), u=("workspace", 0), y=("workspace", written_at))
    moved = chain.source_bytes(rows) + chain.written_bytes(rows) + chain.weight_bytes
    work = Work(grid[0], p.tiles, p.tiles * chain.chunks * chain.passes, moved)
    return Launch(spec, grid, (spec.threads, 1, 1), gemm_shared(chain.way_w, chain.k_tile), bytes(p), slots, work)


def _inverse(problem: Problem, r: Roles, chain: Chain, rows: int, written_at: int) -> Launch:
    spec = inverse_kernel(chain.way_h, chain.way_w.m)
    h, w = chain.h, chain.w
    parts = chain.way_w.tiles
    stretches = -(-parts * chain.row_columns // STRETCH_VECTORS)
    units = -(-chain.units // stretches)
    stretches = -(-chain.units // units)
    columns = units * w.dilation
    lines = min(chain.outputs, max(1, INVERSE_THREADS // (parts * columns)))
    line_blocks = -(-chain.outputs // lines)
    stretch = columns * chain.way_w.outputs
    p = HalfInverseParams(
        written_batch=r.written_strides[0],
        written_channel=r.written_strides[1],
        outputs=chain.outputs,
        lines=lines,
        stretch_columns=columns,
        line_blocks=FastDivisor.of(line_blocks),
        stretches=FastDivisor.of(stretches),
        rows=FastDivisor.of(rows),
        groups=chain.groups,
        vectors=FastDivisor.of(parts * columns),
        columns=FastDivisor.of(columns),
        row_columns=chain.row_columns,
        columns_filled=chain.columns_filled(rows),
        tiles=FastDivisor.of(chain.tiles_h),
        dilation_h=FastDivisor.of(h.dilation),
        dilation_w=FastDivisor.of(w.dilation),
        outputs_w=chain.way_w.outputs,
        parts=parts,
        stretch=FastDivisor.of(stretch),
        count_h=h.count,
        count_w=w.count,
        written_first_h=h.written_first,
        written_step_h=h.written_step,
        written_first_w=w.written_first,
        written_step_w=w.written_step,
    )
    p.written_row, p.written_column = pixel_strides(r.written_strides, r.written)
    p.vector = (
        problem.vector_aligned
        and p.written_column == 1
        and w.written_step == 1
        and w.written_first % 4 == 0
        and stretch % 4 == 0
        and all(stride % 4 == 0 for stride in r.written_strides[:3])
    )
    where: dict[str, str | tuple[str, int]] = {"y": ("workspace", written_at), "written": r.written}
    if problem.kind is Pass.FPROP and problem.bias:
        where["bias"] = "bias"
    grid = (int32(rows * chain.groups * line_blocks * stretches, "the number of blocks"), 1, 1)
    shared = 4 * lines * chain.way_h.m * stretch
    result = 4 * chain.batch * chain.groups * chain.outputs * h.count * w.count * rows // chain.rows
    rounds = -(-lines * parts * columns // INVERSE_THREADS)
    work = Work(grid[0], grid[0], grid[0] * rounds, chain.written_bytes(rows) + result)
    slots = layout.slots(HalfInverseParams, **where)
    launch = Launch(spec, grid, (INVERSE_THREADS, 1, 1), shared, bytes(p), slots, work)
    return with_epilogue(problem, launch, result // 4)
