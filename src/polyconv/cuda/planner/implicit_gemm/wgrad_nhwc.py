"""Plans for wgrad of 16-bit tensors in channels_last, from sm_80 on (kernels/implicit_gemm/wgrad_nhwc.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....numerics.prediction import half_error
from ....problem import HALF_DTYPES, Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import ceil_div
from ..cost import LINE
from ..kernel_params import half_structs
from ..plan import KernelSpec, Task
from .fprop_dgrad import MOST_GROUPS
from .fprop_dgrad_nhwc import CHUNK, GENERATIONS, pipeline_facts, why_not_in_chunks
from .tiles import PIPELINED_SQUARE, PIPELINED_WIDE, PIPELINED_WIDEST, PipelinedTile
from .wgrad import PixelGemm, WgradCut, WgradParams, bordered, columns_of

DTYPES = HALF_DTYPES
TILES = (PIPELINED_SQUARE, PIPELINED_WIDEST, PIPELINED_WIDE)


@dataclass(frozen=True)
class WgradNhwcCandidate(PixelGemm):
    """wgrad of 16-bit tensors with adjacent channels."""

    tile: PipelinedTile
    channels_adjacent = True
    volume = False
    structs = half_structs(WgradParams)

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = self.tile
        return KernelSpec.of(
            self.structs[tile.dtype],
            "implicit_gemm/wgrad_nhwc",
            *((tile, True) if self.volume else (tile,)),
            symbol=f"implicit_gemm_wgrad_{'ndhwc' if self.volume else 'nhwc'}_{tile.name}",
            threads=tile.threads,
            min_blocks=tile.min_blocks(0),
            facts=pipeline_facts(tile),
            generations=GENERATIONS,
        ).of_halves(tile.dtype)

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if bordered(problem):
            return f"cannot read a {problem.padding_mode} border"
        return why_not_in_chunks(problem)

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        return half_error(problem, self.sums(problem, sms, workspace))

    def filling(self, sms: int, tiles: int) -> int:
        """One wave of blocks, not two: these blocks are fast, so that writing and adding the slices counts."""
        slots = sms * self.resident
        return slots // tiles if tiles <= slots else super().filling(sms, tiles)

    def _task(self, problem: Problem, cut: WgradCut, pixels: int, slices: int) -> Task:
        task = super()._task(problem, cut, pixels, slices)
        copies = ceil_div(pixels, self.tile.depth) * self.tile.depth * problem.groups * task.grid[0] // self._at_once
        work = replace(task.work, scattered_lines=int(copies * self._scattered(problem, cut)))
        return replace(task, work=work, dynamic_shared=self.tile.ring_bytes)

    @property
    def _at_once(self) -> int:
        """Pixels of x whose columns a warp copies at once."""
        return max(1, 32 * CHUNK // self.tile.n)

    def _scattered(self, problem: Problem, cut: WgradCut) -> float:
        """Extra lines of a warp's copies of x: with few channels, columns of a pixel lie under several taps. Taps that
        are neighbours along W share their lines with those of the pixel beside it."""
        channels, columns = problem.channels_per_group[0], columns_of(problem) / cut.column_tiles
        pixel, chunk = min(LINE, 2 * problem.stride[1] * problem.x_strides[3]) / LINE, 2 * channels / LINE
        taps = columns / channels
        if taps <= 1 or chunk >= 1:
            return 0.0
        rows = max(1.0, taps / problem.kernel[1])
        return max(0.0, rows + (taps + rows * (self._at_once - 2)) * pixel - self._at_once * taps * chunk)


CANDIDATES = {dtype: tuple(WgradNhwcCandidate(tile.of(dtype)) for tile in TILES) for dtype in DTYPES}


def candidates(problem: Problem) -> Iterator[WgradNhwcCandidate]:
    """Every tile, refused or not; only for the weight gradient."""
    if problem.kind is Pass.WGRAD:
        yield from CANDIDATES.get(problem.dtype, ())


def all_kernels() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        yield from (candidate.kernel for candidate in CANDIDATES[dtype])
