"""Plans for the Winograd weight gradient with FP32 accuracy on FP16 tensor cores (kernels/winograd_fp16x3/wgrad.cuh).

Tiles, slices and sums are those of :mod:`polyconv.cuda.planner.winograd.wgrad`. The absmax of every channel, by which
the operands are scaled, is computed first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from ....problem import Pass, Problem, Shape, Strides
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..implicit_gemm.fprop_dgrad import MOST_GROUPS
from ..kernel_params import DIVIDEND_LIMIT, declared
from ..plan import KernelSpec, Launch, Schedule, Task, Work
from ..winograd import wgrad
from ..winograd.wgrad import (
    FIVE,
    NINE,
    POINTS,
    SLICES_PER_GROUP,
    SUM,
    TILE_CHUNK,
    Cut,
    WgradTile,
    WinogradWgradCandidate,
    finish_kernel,
    lattices,
)
from .nonfused import FEWEST_CHANNELS, M8N8K4, MAGNITUDE, THREADS, headroom, magnitude
from .nonfused_tiling import PARTS

Fp16x3WgradParams = declared("winograd_fp16x3/wgrad", "Fp16x3WgradParams")


H, W = FIVE, NINE
"""Algorithms along both axes, also for kernels with fewer taps."""
TILE = POINTS
"""A warp has one point of W, with all its segments."""
SHARED_BYTES = wgrad.shared_bytes(W, TILE) + 4 * (TILE.k + TILE.c)
"""Shared memory of the FP32 kernel, plus the scales of the tile's channels."""
_SIZES = f"polyconv::WinogradWgradSizes<{H.cpp}, {W.cpp}, {TILE.cpp}>"
KERNEL = KernelSpec.of(
    Fp16x3WgradParams,
    "winograd_fp16x3/wgrad",
    *(H, W, TILE, False),
    symbol=f"winograd_fp16x3_wgrad_{H.struct}_{W.struct}",
    threads=32 * W.points,
    generations=M8N8K4.generations,
    facts={"polyconv::kMagnitudeParts": PARTS, **wgrad.FACTS, f"{_SIZES}::kThreads": 32 * W.points},
    efficiency=0.5,  # assumed equal to winograd/wgrad
)


def all_kernels() -> Iterator[KernelSpec]:
    yield from (MAGNITUDE, KERNEL, SUM, finish_kernel(H, W))


@dataclass(frozen=True)
class Fp16x3WgradCandidate(WinogradWgradCandidate):
    """F(m, r) along both axes of the weight gradient, with products on tensor cores."""

    along_h = (H,)
    along_w = (W,)
    params = Fp16x3WgradParams
    arithmetic = M8N8K4.products
    shared_bytes = SHARED_BYTES

    @property
    def name(self) -> str:
        return KERNEL.symbol

    def refusal(self, problem: Problem) -> str | None:
        if problem.kind is Pass.WGRAD:
            h, w = lattices(problem)
            if len(h.classes) * len(w.classes) > 1:
                return "a stride splits the taps into classes, which only the FP32 kernels know"
            if h.taps > H.taps or w.taps > W.taps:
                return f"more than {H.taps} x {W.taps} taps"
        why = super().refusal(problem)
        if why:
            return why
        if min(problem.channels_per_group) < FEWEST_CHANNELS:
            return f"fewer than {FEWEST_CHANNELS} channels of a group leave the tensor cores idle"
        if max(problem.in_channels, problem.out_channels) > MOST_GROUPS:
            return f"more than {MOST_GROUPS} channels"
        if problem.batch * max(prod(problem.in_size), prod(problem.out_size)) >= DIVIDEND_LIMIT:
            return "a channel of more than 2^31 elements"
        return None

    def offered(self, classed: bool) -> tuple[WgradTile, ...]:
        return () if classed else (TILE,)

    def spec(self, problem: Problem) -> KernelSpec:
        return KERNEL

    def sums(self, work: Cut) -> tuple[int, ...]:
        """Tiles of a chunk, summed by tensor cores; then chunks per flush and so on, summed in float32."""
        return TILE_CHUNK, work.flush, ceil_div(work.chunks_per_slice, work.flush), SLICES_PER_GROUP

    def work(self, problem: Problem, sms: int, workspace: int) -> Cut:
        return super().work(problem, sms, workspace - sum(operand.bytes for operand in _operands(problem)))

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        yield from (operand.task for operand in _operands(problem))
        yield from super().tasks(problem, sms, workspace)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """Absmax of dy and x, then the launches of the FP32 kernel. The absmax lies behind the partial sums."""
        sums = super().schedule(problem, sms, workspace)
        multiply, *others = sums.launches
        dy, x = _operands(problem)
        of_dy = round_up(sums.workspace_bytes, 16)
        of_x = of_dy + dy.bytes
        p = Fp16x3WgradParams.from_buffer_copy(multiply.params)
        p.headroom_dy = headroom(self.h, "spread") + headroom(self.w, "spread")
        p.headroom_x = headroom(self.h, "input") + headroom(self.w, "input")
        slots = kernel_params.slots(Fp16x3WgradParams, largest_dy=("workspace", of_dy), largest_x=("workspace", of_x))
        scaled = replace(multiply, params=bytes(p), pointers=(*multiply.pointers, *slots))
        return Schedule((dy.launch(of_dy), x.launch(of_x), scaled, *others), of_x + x.bytes)


class _Operand(NamedTuple):
    """A tensor that is scaled per channel."""

    buffer: str
    shape: Shape
    strides: Strides

    @property
    def bytes(self) -> int:
        """Size of the absmax parts of all channels."""
        return 4 * PARTS * self.shape[1]

    @property
    def task(self) -> Task:
        blocks, elements = PARTS * self.shape[1], prod(self.shape)
        work = Work(blocks, blocks, ceil_div(elements, THREADS), 4 * elements)
        return Task(MAGNITUDE, (PARTS, self.shape[1], 1), work)

    def launch(self, at: int) -> Launch:
        """Absmax launch that writes to workspace offset ``at``."""
        images, channels, *picture = zip(self.shape, self.strides, strict=True)
        return magnitude(self.task, self.buffer, (0, channels[1]), channels[0], (images, *picture), at)


def _operands(problem: Problem) -> tuple[_Operand, _Operand]:
    """dy and x."""
    return (
        _Operand("y", problem.y_shape, problem.y_strides),
        _Operand("x", problem.x_shape, problem.x_strides),
    )


CANDIDATE = Fp16x3WgradCandidate(H, W, TILE)


def candidates(problem: Problem) -> Iterator[Fp16x3WgradCandidate]:
    """The only candidate, refused or not, so that the planner can say why."""
    if problem.kind is Pass.WGRAD:
        yield CANDIDATE
