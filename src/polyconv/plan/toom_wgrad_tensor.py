"""Plans for the fast weight gradient on FP16 tensor cores at the accuracy of FP32 (kernels/toom_wgrad_tensor.cuh).

Tiles, slices and sums are those of :mod:`polyconv.plan.toom_wgrad`; what is new comes before: the largest magnitudes of
all channels, by which the operands are scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from ..problem import Pass, Problem, Shape, Strides
from ..rounding import ceil_div, round_up
from . import layout, toom_wgrad
from .gather import MOST_GROUPS
from .layout import DIVIDEND_LIMIT, ToomWgradTensorParams
from .plan import KernelSpec, Launch, Schedule, Task, Work
from .tensor import FEWEST_CHANNELS, M8N8K4, MAGNITUDE, PARTS, THREADS, headroom, magnitude
from .toom_wgrad import (
    FIVE,
    NINE,
    POINTS,
    SLICES_PER_GROUP,
    SUM,
    TILE_CHUNK,
    Cut,
    ToomWgradCandidate,
    WgradTile,
    finish_kernel,
    lattices,
)

H, W = FIVE, NINE
"""The algorithms along both axes, for all kernels that have no more taps."""
TILE = POINTS
"""A warp has one point of W, with all its segments."""
SHARED_BYTES = toom_wgrad.shared_bytes(W, TILE) + 4 * (TILE.k + TILE.c)
"""As much as with FP32 products, and the scales of all channels."""
_SIZES = f"polyconv::ToomWgradSizes<{H.cpp}, {W.cpp}, {TILE.cpp}>"
KERNEL = KernelSpec.of(
    ToomWgradTensorParams,
    "toom_wgrad_tensor",
    *(H, W, TILE, False),
    symbol=f"toom_wgrad_tensor_{H.struct}_{W.struct}",
    threads=32 * W.points,
    generations=M8N8K4.generations,
    facts={f"{_SIZES}::kThreads": 32 * W.points},
)


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    yield from (MAGNITUDE, KERNEL, SUM, finish_kernel(H, W))


@dataclass(frozen=True)
class ToomWgradTensorCandidate(ToomWgradCandidate):
    """F(m, r) along both axes of the weight gradient, its products on tensor cores."""

    along_h = (H,)
    along_w = (W,)
    params = ToomWgradTensorParams
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
        """Tensor cores sum the tiles of a chunk; float32 sums the chunks, and so on."""
        return TILE_CHUNK, work.flush, ceil_div(work.chunks_per_slice, work.flush), SLICES_PER_GROUP

    def work(self, problem: Problem, sms: int, workspace: int) -> Cut:
        return super().work(problem, sms, workspace - sum(operand.bytes for operand in _operands(problem)))

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        yield from (operand.task for operand in _operands(problem))
        yield from super().tasks(problem, sms, workspace)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """The largest magnitudes lie behind the sums."""
        sums = super().schedule(problem, sms, workspace)
        multiply, *others = sums.launches
        dy, x = _operands(problem)
        of_dy = round_up(sums.workspace_bytes, 16)
        of_x = of_dy + dy.bytes
        p = ToomWgradTensorParams.from_buffer_copy(multiply.params)
        h, w = self.h.transforms(), self.w.transforms()
        p.headroom_dy = headroom(h["spread"]) + headroom(w["spread"])
        p.headroom_x = headroom(h["input"]) + headroom(w["input"])
        slots = layout.slots(ToomWgradTensorParams, largest_dy=("workspace", of_dy), largest_x=("workspace", of_x))
        scaled = replace(multiply, params=bytes(p), pointers=(*multiply.pointers, *slots))
        return Schedule((dy.launch(of_dy), x.launch(of_x), scaled, *others), of_x + x.bytes)


class _Operand(NamedTuple):
    """A tensor whose channels are scaled."""

    buffer: str
    shape: Shape
    strides: Strides

    @property
    def bytes(self) -> int:
        """Of the largest magnitudes of all channels."""
        return 4 * PARTS * self.shape[1]

    @property
    def task(self) -> Task:
        blocks, elements = PARTS * self.shape[1], prod(self.shape)
        work = Work(blocks, blocks, ceil_div(elements, THREADS), 4 * elements)
        return Task(MAGNITUDE, (PARTS, self.shape[1], 1), work)

    def launch(self, at: int) -> Launch:
        """Leaves them at a place in the workspace."""
        images, channels, *picture = zip(self.shape, self.strides, strict=True)
        return magnitude(self.task, self.buffer, (0, channels[1]), channels[0], (images, *picture), at)


def _operands(problem: Problem) -> tuple[_Operand, _Operand]:
    """dy and x."""
    return (
        _Operand("y", problem.y_shape, problem.y_strides),
        _Operand("x", problem.x_shape, problem.x_strides),
    )


CANDIDATE = ToomWgradTensorCandidate(H, W, TILE)


def candidates(problem: Problem) -> Iterator[ToomWgradTensorCandidate]:
    """The one that there is, refused or not, so that the planner can say why."""
    if problem.kind is Pass.WGRAD:
        yield CANDIDATE
