"""Plans for 16-bit volumes in channels_last_3d, from sm_80 on (kernels/implicit_gemm/fprop_dgrad_nhwc.cuh and
wgrad_nhwc.cuh, with volumes).

Grid, packed weights and reduction are those of a 2-D problem (:func:`flattened`): its images are the slices of the
volumes, and its kernel has the rows of all slices of the kernel, one below the other. Parameters of the third axis are
added to those of its launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from ....numerics.prediction import half_error
from ....problem import HALF_DTYPES, Pass, Problem, Strides
from ....selection import PlanError
from ..candidate import DirectCandidate
from ..cost import moved_bytes
from ..kernel_params import declared, half_structs
from ..plan import KernelSpec, Launch, Schedule, Task
from . import fprop_dgrad_nhwc, wgrad_nhwc
from .fprop_dgrad_nhwc import CHUNK, COPIED, ImplicitGemmNhwcCandidate
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
        x_strides=_of_slices(problem.x_strides),
        y_strides=_of_slices(problem.y_strides),
    )


def _of_slices(strides: Strides) -> Strides:
    _, channel, depth, row, column = strides
    return depth, channel, row, column


def why_not_flat(problem: Problem) -> str | None:
    """Why slices cannot be images one after another, or None."""
    if problem.kind is Pass.DGRAD and max(problem.stride) > 1:
        return "only for input gradients without strides"
    if problem.kernel[0] > 1 and problem.w_strides[2] != problem.kernel[1] * problem.w_strides[3]:
        return "the slices of the weight do not follow one another"
    gathered, (batch, _, depth, _, _), slices = problem.x_strides, problem.y_strides, problem.out_size[0]
    if problem.kind is Pass.DGRAD:
        gathered, (batch, _, depth, _, _), slices = problem.y_strides, problem.x_strides, problem.in_size[0]
    if problem.batch > 1 and batch != slices * depth:
        return f"the volumes of {'x' if problem.kind is Pass.DGRAD else 'y'} do not follow one another"
    return "volumes are not aligned to 16 bytes" if problem.batch > 1 and gathered[0] % CHUNK else None


def _depth_of_gemm(problem: Problem) -> dict[str, int]:
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
        if launch.kernel != self.kernel or self.kernel.struct is None:
            return launch
        p = self.kernel.struct.from_buffer_copy(launch.params.ljust(self.kernel.params_bytes, b"\0"))
        for field, value in self.depth(problem).items():
            setattr(p, field, value)
        task = self._of_volume(Task(launch.kernel, launch.grid, launch.work), problem)
        return replace(launch, params=bytes(p) + launch.params[ctypes.sizeof(p) :], work=task.work)


FPROP_DGRAD = {
    dtype: tuple(VolumeCandidate(_Gemm(tile.of(dtype), COPIED), _depth_of_gemm) for tile in fprop_dgrad_nhwc.TILES)
    for dtype in DTYPES
}
WGRAD = {
    dtype: tuple(VolumeCandidate(_Wgrad(tile.of(dtype)), _depth_of_wgrad) for tile in wgrad_nhwc.TILES)
    for dtype in DTYPES
}


def candidates(problem: Problem) -> Iterator[VolumeCandidate]:
    """Every tile, refused or not."""
    yield from (WGRAD if problem.kind is Pass.WGRAD else FPROP_DGRAD).get(problem.dtype, ())


def all_kernels() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        yield from (candidate.kernel for candidate in (*FPROP_DGRAD[dtype], *WGRAD[dtype]))
