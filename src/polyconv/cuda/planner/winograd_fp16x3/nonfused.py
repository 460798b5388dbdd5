"""Plans for fprop and dgrad with FP32 accuracy on FP16 tensor cores (kernels/winograd_fp16x3/layout.cuh).

Every operand is split into two FP16 values, and three FP16 products make one FP32 product. H is computed directly;
along W a Winograd algorithm saves multiplications. Five stages: absmax of images and of filters, by which both are
scaled; filter and input transforms along W, which also split; and the GEMM, which writes the result. The split source
takes memory, so planes are processed in slabs that fit the workspace. Only the absmax of the first slab's images is
computed in advance: trailing blocks of the GEMM launches compute the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, log2, prod
from typing import NamedTuple

from ....algebra.segments import Scheme2d
from ....numerics.prediction import Way
from ....numerics.tensor_core import AMPERE, VOLTA, SplitProducts
from ....problem import PaddingMode, Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..epilogue import kernel_with_epilogue, task_with_epilogue, with_epilogue
from ..implicit_gemm import fprop_dgrad
from ..implicit_gemm.fprop_dgrad import MOST_GROUPS, Roles, scattered_columns
from ..kernel_params import DIVIDEND_LIMIT, FastDivisor, Params, declared, int32
from ..plan import KernelSpec, Launch, PointerSlot, Schedule, Task, Work
from ..winograd.axis import ToomAxis
from ..winograd.nonfused import DIRECT, F23, F45, F45_NESTED, axis_refusal, fitted, read_end
from .nonfused_tiling import (
    CHUNK,
    K_TILE,
    MOST_STAGE,
    PARKED_BYTES,
    PARTS,
    UNITS,
    WARPS,
    Chain,
    MatrixInstruction,
    Slab,
)

TENSOR_CLASSES = 16
"""Tap classes per axis of a winograd_fp16x3 launch (``kTensorClasses`` in winograd_fp16x3/layout.cuh)."""


Fp16x3AbsmaxParams = declared("winograd_fp16x3/absmax", "Fp16x3AbsmaxParams")
Fp16x3Taps = declared("winograd_fp16x3/filter", "Fp16x3Taps")
Fp16x3FilterParams = declared("winograd_fp16x3/filter", "Fp16x3FilterParams", kTensorClasses=TENSOR_CLASSES)
Fp16x3Source = declared("winograd_fp16x3/input", "Fp16x3Source")
Fp16x3InputParams = declared("winograd_fp16x3/input", "Fp16x3InputParams", kTensorClasses=TENSOR_CLASSES)
Fp16x3GemmParams = declared("winograd_fp16x3/tile", "Fp16x3GemmParams")


THREADS = 256
TRANSFORM_THREADS = 128
FEWEST_CHANNELS = 8
"""Fewest source and written channels per group: with fewer, the tensor cores mostly multiply zeros."""
FACTS = {
    "polyconv::kTensorClasses": TENSOR_CLASSES,
    "polyconv::kMagnitudeParts": PARTS,
    "polyconv::kTensorK": K_TILE,
    "polyconv::kTensorUnits": UNITS,
    "polyconv::kTensorChannels": CHUNK,
}

W_AXES = (DIRECT, F23, F45, F45_NESTED)
Slots = tuple[PointerSlot, ...]

M8N8K4 = MatrixInstruction("884", "", 8, 4, 4, range(70, 71), SplitProducts(VOLTA, shift=0), UNITS, parks=True)
M16N8K16 = MatrixInstruction(
    "16816", "k16_", 16, 16, 1, range(80, 120), SplitProducts(AMPERE, shift=0), strip=16, parks=False
)
"""Not for sm_120 and later: there FP32 units match tensor cores that sum in FP32, and nested segments spill."""
INSTRUCTIONS = M8N8K4, M16N8K16
GENERATIONS = *M8N8K4.generations, *M16N8K16.generations
"""Compute capabilities with either instruction, and so of the kernels before the GEMM."""


# ------------------------------------------------------------------------------------------------------------- kernels


MAGNITUDE = KernelSpec.of(
    Fp16x3AbsmaxParams, "winograd_fp16x3/absmax", threads=THREADS, min_blocks=4, generations=GENERATIONS
)


@lru_cache(maxsize=64)
def weights_kernel(w: ToomAxis) -> KernelSpec:
    symbol = f"winograd_fp16x3_filter_{w.struct.lower()}"
    return KernelSpec.of(
        Fp16x3FilterParams,
        "winograd_fp16x3/filter",
        w,
        symbol=symbol,
        threads=THREADS,
        generations=GENERATIONS,
        facts=FACTS,
    )


@lru_cache(maxsize=64)
def transform_kernel(w: ToomAxis) -> KernelSpec:
    symbol = f"winograd_fp16x3_input_{w.struct.lower()}"
    return KernelSpec.of(
        Fp16x3InputParams,
        "winograd_fp16x3/input",
        w,
        symbol=symbol,
        threads=TRANSFORM_THREADS,
        min_blocks=5,
        generations=GENERATIONS,
        facts=FACTS,
    )


@lru_cache(maxsize=64)
def product_kernel(w: ToomAxis, mma: MatrixInstruction = M8N8K4) -> KernelSpec:
    tile = f"polyconv::Fp16x3Tile<{w.cpp}, {mma.cpp}>"
    return KernelSpec.of(
        Fp16x3GemmParams,
        "winograd_fp16x3/gemm",
        w,
        mma.steps(w),
        symbol=f"winograd_fp16x3_gemm_{mma.word}{w.struct.lower()}",
        threads=THREADS,
        generations=mma.generations,
        efficiency=0.75,  # from a coarse model of one block on a V100, and assumed for newer GPUs
        facts={
            **FACTS,
            f"{mma.steps(w)}::kStepsPerFlush": mma.steps_per_flush,
            f"{tile}::kThreads": THREADS,
            f"{tile}::kTiles": WARPS // w.points,
            f"{tile}::kChunks": mma.chunks,
            f"{tile}::kLoads * 32": MOST_STAGE,
            f"4 * {tile}::kExchange": mma.exchange_bytes,
            f"4 * {tile}::kParked": PARKED_BYTES,
        },
    )


def all_kernels() -> Iterator[KernelSpec]:
    yield MAGNITUDE
    for w in W_AXES:
        yield weights_kernel(w)
        yield transform_kernel(w)
        for mma in INSTRUCTIONS:
            yield product_kernel(w, mma)
            yield kernel_with_epilogue(product_kernel(w, mma))


@lru_cache(maxsize=256)
def headroom(axis: ToomAxis, transform: str, nested: bool = False) -> int:
    """Bits by which a transformed value may exceed the absmax; nested segments add or subtract two values.

    Kept, because every slab's launch has it, and the matrices consist of fractions.
    """
    growth = max(sum(abs(entry) for entry in row) for row in axis.transforms()[transform]) * (2 if nested else 1)
    return max(0, ceil(log2(growth)))


_chain = lru_cache(maxsize=1024)(Chain)


class Places(NamedTuple):
    """Workspace offsets. The absmax of the filters comes first, at 0."""

    weights: int
    images: int
    """Absmax parts of the images. Everything before stays valid while the weight is unchanged."""
    source: int


@lru_cache(maxsize=1024)
def places(problem: Problem, w: ToomAxis, mma: MatrixInstruction) -> Places:
    """Equal for all phases of a problem, which run in sequence and share the absmax parts."""
    r = fprop_dgrad.roles(problem)
    weights = filters_bytes(problem)
    largest = max(_chain(problem, kind.h, kind.w, w, mma).weight_bytes for kind in r.kinds)
    images = weights + round_up(largest, 256)
    return Places(weights, images, images + 4 * problem.batch * problem.groups * PARTS)


# ------------------------------------------------------------------------------------------------------- the candidates


@dataclass(frozen=True)
class Fp16x3Candidate:
    """One algorithm along W with one tensor-core instruction."""

    w: ToomAxis
    mma: MatrixInstruction = M8N8K4

    direct = False

    @cached_property
    def name(self) -> str:
        return f"winograd_fp16x3_{self.mma.word}{self.w.struct.lower()}"

    def refusal(self, problem: Problem) -> str | None:
        why = _refusal_of_all(problem)
        if why:
            return why
        for kind in fprop_dgrad.roles(problem).kinds:
            why = axis_refusal(self.w, kind.w.taps)
            if why:
                return why
            chain = _chain(problem, kind.h, kind.w, self.w, self.mma)
            if chain.cut is None:
                return f"{kind.h.taps} rows of taps with {chain.shifts} columns of them are too many for a tile"
            if len(kind.h.classes) > TENSOR_CLASSES or len(kind.w.classes) > TENSOR_CLASSES:
                return f"more than {TENSOR_CLASSES} classes of taps"
            if (
                chain.tiled.tiles * chain.planes >= DIVIDEND_LIMIT // 8
                or chain.plane_quads(chain.tiled.row_groups)
                * (chain.tiled.column_groups * chain.passes * chain.chunks * self.w.points)
                >= DIVIDEND_LIMIT
                or chain.chunks > MOST_GROUPS
            ):
                return "too many tiles"
        return None

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        left = workspace - places(problem, self.w, self.mma).source
        for number, kind in enumerate(fprop_dgrad.roles(problem).kinds):
            chain = _chain(problem, kind.h, kind.w, self.w, self.mma)
            yield replace(_weights_task(problem, chain), times=kind.times)
            knowing = kind.times  # chains that start with all absmax parts known: all but the first
            if number == 0:
                knowing -= 1
                beforehand = chain.parts_beforehand(left)
                yield filters_task(problem)
                yield _images_task(problem, chain, beforehand)
                yield from _slab_tasks(problem, chain, left, beforehand, 1)
            if knowing:
                yield from _slab_tasks(problem, chain, left, PARTS * chain.batch, knowing)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """Launches. A workspace too small for one row group is exceeded."""
        r = fprop_dgrad.roles(problem)
        found: list[Launch] = []
        at = places(problem, self.w, self.mma)
        left = workspace - at.source
        used = 0
        for number, (h, w) in enumerate(r.pairs):
            chain = _chain(problem, h, w, self.w, self.mma)
            known = PARTS * chain.batch
            if number == 0:
                found.append(filters(problem))
            found.append(_weights(problem, r, chain))
            if number == 0:
                known = chain.parts_beforehand(left)
                found.append(_images(problem, r, chain, known))
            for slab in chain.slabs(left, known):
                used = max(used, at.source + chain.source_bytes(slab.planes, slab.row_groups))
                found.append(_transform(problem, r, chain, slab))
                found.append(_product(problem, r, chain, slab))
        # A forward pass has one chain; of several, each overwrites the weights of the previous one.
        return Schedule(tuple(found), used, at.images if problem.kind is Pass.FPROP else 0)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return _error(problem, self)

    def ways(self, problem: Problem) -> tuple[Way, ...]:
        return _ways(problem, self)


def _slab_tasks(problem: Problem, chain: Chain, left: int, known: int, times: int) -> Iterator[Task]:
    """Tasks of all slabs of ``times`` equal chains; equal slabs are one task."""
    slabs = Counter((slab.planes, slab.row_groups, slab.found) for slab in chain.slabs(left, known))
    transforms: Counter[tuple[int, int]] = Counter()
    for (planes, row_groups, found), each in slabs.items():
        transforms[planes, row_groups] += each
        yield replace(_product_task(problem, chain, planes, row_groups, found), times=times * each)
    for (planes, row_groups), each in transforms.items():
        yield replace(_transform_task(problem, chain, planes, row_groups), times=times * each)


@lru_cache(maxsize=1024)
def _refusal_of_all(problem: Problem) -> str | None:
    """Why no candidate of this family can compute the problem, or None."""
    if problem.kind is Pass.WGRAD:
        return "only for the forward pass and the input gradient"
    r = fprop_dgrad.roles(problem)
    if r.border is not PaddingMode.ZEROS:
        return f"cannot read a {r.border} border"
    if min(r.channels, r.outputs) < FEWEST_CHANNELS:
        return f"fewer than {FEWEST_CHANNELS} channels of a group leave the tensor cores idle"
    if max(problem.batch, r.outputs) * problem.groups > MOST_GROUPS:
        return f"more than {MOST_GROUPS} groups, filters, or images times groups"
    if any(abs(stride) >= 2**31 for stride in (*r.source_strides[2:], *r.written_strides[2:], *problem.w_strides[2:])):
        return "rows or columns are too far apart"
    if max(r.channels, r.outputs) * prod(r.source_size) >= DIVIDEND_LIMIT:
        return "an image of more than 2^31 elements"
    return fprop_dgrad.MANY_PHASES if r.many_phases else None


@lru_cache(maxsize=1024)
def _error(problem: Problem, way: Fp16x3Candidate) -> float:
    """Expected error of the worst pair of phases."""
    return max(each.error(problem) for each in _ways(problem, way))


def _ways(problem: Problem, way: Fp16x3Candidate) -> tuple[Way, ...]:
    """One entry per kind of phase pair. Tap rows of a channel count towards the ``together`` products of a flush."""
    together = way.mma.steps_per_flush * way.mma.depth
    channels = fprop_dgrad.roles(problem).channels
    return tuple(
        Way(
            Scheme2d(fitted(DIRECT, kind.h.taps).scheme(), fitted(way.w, kind.w.taps).scheme()),
            len(kind.h.classes) * len(kind.w.classes) * channels,
            (ceil_div(together, max(1, kind.h.taps)),),
            (kind.h.taps, kind.w.taps),
            way.mma.products,
        )
        for kind in fprop_dgrad.roles(problem).kinds
    )


CANDIDATES = tuple(Fp16x3Candidate(w, mma) for mma in INSTRUCTIONS for w in W_AXES)


def candidates(problem: Problem) -> Iterator[Fp16x3Candidate]:
    """All candidates, refused or not, so that the planner can say why; none for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from CANDIDATES


# ------------------------------------------------------------------------------------------------------------- launches


def filters_task(problem: Problem) -> Task:
    """Absmax of every filter."""
    filters = problem.groups * fprop_dgrad.roles(problem).outputs
    read = 4 * prod(problem.w_shape)
    return Task(MAGNITUDE, (1, filters, 1), Work(filters, filters, ceil_div(read, 4 * THREADS), read))


def filters(problem: Problem) -> Launch:
    """Launch of :func:`filters_task`; writes to the beginning of the workspace."""
    r = fprop_dgrad.roles(problem)
    strides = problem.channels_per_group[1] * problem.w_strides[0], r.w_output
    every = zip((r.channels, *problem.kernel), (r.w_channel, *problem.w_strides[2:]), strict=True)
    return magnitude(filters_task(problem), "w", strides, r.outputs, tuple(every), 0)


def filters_bytes(problem: Problem) -> int:
    """Size of the filters' absmax, padded to align what follows."""
    return round_up(4 * problem.groups * fprop_dgrad.roles(problem).outputs, 256)


def _read_for(problem: Problem, chain: Chain, parts: int) -> int:
    """Bytes read for ``parts`` absmax parts of images, of all groups."""
    image = 4 * chain.groups * chain.channels * prod(fprop_dgrad.roles(problem).source_size)
    return ceil_div(parts * image, PARTS)


def _images_task(problem: Problem, chain: Chain, parts: int) -> Task:
    blocks, read = parts * chain.groups, _read_for(problem, chain, parts)
    return Task(
        MAGNITUDE,
        (PARTS, parts // PARTS * chain.groups, 1),
        Work(blocks, blocks, ceil_div(read, 4 * THREADS), read),
    )


def _images(problem: Problem, r: Roles, chain: Chain, parts: int) -> Launch:
    """Absmax launch before the first slab: ``parts`` parts, of whole images."""
    p, slots = _image_magnitudes(problem, r, chain)
    return _images_task(problem, chain, parts).launch(bytes(p), slots)


def _image_magnitudes(problem: Problem, r: Roles, chain: Chain) -> tuple[Params, Slots]:
    strides = r.source_strides[0], r.channels * r.source_strides[1]
    every = zip((r.channels, *r.source_size), r.source_strides[1:], strict=True)
    return magnitude_params(
        r.source, strides, chain.groups, tuple(every), places(problem, chain.along_w, chain.mma).images
    )


def magnitude(
    task: Task, source: str, strides: tuple[int, int], inner: int, axes: tuple[tuple[int, int], ...], at: int
) -> Launch:
    """Absmax launch for all slots of a tensor."""
    p, slots = magnitude_params(source, strides, inner, axes, at)
    return task.launch(bytes(p), slots)


def magnitude_params(
    source: str, strides: tuple[int, int], inner: int, axes: tuple[tuple[int, int], ...], at: int
) -> tuple[Params, Slots]:
    """Absmax parameters. ``axes``: extents and strides of a slot's elements, here sorted by stride; axes that are
    contiguous in memory are merged."""
    near: list[tuple[int, int]] = []
    for n, step in sorted(((n, step) for n, step in axes if n > 1), key=lambda axis: abs(axis[1])):
        if near and step == near[-1][0] * near[-1][1]:
            near[-1] = n * near[-1][0], near[-1][1]
        else:
            near.append((n, step))
    p = Fp16x3AbsmaxParams(outer_stride=strides[0], inner_stride=strides[1], inner_slots=inner)
    p.elements = prod(n for n, _ in axes)
    near += [(1, 0)] * (3 - len(near))
    for number, (_, step) in enumerate(near):
        p.stride[number] = step
    for number, (n, _) in enumerate(near[:2]):
        p.extent[number] = FastDivisor.of(n)
    return p, kernel_params.slots(Fp16x3AbsmaxParams, source=source, largest=("workspace", at))


def _weights_task(problem: Problem, chain: Chain) -> Task:
    blocks = int32(chain.groups * chain.k_tiles * chain.chunks, "the number of weight tiles")
    work = Work(blocks, blocks, blocks * chain.taps_h * chain.shifts, 4 * prod(problem.w_shape) + chain.weight_bytes)
    return Task(weights_kernel(chain.along_w), (blocks, 1, 1), work)


def _weights(problem: Problem, r: Roles, chain: Chain) -> Launch:
    p = Fp16x3FilterParams(channels_all=chain.channels_all, outputs=chain.outputs)
    p.headroom = headroom(chain.along_w, "weights", chain.nested)
    p.w_group = problem.channels_per_group[1] * problem.w_strides[0]
    p.w_output, p.w_channel = r.w_output, r.w_channel
    p.w_row, p.w_column = problem.w_strides[2:]
    p.taps_h, p.shifts, p.chunks, p.k_tiles = chain.taps_h, chain.shifts, chain.chunks, chain.k_tiles
    p.source_channels, p.classes_w = chain.channels, len(chain.w.classes)
    for table, axis in ((p.class_h, chain.h), (p.class_w, chain.w)):
        for number, taps in enumerate(axis.classes):
            table[number] = Fp16x3Taps(taps.taps, taps.tap_first, taps.tap_stride)
    u = "workspace", places(problem, chain.along_w, chain.mma).weights
    slots = kernel_params.slots(Fp16x3FilterParams, w="w", u=u, largest=("workspace", 0))
    return _weights_task(problem, chain).launch(bytes(p), slots)


def _transform_task(problem: Problem, chain: Chain, planes: int, row_groups: int) -> Task:
    r, cut = fprop_dgrad.roles(problem), chain.tiled
    across = ceil_div(chain.plane_quads(row_groups), TRANSFORM_THREADS)
    grid = across * cut.column_groups, chain.groups * planes, chain.chunks
    share = planes * row_groups / (chain.planes * cut.row_groups)
    read = round(4 * chain.batch * chain.groups * chain.channels * prod(r.source_size) * share)
    blocks, passed, slab = prod(grid), chain.source_bytes(planes, row_groups), chain.slab_bytes(planes, row_groups)
    # Lanes outside of the image, many in small ones, load nothing. Classes of taps share the pixels among them.
    pixels = chain.batch * prod(r.source_size) * share / (len(chain.h.classes) * len(chain.w.classes))
    loads = int(pixels * chain.groups * chain.chunks * CHUNK * chain.along_w.span / chain.along_w.outputs / 32)
    lines, _ = scattered_columns(r.source_strides, loads, chain.w.read_step * chain.along_w.outputs)
    work = Work(blocks, blocks, blocks, read + passed, lines, passed_bytes=passed, slab_bytes=slab)
    return Task(transform_kernel(chain.along_w), grid, work)


def _transform(problem: Problem, r: Roles, chain: Chain, slab: Slab) -> Launch:
    h, w, cut = chain.h, chain.w, chain.tiled
    plane, planes, first, row_groups, *_ = slab
    p = Fp16x3InputParams(channels_all=chain.channels_all, chunks=chain.chunks, groups=chain.groups)
    p.headroom = headroom(chain.along_w, "input", chain.nested)
    p.place("source", r.source_strides, r.source)
    p.first_plane, p.planes, p.first_row = plane, planes, first * cut.rows
    p.positions, p.pitch = chain.plane_quads(row_groups), cut.pitch
    p.phases, p.units, p.phase_groups, p.column_groups = cut.phases, cut.units, cut.phase_groups, cut.column_groups
    p.dilation_h, p.dilation_w = h.dilation, w.dilation
    p.read_step_h, p.read_step_w = h.read_step, w.read_step
    p.source_channels, p.classes_w = chain.channels, len(w.classes)
    for table, axis, extent in ((p.class_h, h, r.source_size[0]), (p.class_w, w, r.source_size[1])):
        for number, taps in enumerate(axis.classes):
            table[number] = Fp16x3Source(taps.read_first, read_end(axis, taps, extent))
    at = places(problem, chain.along_w, chain.mma)
    slots = kernel_params.slots(
        Fp16x3InputParams, source=r.source, largest=("workspace", at.images), v=("workspace", at.source)
    )
    return _transform_task(problem, chain, planes, row_groups).launch(bytes(p), slots)


def _product_blocks(chain: Chain, planes: int, row_groups: int) -> int:
    """GEMM blocks of a group."""
    tiles = planes * row_groups * chain.tiled.column_groups
    return ceil_div(tiles, WARPS // chain.along_w.points) * chain.k_tiles


def _product_task(problem: Problem, chain: Chain, planes: int, row_groups: int, found: int) -> Task:
    cut = chain.tiled
    own = _product_blocks(chain, planes, row_groups)
    grid = int32(own + found, "the number of tiles"), chain.groups, 1
    share = planes * row_groups / (chain.planes * cut.row_groups)
    result = round(chain.batch * chain.groups * chain.outputs * chain.h.count * chain.w.count * share)
    blocks, passed = own * chain.groups, chain.slab_bytes(planes, row_groups)
    moved = passed + 4 * result + _read_for(problem, chain, found)
    steps = blocks * chain.steps * round_up(cut.rows * cut.columns, chain.mma.strip) // UNITS
    stores = scattered_columns(fprop_dgrad.roles(problem).written_strides, result // 32, chain.w.written_step)
    task = Task(
        product_kernel(chain.along_w, chain.mma),
        grid,
        Work(blocks, blocks, steps, moved, *stores, passed_bytes=passed, slab_bytes=passed, behind=found),
        dynamic_shared=chain.shared_bytes(),
    )
    return task_with_epilogue(problem, task, result)


def _product(problem: Problem, r: Roles, chain: Chain, slab: Slab) -> Launch:
    h, w, cut = chain.h, chain.w, chain.tiled
    plane, planes, first, row_groups, known, found = slab
    p = Fp16x3GemmParams(groups=chain.groups, outputs=chain.outputs, chunks=chain.chunks)
    p.headroom_sources = headroom(chain.along_w, "input", chain.nested)
    p.headroom_filters = headroom(chain.along_w, "weights", chain.nested)
    p.place("written", r.written_strides, r.written)
    p.first_plane, p.planes, p.first_row = plane, planes, first * cut.rows
    p.tiles, p.k_tiles = planes * row_groups * cut.column_groups, chain.k_tiles
    p.row_groups, p.column_groups, p.phase_groups = row_groups, cut.column_groups, cut.phase_groups
    p.columns, p.phases, p.stretch = cut.columns, cut.phases, cut.columns * chain.along_w.outputs
    p.rows, p.units = cut.rows, cut.units
    p.shifts, p.taps = chain.shifts, chain.taps_h * chain.shifts
    p.pitch, p.stage, p.positions = cut.pitch, cut.stage, chain.plane_quads(row_groups)
    p.next_tap_row = cut.pitch - chain.shifts * cut.phases
    p.last_tap = (chain.taps_h - 1) * cut.pitch + (chain.shifts - 1) * cut.phases
    p.dilation_h, p.dilation_w = h.dilation, w.dilation
    p.count_h, p.count_w = h.count, w.count
    p.written_first_h, p.written_step_h = h.written_first, h.written_step
    p.written_first_w, p.written_step_w = w.written_first, w.written_step
    at = places(problem, chain.along_w, chain.mma)
    slots = kernel_params.slots(
        Fp16x3GemmParams,
        v=("workspace", at.source),
        u=("workspace", at.weights),
        largest_sources=("workspace", at.images),
        largest_filters=("workspace", 0),
        written=r.written,
        bias=r.bias,
    )
    p.blocks = _product_blocks(chain, planes, row_groups)
    if found:
        p.first_part = known
        p.behind, of_behind = _image_magnitudes(problem, r, chain)
        slots += kernel_params.slots_within(Fp16x3GemmParams, "behind", of_behind)
    return with_epilogue(problem, _product_task(problem, chain, planes, row_groups, found).launch(bytes(p), slots))
