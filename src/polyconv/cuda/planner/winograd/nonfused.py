"""Plans for fprop and dgrad by nonfused Winograd (kernels/winograd/nonfused_layout.cuh).

Four kernels: the filter transform along both axes; the input transform along H, to memory; a GEMM per point of H, which
transforms along W on the way in and back on the way out; the output transform along H. The tensors between them take
memory, so rows of tiles are processed in slabs that fit the workspace.

A kernel instance fixes the inner algorithm of an axis and whether two segments are nested. The number of segments is a
run-time parameter: along W they are further steps of the sum, along H further channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from ....algebra.polyphase import DenseAxis, TapClass
from ....algebra.segments import Scheme2d
from ....numerics.prediction import Way
from ....problem import PaddingMode, Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import ceil_div
from .. import kernel_params
from ..device import CudaDevice
from ..epilogue import kernel_with_epilogue, task_with_epilogue, with_epilogue
from ..implicit_gemm import fprop_dgrad
from ..implicit_gemm.fprop_dgrad import PairKind, Roles, scattered_columns
from ..kernel_params import DIVIDEND_LIMIT, Params, declared, int32
from ..plan import KernelSpec, Launch, Schedule, Task, Work
from .axis import ToomAxis
from .nonfused_tiling import (
    CHUNK,
    INVERSE_THREADS,
    USUAL_SHARED,
    Chain,
    columns_of,
    gemm_blocks,
    gemm_shared,
    segments_of,
)

MAX_PARTS = 16
"""Tap classes per axis times segments along H in one launch (``kMaxParts`` in winograd/nonfused_layout.cuh)."""


SourcePart = declared("winograd/nonfused_layout", "SourcePart")
TapPart = declared("winograd/nonfused_filter", "TapPart")
NonfusedFilterParams = declared("winograd/nonfused_filter", "NonfusedFilterParams", kMaxParts=MAX_PARTS)
NonfusedInputParams = declared("winograd/nonfused_input", "NonfusedInputParams", kMaxParts=MAX_PARTS)
NonfusedGemmParams = declared("winograd/nonfused_gemm", "NonfusedGemmParams")
NonfusedOutputParams = declared("winograd/nonfused_output", "NonfusedOutputParams")


THREADS = 256
"""Threads of the input transform."""
FACTS = {"polyconv::kMaxParts": MAX_PARTS, "polyconv::kChannelChunk": CHUNK}
WEIGHT_THREADS = 32 * CHUNK

DIRECT = ToomAxis(1, (1,))
F23 = ToomAxis(2, (3,))
F43 = ToomAxis(4, (3,))
F45 = ToomAxis(4, (5,))
F45_NESTED = ToomAxis(4, (4, 5), 2)
H_AXES = (DIRECT, F23, F43, F45)
W_AXES = (F23, F43, F45, F45_NESTED)


def k_tiles(w: ToomAxis) -> tuple[int, ...]:
    """Written channels per GEMM block. Nested segments need two sets of accumulators: no registers for 16."""
    return (64, 32) if w.tiles > 1 else (64, 32, 16)


def fitted(axis: ToomAxis, taps: int) -> ToomAxis:
    """Algorithm that an instance runs for ``taps`` taps; missing ones are filled up with zeros."""
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


@lru_cache(maxsize=1024)
def transform_kernel(h: ToomAxis, vector: int) -> KernelSpec:
    symbol = f"winograd_nonfused_input_{h.struct.lower()}_by{vector}"
    return KernelSpec.of(
        NonfusedInputParams,
        "winograd/nonfused_input",
        *(h, vector),
        symbol=symbol,
        threads=THREADS,
        min_blocks=2,
        facts=FACTS,
    )


@lru_cache(maxsize=1024)
def inverse_kernel(h: ToomAxis, vector: int) -> KernelSpec:
    symbol = f"winograd_nonfused_output_{h.struct.lower()}_by{vector}"
    return KernelSpec.of(
        NonfusedOutputParams,
        "winograd/nonfused_output",
        *(h, vector),
        symbol=symbol,
        threads=INVERSE_THREADS,
        min_blocks=5,
        facts=FACTS,
    )


@lru_cache(maxsize=1024)
def weights_kernel(h: ToomAxis, w: ToomAxis) -> KernelSpec:
    symbol = f"winograd_nonfused_filter_{h.struct.lower()}_{w.struct.lower()}"
    return KernelSpec.of(
        NonfusedFilterParams, "winograd/nonfused_filter", h, w, symbol=symbol, threads=WEIGHT_THREADS, facts=FACTS
    )


@lru_cache(maxsize=1024)
def gemm_kernel(w: ToomAxis, k_tile: int) -> KernelSpec:
    threads, gemm = 32 * w.points, f"polyconv::NonfusedGemm<{w.cpp}, {k_tile}>"
    return KernelSpec.of(
        NonfusedGemmParams,
        "winograd/nonfused_gemm",
        w,
        k_tile,
        symbol=f"winograd_nonfused_gemm_{w.struct.lower()}_{k_tile}",
        threads=threads,
        min_blocks=gemm_blocks(w, k_tile),
        efficiency=0.6,  # simulated
        facts={
            **FACTS,
            f"{gemm}::kThreads": threads,
            f"{gemm}::kU": columns_of(k_tile),
            f"4 * {gemm}::kSharedFloats": gemm_shared(w, k_tile),
        },
    )


def all_kernels() -> Iterator[KernelSpec]:
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


# ------------------------------------------------------------------------------------------------------- the candidates


@dataclass(frozen=True)
class NonfusedCandidate:
    """A pair of algorithms, and the width of the GEMM tile in written channels."""

    h: ToomAxis
    w: ToomAxis
    k_tile: int
    shared_per_sm: int = USUAL_SHARED
    """Shared memory of a multiprocessor [bytes], at most the usual."""

    direct = False

    @cached_property
    def name(self) -> str:
        return f"winograd_nonfused_{self.h.struct.lower()}_{self.w.struct.lower()}_{self.k_tile}"

    @property
    def kernels(self) -> tuple[KernelSpec, ...]:
        return (
            weights_kernel(self.h, self.w),
            transform_kernel(self.h, self.w.m),
            gemm_kernel(self.w, self.k_tile),
            inverse_kernel(self.h, self.w.m),
        )

    def refusal(self, problem: Problem) -> str | None:
        why = _refusal_of_all(problem)
        if why:
            return why
        for kind in fprop_dgrad.roles(problem).kinds:
            why = axis_refusal(self.h, kind.h.taps) or axis_refusal(self.w, kind.w.taps)
            if why:
                return why
        for chain, _ in self.chains(problem):
            if max(chain.parts_h, len(chain.w.classes)) > MAX_PARTS:
                return f"more than {MAX_PARTS} classes and segments of taps"
            if chain.rows >= DIVIDEND_LIMIT or chain.row_stride >= DIVIDEND_LIMIT:
                return "too many rows"
        return None

    def chains(self, problem: Problem) -> tuple[tuple[Chain, int], ...]:
        """One chain of each kind, and their number."""
        return _chains(problem, self)

    def gemm_blocks(self, sms: int) -> int:
        """Persistent blocks of the GEMM that are resident together."""
        return sms * gemm_blocks(self.w, self.k_tile, self.shared_per_sm)

    def least_workspace(self, problem: Problem) -> int:
        """Workspace for slabs of one row [bytes]."""
        return max(chain.bytes_of(1) for chain, _ in self.chains(problem))

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        r, blocks = fprop_dgrad.roles(problem), self.gemm_blocks(sms)
        workspace = max(workspace, self.least_workspace(problem))
        for chain, times in self.chains(problem):
            yield _weights_task(problem, chain, times)
            rows = chain.slab_rows(blocks, workspace)
            slabs, left = divmod(chain.rows, rows)
            yield from _slab_tasks(problem, r, chain, rows, blocks, times * slabs)
            if left:
                yield from _slab_tasks(problem, r, chain, left, blocks, times)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """Launches. A workspace too small for one row of tiles is exceeded."""
        r, blocks = fprop_dgrad.roles(problem), self.gemm_blocks(sms)
        workspace = max(workspace, self.least_workspace(problem))
        found: list[Launch] = []
        used = weights = 0
        for h, w in r.pairs:
            chain = Chain(problem, h, w, self.h, self.w, self.k_tile)
            rows = chain.slab_rows(blocks, workspace)
            used = max(used, chain.bytes_of(rows))
            # A forward pass has one chain; of several, each overwrites the weights of the previous one.
            weights = chain.weight_bytes if problem.kind is Pass.FPROP else 0
            found.append(_weights(problem, r, chain))
            slabs = {n: _slab(problem, r, chain, n, rows, blocks) for n in {rows, chain.rows % rows} if n}
            for first in range(0, chain.rows, rows):
                transform, gemm, inverse = slabs[min(rows, chain.rows - first)]
                found += [
                    _starting_at(first, transform, NonfusedInputParams),
                    gemm,
                    _starting_at(first, inverse, NonfusedOutputParams),
                ]
        return Schedule(tuple(found), used, weights)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return _error(problem, self.h, self.w)

    def ways(self, problem: Problem) -> tuple[Way, ...]:
        return _ways(problem, self.h, self.w)


@lru_cache(maxsize=1024)
def _refusal_of_all(problem: Problem) -> str | None:
    """Why no candidate of this family can compute the problem, or None."""
    if problem.kind is Pass.WGRAD:
        return "only for the forward pass and the input gradient"
    if problem.depthwise:
        return "not for depthwise convolutions"
    r = fprop_dgrad.roles(problem)
    if r.border is not PaddingMode.ZEROS:
        return f"cannot read a {r.border} border"
    if any(abs(stride) >= 2**31 for stride in (*r.source_strides[2:], *r.written_strides[2:], *problem.w_strides[2:])):
        return "rows or columns are too far apart"
    return fprop_dgrad.MANY_PHASES if r.many_phases else None


@lru_cache(maxsize=1024)
def _chains(problem: Problem, candidate: NonfusedCandidate) -> tuple[tuple[Chain, int], ...]:
    """Chains and their number. Kinds of phases with equal numbers of segments have chains of equal sizes."""
    along_h, along_w, k_tile = candidate.h, candidate.w, candidate.k_tile
    found: dict[tuple[int, ...], tuple[PairKind, int]] = {}
    for kind in fprop_dgrad.roles(problem).kinds:
        h, w = kind.h, kind.w
        sizes = (h.count, h.dilation, len(h.classes), w.count, w.dilation, len(w.classes))
        key = (*sizes, segments_of(along_h, h.taps), segments_of(along_w, w.taps))
        first, times = found.get(key, (kind, 0))
        found[key] = first, times + kind.times
    return tuple((Chain(problem, k.h, k.w, along_h, along_w, k_tile), times) for k, times in found.values())


@lru_cache(maxsize=1024)
def _error(problem: Problem, h: ToomAxis, w: ToomAxis) -> float:
    """Expected error of a pair of algorithms: that of the worst pair of phases."""
    return max(way.error(problem) for way in _ways(problem, h, w))


def _ways(problem: Problem, h: ToomAxis, w: ToomAxis) -> tuple[Way, ...]:
    """How a pair of algorithms sums output maps: one entry per kind of phase pair."""
    channels = fprop_dgrad.roles(problem).channels
    return tuple(
        Way(
            _scheme(h, kind.h.taps, w, kind.w.taps),
            len(kind.h.classes) * len(kind.w.classes) * channels,
            (),
            (kind.h.taps, kind.w.taps),
        )
        for kind in fprop_dgrad.roles(problem).kinds
    )


@lru_cache(maxsize=1024)
def _scheme(h: ToomAxis, taps_h: int, w: ToomAxis, taps_w: int) -> Scheme2d:
    """Exact algorithm of both axes for the given numbers of taps."""
    return Scheme2d(fitted(h, taps_h).scheme(), fitted(w, taps_w).scheme())


@lru_cache(maxsize=64)
def _candidates(shared_per_sm: int) -> tuple[NonfusedCandidate, ...]:
    pairs = ((h, w) for h in H_AXES for w in W_AXES)
    return tuple(NonfusedCandidate(h, w, k_tile, shared_per_sm) for h, w in pairs for k_tile in k_tiles(w))


def candidates(problem: Problem, device: CudaDevice | None = None) -> Iterator[NonfusedCandidate]:
    """All candidates, refused or not, so that the planner can say why; none for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from _candidates(USUAL_SHARED if device is None else min(device.shared_per_sm, USUAL_SHARED))


# ------------------------------------------------------------------------------------------------------------- launches


def _weights_task(problem: Problem, chain: Chain, times: int = 1) -> Task:
    blocks = int32(chain.groups * chain.k_tiles * chain.chunks, "the number of weight tiles")
    read = 4 * chain.groups * chain.channels * chain.outputs * problem.kernel[0] * problem.kernel[1]
    work = Work(blocks, blocks, blocks * chain.segments_w, read + chain.weight_bytes)
    return Task(weights_kernel(chain.along_h, chain.along_w), (blocks, 1, 1), work, times)


def _weights(problem: Problem, r: Roles, chain: Chain) -> Launch:
    p = NonfusedFilterParams(channels=chain.channels, channels_all=chain.channels_all, outputs=chain.outputs)
    p.w_group = problem.channels_per_group[1] * problem.w_strides[0]
    p.w_output, p.w_channel = r.w_output, r.w_channel
    p.w_row, p.w_column = problem.w_strides[2:]
    p.groups, p.chunks, p.segments = chain.groups, chain.chunks, chain.segments_w
    p.k_tile, p.k_tiles = chain.k_tile, chain.k_tiles
    p.source_channels, p.classes_w = chain.channels, len(chain.w.classes)
    m = chain.along_h.m
    for segment in range(chain.segments_h):
        for number, taps in enumerate(chain.h.classes):
            last = segment == chain.segments_h - 1
            count = taps.taps - segment * m if last else min(m, taps.taps - segment * m)
            first = taps.tap_first + segment * m * taps.tap_stride
            p.tap_part_h[segment * len(chain.h.classes) + number] = TapPart(max(0, count), first, taps.tap_stride)
    for number, taps in enumerate(chain.w.classes):
        p.tap_class_w[number] = TapPart(taps.taps, taps.tap_first, taps.tap_stride)
    slots = kernel_params.slots(NonfusedFilterParams, w="w", u=("workspace", 0))
    return _weights_task(problem, chain).launch(bytes(p), slots)


def _starting_at(first: int, launch: Launch, struct: type[Params]) -> Launch:
    """The launch of a slab that begins with row 0, moved to row ``first``."""
    if first == 0:
        return launch
    at = struct.first_row.offset
    return replace(launch, params=launch.params[:at] + first.to_bytes(4, "little") + launch.params[at + 4 :])


def _slab_tasks(
    problem: Problem, r: Roles, chain: Chain, rows: int, most_blocks: int, times: int = 1
) -> tuple[Task, Task, Task]:
    """Input transform, GEMM and output transform of ``times`` slabs of ``rows`` rows, in counts."""
    moved_x, moved_y, slab = chain.source_bytes(rows), chain.written_bytes(rows), chain.bytes_of(rows)
    (height, width), planes = r.source_size, chain.batch * chain.groups
    read = 4 * planes * chain.channels * height * width * rows // chain.rows
    transform = ceil_div(chain.items(rows), THREADS)
    gemm = gemm_kernel(chain.along_w, chain.k_tile)
    tiles = chain.gemm_tiles(rows)
    blocks = min(tiles, most_blocks)
    steps, multiplied = tiles * chain.chunks * chain.passes, moved_x + moved_y + chain.weight_bytes
    cut = chain.stretches()
    inverse = int32(rows * chain.groups * cut.line_blocks * cut.count, "the number of blocks")
    rounds = ceil_div(cut.lines * chain.along_w.tiles * cut.columns, INVERSE_THREADS)
    result = 4 * planes * chain.outputs * chain.h.count * chain.w.count * rows // chain.rows
    loads, stores = transform * THREADS // 32 * chain.along_h.points, result // 4 // 32
    lines, _ = scattered_columns(r.source_strides, loads, chain.w.read_step)
    scattered = scattered_columns(r.written_strides, stores, chain.w.written_step)
    back = Task(
        inverse_kernel(chain.along_h, chain.along_w.m),
        (inverse, 1, 1),
        Work(inverse, inverse, inverse * rounds, moved_y + result, *scattered, passed_bytes=moved_y, slab_bytes=slab),
        times,
        4 * cut.lines * chain.along_h.m * cut.columns * chain.along_w.outputs,
    )
    return (
        Task(
            transform_kernel(chain.along_h, chain.along_w.m),
            (transform, 1, 1),
            Work(transform, transform, transform, read + moved_x, lines, passed_bytes=moved_x, slab_bytes=slab),
            times,
        ),
        Task(
            gemm,
            (blocks, 1, 1),
            Work(blocks, tiles, steps, multiplied, passed_bytes=multiplied, slab_bytes=slab),
            times,
            gemm_shared(chain.along_w, chain.k_tile),
        ),
        task_with_epilogue(problem, back, result // 4),
    )


def _slab(
    problem: Problem, r: Roles, chain: Chain, rows: int, most_rows: int, most_blocks: int
) -> tuple[Launch, Launch, Launch]:
    """Launches of a slab that begins with row 0."""
    source_at = chain.weight_bytes
    written_at = source_at + chain.source_bytes(most_rows)
    transform, gemm, inverse = _slab_tasks(problem, r, chain, rows, most_blocks)
    return (
        _transform(transform, r, chain, rows, source_at),
        _gemm(gemm, chain, rows, source_at, written_at),
        _inverse(inverse, problem, r, chain, rows, written_at),
    )


def _transform(task: Task, r: Roles, chain: Chain, rows: int, source_at: int) -> Launch:
    h, w = chain.h, chain.w
    channels = chain.chunks * CHUNK
    p = NonfusedInputParams(items=chain.items(rows), rows=rows, tiles=chain.tiles_h, outputs_w=chain.along_w.outputs)
    p.vectors, p.pitch = chain.vectors, chain.pitch
    p.channels, p.channels_filled, p.channels_all = chain.groups * channels, channels, chain.channels_all
    p.source_channels, p.classes_w = chain.channels, len(w.classes)
    p.dilation_h, p.dilation_w = h.dilation, w.dilation
    p.read_step_h, p.read_step_w = h.read_step, w.read_step
    p.place("source", r.source_strides, r.source)
    for segment in range(chain.segments_h):
        for number in range(len(h.classes)):
            shift = h.read_step * h.dilation * segment * chain.along_h.m
            p.part_h[segment * len(h.classes) + number] = _source_part(h, number, r.source_size[0], shift)
    for number in range(len(w.classes)):
        p.class_w[number] = _source_part(w, number, r.source_size[1], 0)
    return task.launch(bytes(p), kernel_params.slots(NonfusedInputParams, source=r.source, x=("workspace", source_at)))


def _source_part(axis: DenseAxis, number: int, extent: int, shift: int) -> Params:
    taps = axis.classes[number]
    return SourcePart(taps.read_first + shift, read_end(axis, taps, extent))


def read_end(axis: DenseAxis, taps: TapClass, extent: int) -> int:
    """One past the last image position along an axis that a tap class reads for any output."""
    needed = taps.read_first + axis.read_step * (axis.count - 1 + axis.dilation * (taps.taps - 1)) + 1
    return max(0, min(extent, needed))


def _gemm(task: Task, chain: Chain, rows: int, source_at: int, written_at: int) -> Launch:
    vector = chain.along_w.m
    channel_stride = chain.vectors * vector
    p = NonfusedGemmParams(
        tiles=chain.gemm_tiles(rows),
        k_tiles=chain.k_tiles,
        column_tiles=chain.column_tiles(rows),
        row_columns=chain.row_columns,
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
    slots = kernel_params.slots(
        NonfusedGemmParams, x=("workspace", source_at), u=("workspace", 0), y=("workspace", written_at)
    )
    return task.launch(bytes(p), slots)


def _inverse(task: Task, problem: Problem, r: Roles, chain: Chain, rows: int, written_at: int) -> Launch:
    h, w, cut = chain.h, chain.w, chain.stretches()
    parts = chain.along_w.tiles
    stretch = cut.columns * chain.along_w.outputs
    p = NonfusedOutputParams(groups=chain.groups, outputs=chain.outputs, rows=rows, tiles=chain.tiles_h)
    p.lines, p.line_blocks = cut.lines, cut.line_blocks
    p.stretches, p.stretch, p.stretch_columns, p.columns = cut.count, stretch, cut.columns, cut.columns
    p.row_columns, p.columns_filled = chain.row_columns, chain.columns_filled(rows)
    p.outputs_w, p.parts, p.vectors = chain.along_w.outputs, parts, parts * cut.columns
    p.dilation_h, p.dilation_w = h.dilation, w.dilation
    p.count_h, p.count_w = h.count, w.count
    p.written_first_h, p.written_step_h = h.written_first, h.written_step
    p.written_first_w, p.written_step_w = w.written_first, w.written_step
    p.place("written", r.written_strides, r.written)
    p.vector = (
        problem.vector_aligned
        and p.written_column == 1
        and w.written_step == 1
        and w.written_first % 4 == 0
        and stretch % 4 == 0
        and all(stride % 4 == 0 for stride in r.written_strides[:3])
    )
    slots = kernel_params.slots(NonfusedOutputParams, y=("workspace", written_at), written=r.written, bias=r.bias)
    return with_epilogue(problem, task.launch(bytes(p), slots))
