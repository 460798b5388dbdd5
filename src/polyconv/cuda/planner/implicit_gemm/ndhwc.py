"""Plans for 16-bit volumes in channels_last_3d, from sm_80 on (kernels/implicit_gemm/fprop_dgrad_nhwc.cuh and
wgrad_nhwc.cuh, with volumes).

Grid, packed weights and reduction are those of a 2-D problem (:func:`flattened`): its images are the slices of the
volumes, and its kernel has the rows of all slices of the kernel, one below the other. Parameters of the third axis are
added to those of its launch. An input gradient with strides is several of these (:class:`StridedGradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, product
from math import prod

from ....algebra.polyphase import Phase, gradient_phases
from ....numerics.prediction import half_error
from ....problem import HALF_DTYPES, Pass, Problem, Strides
from ....selection import PlanError
from ....util.intmath import round_up
from ..candidate import DirectCandidate
from ..cost import moved_bytes
from ..kernel_params import MAX_PHASES, declared, half_structs, with_fields
from ..plan import KernelSpec, Launch, Schedule, Task
from . import fprop_dgrad_nhwc, wgrad_nhwc
from .fprop_dgrad import MANY_PHASES, MOST_PHASES, PhaseTables, roles
from .fprop_dgrad_nhwc import CHUNK, COPIED, ImplicitGemmNhwcCandidate
from .wgrad import bordered
from .wgrad_nhwc import WgradNhwcCandidate

RANK = 3
"""Axes of the problems."""
DTYPES = HALF_DTYPES

VolumeParams = declared("implicit_gemm/fprop_dgrad_nhwc", "VolumeParams")
VolumeWgradParams = declared("implicit_gemm/wgrad_nhwc", "VolumeWgradParams")


class _Gemm(ImplicitGemmNhwcCandidate):
    volume = True
    structs = half_structs(VolumeParams)


class _Wgrad(WgradNhwcCandidate):
    volume = True
    structs = half_structs(VolumeWgradParams)


@lru_cache(maxsize=1024)
def flattened(problem: Problem) -> Problem:
    """The 2-D problem with the same phases, pixels and weights."""
    slices, rows = problem.kernel[:2]
    across = problem.across(0)
    top, bottom, left, right = across.padding
    below = bottom + problem.dilation[1] * (slices - 1) * rows  # the number of outputs stays the same
    return replace(
        across,
        batch=problem.batch * (problem.in_size if problem.kind is Pass.DGRAD else problem.out_size)[0],
        kernel=(slices * rows, problem.kernel[2]),
        padding=(top, below, left, right),
        x_strides=of_slices(problem.x_strides),
        y_strides=of_slices(problem.y_strides),
    )


def of_slices(strides: Strides) -> Strides:
    _, channel, depth, row, column = strides
    return depth, channel, row, column


def why_not_below(problem: Problem) -> str | None:
    """Why the rows of all slices of the kernel cannot be packed one below the other, or None."""
    if bordered(problem):  # slices lack that of the depth
        return f"cannot read a {problem.padding_mode} border"
    if problem.kind is Pass.DGRAD and max(problem.stride) > 1:
        return "not for input gradients with strides"
    if problem.kernel[0] > 1 and problem.w_strides[2] != problem.kernel[1] * problem.w_strides[3]:
        return "the slices of the weight do not follow one another"
    return None


def why_not_flat(problem: Problem) -> str | None:
    """Why slices cannot be images one after another, or None."""
    if refused := why_not_below(problem):
        return refused
    gathered, (batch, _, depth, _, _), slices = problem.x_strides, problem.y_strides, problem.out_size[0]
    if problem.kind is Pass.DGRAD:
        gathered, (batch, _, depth, _, _), slices = problem.y_strides, problem.x_strides, problem.in_size[0]
    if problem.batch > 1 and batch != slices * depth:
        return f"the volumes of {'x' if problem.kind is Pass.DGRAD else 'y'} do not follow one another"
    return "volumes are not aligned to 16 bytes" if problem.batch > 1 and gathered[0] % CHUNK else None


def depth_of_gemm(problem: Problem) -> dict[str, int]:
    """Fields of ``VolumeParams``."""
    forward, dilation, before = problem.kind is Pass.FPROP, problem.dilation[0], problem.padding[0]
    x, y = (problem.x_strides[0], problem.in_size[0]), (problem.y_strides[0], problem.out_size[0])
    (volume, depth), (_, slices) = (x, y) if forward else (y, x)
    return {
        "source_volume": volume,
        "source_depth": depth,
        "slices": slices,
        "read_first_d": -before if forward else before,
        "read_step_d": problem.stride[0],
        "tap_step_d": dilation if forward else -dilation,
        "rows_of_slice": problem.kernel[1],
    }


def _depth_of_wgrad(problem: Problem) -> dict[str, int]:
    """Fields of ``VolumeWgradParams``."""
    slices, stride = problem.out_size[0], problem.stride[0]
    return {
        "next_volume": problem.x_strides[0] - slices * stride * problem.x_strides[2],
        "slices": slices,
        "rows_of_slice": problem.kernel[1],
        "depth": problem.in_size[0],
        "stride_d": stride,
        "dilation_d": problem.dilation[0],
        "pad_front": problem.padding[0],
    }


@dataclass(frozen=True)
class VolumeCandidate(DirectCandidate):
    """A pass of volumes with adjacent channels, as one of flattened problems."""

    flat: _Gemm | _Wgrad
    depth: Callable[[Problem], Mapping[str, int]]

    @property
    def kernel(self) -> KernelSpec:
        return self.flat.kernel

    def refusal(self, problem: Problem) -> str | None:
        if refused := why_not_flat(problem) or self.flat.refusal(flattened(problem)):
            return refused
        try:
            launches = sum(task.kernel == self.kernel for task in self.flat.tasks(flattened(problem), 1, 2**26))
        except PlanError as error:  # numbers past 32 bits
            return str(error)
        return "too many pixels for one launch" if launches > 1 else None

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        return self.flat.sums(flattened(problem), sms, workspace)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return half_error(problem, self.sums(problem, sms, workspace))

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        for task in self.flat.tasks(flattened(problem), sms, workspace):
            yield self._of_volume(task, problem)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        found = self.flat.schedule(flattened(problem), sms, workspace)
        return replace(found, launches=tuple(self._launch(one, problem) for one in found.launches))

    def _of_volume(self, task: Task, problem: Problem) -> Task:
        """The task with the bytes of the volumes: with a stride, more slices are read than written."""
        if task.kernel != self.kernel:
            return task
        more = moved_bytes(problem) - moved_bytes(flattened(problem))
        return replace(task, work=replace(task.work, dram_bytes=task.work.dram_bytes + more))

    def _launch(self, launch: Launch, problem: Problem) -> Launch:
        if launch.kernel != self.kernel:
            return launch
        task = self._of_volume(Task(launch.kernel, launch.grid, launch.work), problem)
        return with_fields(replace(launch, work=task.work), self.depth(problem))


# ---- Input gradients with strides


@lru_cache(maxsize=1024)
def _slices(problem: Problem, count: int = 1) -> Problem:
    """``count`` slices of one residue class of the depth, as images: a 2-D input gradient."""
    _, channel, depth, row, column = problem.x_strides
    return replace(
        problem.across(0),
        batch=count,
        x_strides=(problem.stride[0] * depth, channel, row, column),
        y_strides=of_slices(problem.y_strides),
    )


@lru_cache(maxsize=1024)
def _depths(problem: Problem) -> tuple[Phase, ...]:
    return gradient_phases(
        *(axes[0] for axes in (problem.in_size, problem.kernel, problem.stride, problem.dilation, problem.padding))
    )


class StridedGradient(_Gemm):
    """An input gradient with strides: a launch per residue class of the depth, and per number of taps among the classes
    of the height. The classes of the width and the others of the height are phases of a launch.

    The slices of the kernel that belong to a class are packed one after another, each by a launch that packs it for all
    phases. Its zeros behind the rows of a phase are overwritten by the next slice.
    """

    @property
    def name(self) -> str:
        return f"{self.kernel.symbol}_strided"

    def refusal(self, problem: Problem) -> str | None:
        if problem.kind is not Pass.DGRAD or max(problem.stride) == 1:
            return "only for input gradients with strides"
        if bordered(problem):
            return f"cannot read a {problem.padding_mode} border"
        if refused := super().refusal(_slices(problem)):
            return refused
        depth, volumes = problem.x_strides[2], (problem.x_strides[0], problem.y_strides[0])
        if depth % CHUNK or (problem.batch > 1 and any(stride % CHUNK for stride in volumes)):
            return "volumes are not aligned to 16 bytes"
        if prod(problem.stride) > MOST_PHASES or max(problem.stride[1:]) > MAX_PHASES:
            return MANY_PHASES
        try:
            return MANY_PHASES if len(self._launches(problem)) > MOST_PHASES else None
        except PlanError as error:  # numbers past 32 bits
            return str(error)

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        r = roles(_slices(problem))
        return (
            prod(max(one.taps for one in axis) for axis in (_depths(problem), r.phases_h, r.phases_w)) * r.channels,
        )

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        for one in self._launches(problem):
            yield Task(one.kernel, one.grid, one.work, dynamic_shared=one.dynamic_shared)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        used = sum(self._packed_bytes(problem, depth) for depth in _depths(problem))
        return Schedule(tuple(self._launches(problem)), used)

    def _launches(self, problem: Problem) -> list[Launch]:
        found: list[Launch] = []
        used = 0
        for depth in _depths(problem):
            packed = "workspace", used
            found += [*self._pack_slices(problem, depth, packed), *self._multiply(problem, depth, packed)]
            used += self._packed_bytes(problem, depth)
        return found

    def _first_rows(self, problem: Problem, depth: Phase) -> tuple[dict[tuple[Phase, Phase], int], int]:
        """The first packed row of each pair of phases, and the number of rows."""
        r = roles(_slices(problem))
        first, rows = dict[tuple[Phase, Phase], int](), 0
        for h, w in product(r.phases_h, r.phases_w):
            first[h, w] = rows
            rows += max(self._ends(depth.taps, h.taps * w.taps * r.channels))
        return first, rows

    def _ends(self, taps: int, of_slice: int) -> tuple[int, int]:
        """The last row of some slices that the product reads, and the last one that is packed."""
        read = round_up(taps * of_slice, self.tile.depth)
        return read, (taps - 1) * of_slice + round_up(of_slice, self.tile.depth) if taps else 0

    def _packed_bytes(self, problem: Problem, depth: Phase) -> int:
        rows = problem.groups * self._first_rows(problem, depth)[1] + self.tile.depth
        return round_up(problem.element_bytes * rows * self._outputs_padded(roles(_slices(problem))), 256)

    def _pack_slices(self, problem: Problem, depth: Phase, packed: tuple[str, int]) -> Iterator[Launch]:
        """A launch per slice. If rows behind the last one are read, the first launch fills them with zeros."""
        flat = _slices(problem)
        r, (first, rows) = roles(flat), self._first_rows(problem, depth)
        of_slice = {(h, w): h.taps * w.taps * r.channels for h, w in first}
        ends = {pair: self._ends(depth.taps, one) for pair, one in of_slice.items()}

        def pack(first_rows: Iterable[int]) -> Launch:
            launch = self._pack(flat, r, PhaseTables(r.phases_h, r.phases_w, tuple(first_rows), rows), None, packed)
            work, part = launch.work, depth.taps  # of all slices
            work = replace(work, dram_bytes=work.dram_bytes // part, scattered_lines=work.scattered_lines // part)
            return replace(launch, work=work)

        if any(read > filled for read, filled in ends.values()):
            last = (row + ends[pair][0] - self._ends(1, of_slice[pair])[0] for pair, row in first.items())
            yield with_fields(pack(last), {"outputs": 0})
        for tap in range(depth.taps if rows else 0):
            at = (depth.tap_first + tap * depth.tap_stride) * problem.w_strides[2]
            packing = pack(row + tap * of_slice[pair] for pair, row in first.items())
            yield _displaced(packing, w=problem.element_bytes * at)

    def _multiply(self, problem: Problem, depth: Phase, packed: tuple[str, int]) -> Iterator[Launch]:
        each, of_x, of_y = problem.element_bytes, problem.x_strides, problem.y_strides
        apart = problem.batch > 1 and of_x[0] != depth.count * problem.stride[0] * of_x[2]
        volumes = 1 if apart else problem.batch  # of a launch
        flat = _slices(problem, depth.count * volumes)
        r, (first, rows) = roles(flat), self._first_rows(problem, depth)
        fields = {
            "source_volume": of_y[0],
            "source_depth": problem.out_size[0],
            "slices": depth.count,
            "read_first_d": depth.read_first,
            "read_step_d": depth.read_step,
            "tap_step_d": depth.tap_step,
        }
        for taps, alike in groupby(sorted(r.phases_h, key=lambda h: h.taps), key=lambda h: h.taps):
            phases = tuple(alike)
            first_rows = tuple(first[pair] for pair in product(phases, r.phases_w))
            all_taps = tuple(replace(h, taps=depth.taps * taps) for h in phases)
            tables = PhaseTables(all_taps, r.phases_w, first_rows, rows)
            launch, *others = self._gather(flat, r, tables, None, packed)
            if others:
                raise PlanError("too many pixels for one launch")
            products = depth.taps * taps * len(phases) * sum(w.taps for w in r.phases_w)
            moved = flat.batch * sum(h.count for h in phases) * problem.in_size[2] * problem.in_channels
            moved += products * r.channels * problem.groups * self._outputs_padded(r)
            moved += volumes * prod(problem.y_shape[1:]) * (products > 0)
            launch = replace(launch, work=replace(launch.work, dram_bytes=each * moved))
            launch = with_fields(launch, {**fields, "rows_of_slice": max(1, taps)})
            for volume in range(problem.batch if apart else 1):
                to = volume * of_x[0] + depth.written_first * of_x[2]
                yield _displaced(launch, x=each * to, y=each * volume * of_y[0])


def _displaced(launch: Launch, **offsets: int) -> Launch:
    """The launch with these offsets [bytes] added to the addresses of buffers."""
    moved = (replace(one, byte_offset=one.byte_offset + offsets.get(one.buffer, 0)) for one in launch.pointers)
    return replace(launch, pointers=tuple(moved))


FPROP_DGRAD = {
    dtype: tuple(VolumeCandidate(_Gemm(tile.of(dtype), COPIED), depth_of_gemm) for tile in fprop_dgrad_nhwc.TILES)
    for dtype in DTYPES
}
STRIDED = {dtype: tuple(StridedGradient(tile.of(dtype), COPIED) for tile in fprop_dgrad_nhwc.TILES) for dtype in DTYPES}
WGRAD = {
    dtype: tuple(VolumeCandidate(_Wgrad(tile.of(dtype)), _depth_of_wgrad) for tile in wgrad_nhwc.TILES)
    for dtype in DTYPES
}


def candidates(problem: Problem) -> Iterator[VolumeCandidate | StridedGradient]:
    """Every tile, refused or not."""
    strided = problem.kind is Pass.DGRAD and max(problem.stride) > 1
    yield from (WGRAD if problem.kind is Pass.WGRAD else STRIDED if strided else FPROP_DGRAD).get(problem.dtype, ())


def all_kernels() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        yield from (candidate.kernel for candidate in (*FPROP_DGRAD[dtype], *WGRAD[dtype]))
