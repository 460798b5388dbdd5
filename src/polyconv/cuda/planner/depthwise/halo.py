"""Plans for depthwise convolutions: all three passes (kernels/depthwise/halo.cuh, kernels/depthwise/halo_wgrad.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_int32
from dataclasses import dataclass, replace
from math import prod

from ....algebra.polyphase import Phase
from ....problem import HALF_DTYPES, Extents, PaddingMode, Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..candidate import CudaCandidate, DirectCandidate
from ..cost import moved_bytes
from ..epilogue import finishing, kernel_with_epilogue, task_with_epilogue, with_epilogue
from ..implicit_gemm.fprop_dgrad import BORDER_FACTS, BORDERS, Roles, roles, scattered_columns
from ..implicit_gemm.tiles import ELEMENTS
from ..implicit_gemm.wgrad import bordered, reduction, reduction_task
from ..kernel_params import MAX_PHASES, PHASE_FACTS, FastDivisor, Params, declared, half_structs, int32
from ..plan import KernelSpec, Schedule, Task, Work


class HaloShape(Params):
    _fields_ = (("height", c_int32), ("pitch", c_int32), ("width", FastDivisor))

    @classmethod
    def of(cls, height: int, width: int) -> HaloShape:
        """Give rows in shared memory an odd pitch, so that strided readers meet few bank conflicts."""
        return cls(height, width | 1, width)

    @property
    def elements(self) -> int:
        return int(self.height * self.pitch)


HaloParams = declared("depthwise/halo", "HaloParams", kMaxPhases=MAX_PHASES)
HaloWgradParams = declared("depthwise/halo_wgrad", "HaloWgradParams")
_HALF_PARAMS = half_structs(HaloParams)
_HALF_WGRAD_PARAMS = half_structs(HaloWgradParams)
DTYPES = ("float32", *HALF_DTYPES)


@dataclass(frozen=True, slots=True)
class PlaneTile:
    """Tile of positions."""

    height: int
    width: int
    threads: int

    @property
    def name(self) -> str:
        return f"{self.height}x{self.width}"

    @property
    def cpp(self) -> str:
        return f"{self.height}, {self.width}, {self.threads}"

    @property
    def positions(self) -> int:
        return self.height * self.width


PLANE_TILES = (
    PlaneTile(16, 64, 256),
    PlaneTile(32, 32, 256),
    PlaneTile(16, 16, 256),
    PlaneTile(8, 32, 256),
    PlaneTile(8, 8, 64),
)
CARRY = 12
"""Source elements held per thread (``kCarry`` in depthwise/halo_tile.cuh)."""
WGRAD_TAPS = (9, 16)
"""Taps that a block of the weight gradient sums at once."""
HALO_FACTS = {"polyconv::kCarry": CARRY, **BORDER_FACTS}
MOST_SHARED = 48 * 1024
"""Shared memory per block without opt-in [bytes]."""
MOST_CHANNELS = 65535
"""Limit of grid.y, which counts channels."""


def element(dtype: str) -> tuple[str, ...]:
    """Template argument of kernels whose elements are floats by default."""
    return (ELEMENTS[dtype],) if dtype in HALF_DTYPES else ()


def _per_block(jobs: int, blocks: int, sms: int) -> int:
    """Jobs per block: as many as still leave eight blocks per multiprocessor."""
    return max(1, min(jobs, jobs * blocks // (8 * sms)))


def _inside(extent: int, count: int, tile: int, step: int, first: int, halo: int) -> float:
    """Source positions of a tile that are inside the image, on average over the tiles of an axis. ``first``: where the
    source of the first position begins."""
    origins = [first + position * step for position in range(0, count, tile)]
    return sum(max(0, min(extent, origin + halo) - max(0, origin)) for origin in origins) / max(1, len(origins))


@dataclass(frozen=True)
class _PlaneCandidate(DirectCandidate):
    """A kernel whose blocks stage the source of a tile of positions in shared memory, channel by channel."""

    tile: PlaneTile
    static_shared = 0
    """Static shared memory of the kernel [bytes]."""

    def halo(self, problem: Problem) -> Extents:
        """Height and width of a tile's source."""
        raise NotImplementedError

    def shared(self, problem: Problem) -> int:
        """Dynamic shared memory [bytes]."""
        raise NotImplementedError

    def refusal(self, problem: Problem) -> str | None:
        if not problem.depthwise:
            return f"{problem.in_channels} input channels in {problem.groups} groups are not depthwise"
        if problem.out_channels > MOST_CHANNELS:
            return f"more than {MOST_CHANNELS} channels"
        (height, width), carried = self.halo(problem), CARRY * self.tile.threads
        if height * width > carried:
            return f"a source tile of {height}x{width} does not fit {carried} carried elements"
        shared = self.shared(problem)
        return f"needs {shared} bytes of shared memory" if shared > MOST_SHARED - self.static_shared else None


@dataclass(frozen=True)
class HaloCandidate(_PlaneCandidate):
    """fprop or dgrad, channel by channel."""

    dtype: str = "float32"

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = self.tile
        blocks = 3 if tile.threads == 256 else 8
        symbol = f"depthwise_halo_{tile.name}"
        kernel = KernelSpec.of(
            _HALF_PARAMS.get(self.dtype, HaloParams),
            "depthwise/halo",
            *(tile, *element(self.dtype)),
            symbol=symbol,
            threads=tile.threads,
            min_blocks=blocks,
            facts={**HALO_FACTS, **PHASE_FACTS},
        )
        return finishing(kernel).of_halves(self.dtype) if self.dtype in HALF_DTYPES else kernel

    def refusal(self, problem: Problem) -> str | None:
        r = roles(problem)
        if problem.depthwise and problem.kind is Pass.DGRAD and r.border is not PaddingMode.ZEROS:
            return f"the gradient of a {r.border} border is gathered by the GEMM"
        if problem.depthwise and max(len(r.phases_h), len(r.phases_w)) > kernel_params.MAX_PHASES:
            return f"a stride of {problem.stride} has more than {kernel_params.MAX_PHASES} phases"
        return super().refusal(problem)

    def halo(self, problem: Problem) -> Extents:
        r = roles(problem)
        return _halo(r.phases_h, self.tile.height), _halo(r.phases_w, self.tile.width)

    def shared(self, problem: Problem) -> int:
        return 4 * (2 * HaloShape.of(*self.halo(problem)).elements + max(_taps(roles(problem)), 1))

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        return (_taps(roles(problem)) + problem.bias,)

    def _tiles(self, r: Roles) -> int:
        """Tiles of the largest phase of one plane."""
        rows, columns = max(h.count for h in r.phases_h), max(w.count for w in r.phases_w)
        return ceil_div(rows, self.tile.height) * ceil_div(columns, self.tile.width)

    def _images_per_block(self, problem: Problem, r: Roles, sms: int) -> int:
        phases = len(r.phases_h) * len(r.phases_w)
        return _per_block(problem.batch, self._tiles(r) * problem.groups * r.outputs * phases, sms)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        r = roles(problem)
        height, width = self.halo(problem)
        tiles, channels = self._tiles(r), problem.groups * r.outputs
        phases = len(r.phases_h) * len(r.phases_w)
        jobs = int32(tiles * ceil_div(problem.batch, self._images_per_block(problem, r, sms)), "the number of tiles")
        taps = sum(h.taps for h in r.phases_h) * sum(w.taps for w in r.phases_w) * r.channels
        walked = tiles * problem.batch * channels
        rounds = ceil_div(height * width, self.tile.threads) * r.channels  # load iterations of a tile's source
        work = Work(jobs * channels * phases, walked * phases * rounds, walked * taps, moved_bytes(problem))
        work = replace(work, **self._scattered(problem, r, walked * phases * r.channels))
        task = Task(self.kernel, (jobs, channels, phases), work, dynamic_shared=self.shared(problem))
        yield task_with_epilogue(problem, task, prod(problem.y_shape))

    def _scattered(self, problem: Problem, r: Roles, tiles: int) -> dict[str, int]:
        """Extra lines and sectors of a number of source tiles and of the result, where columns are not adjacent."""
        (height, width), h, w = self.halo(problem), r.phases_h[0], r.phases_w[0]
        first_h, first_w = (p.read_first + min(0, (p.taps - 1) * p.tap_step) for p in (h, w))
        inside = _inside(r.source_size[0], h.count, self.tile.height, h.read_step, first_h, height)
        inside *= _inside(r.source_size[1], w.count, self.tile.width, w.read_step, first_w, width)
        stores, each = problem.batch * problem.groups * r.outputs * prod(r.written_size), problem.element_bytes
        loaded = scattered_columns(r.source_strides, int(tiles * inside) // 32, each=each)
        stored = scattered_columns(r.written_strides, stores // 32, each=each)
        return {"scattered_lines": loaded[0] + stored[0], "scattered_sectors": loaded[1] + stored[1]}

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        r = roles(problem)
        p = HaloParams(batch=problem.batch, sources=r.channels, border=BORDERS[r.border])
        kernel_params.set_phases(p, r.phases_h, r.phases_w)
        p.place("source", r.source_strides, r.source)
        p.place("written", r.written_strides, r.written)
        p.source_height, p.source_width = r.source_size
        # fprop: one weight row per written channel. dgrad: the written channel's outputs are adjacent in w.
        per_output = problem.w_strides[0]
        p.w_written = per_output if problem.kind is Pass.FPROP else per_output * r.channels
        p.w_source = per_output
        p.w_row, p.w_column = problem.w_strides[2:]
        p.halo = HaloShape.of(*self.halo(problem))
        p.multiplier = r.outputs
        p.tiles = self._tiles(r)
        p.tiles_w = ceil_div(max(w.count for w in r.phases_w), self.tile.width)
        p.images_per_block = self._images_per_block(problem, r, sms)
        slots = kernel_params.slots(HaloParams, source=r.source, w="w", written=r.written, bias=r.bias)
        (task,) = self.tasks(problem, sms, workspace)
        return Schedule((with_epilogue(problem, task.launch(bytes(p), slots)),), 0)


def _halo(phases: tuple[Phase, ...], positions: int) -> int:
    """Source extent that ``positions`` adjacent positions of the largest phase read."""
    return max((positions - 1) * p.read_step + max(p.taps - 1, 0) * abs(p.tap_step) + 1 for p in phases)


def _taps(r: Roles) -> int:
    """Multiplications per written element in the largest phase."""
    return max(h.taps for h in r.phases_h) * max(w.taps for w in r.phases_w) * r.channels


@dataclass(frozen=True, slots=True)
class HaloCut:
    """Cut of the weight gradient into chunks of taps, tiles of positions (jobs) and slices of jobs."""

    chunks: int
    jobs: int
    jobs_per_slice: int
    slices: int
    columns_padded: int


@dataclass(frozen=True)
class HaloWgradCandidate(_PlaneCandidate):
    """wgrad, channel by channel."""

    taps: int
    """Taps that a block sums at once."""
    dtype: str = "float32"
    static_shared = 1024

    @cached_property
    def kernel(self) -> KernelSpec:
        tile, taps = self.tile, self.taps
        blocks = 2 if tile.threads == 256 else 8
        symbol = f"depthwise_halo_wgrad_{tile.name}_{taps}taps"
        kernel = KernelSpec.of(
            _HALF_WGRAD_PARAMS.get(self.dtype, HaloWgradParams),
            "depthwise/halo_wgrad",
            *(tile, taps, *element(self.dtype)),
            symbol=symbol,
            threads=tile.threads,
            min_blocks=blocks,
            facts=HALO_FACTS,
        )
        return kernel.of_halves(self.dtype) if self.dtype in HALF_DTYPES else kernel

    def halo(self, problem: Problem) -> Extents:
        (r, s), (sh, sw), (dh, dw) = problem.kernel, problem.stride, problem.dilation
        return (self.tile.height - 1) * sh + (r - 1) * dh + 1, (self.tile.width - 1) * sw + (s - 1) * dw + 1

    def shared(self, problem: Problem) -> int:
        return 4 * 2 * (HaloShape.of(*self.halo(problem)).elements + self.tile.positions)

    def _tiles(self, problem: Problem) -> int:
        rows, columns = problem.out_size
        return ceil_div(rows, self.tile.height) * ceil_div(columns, self.tile.width)

    def cut(self, problem: Problem, sms: int, workspace: int) -> HaloCut:
        """Choose as few slices as fill the device, and fit the workspace."""
        area = problem.kernel[0] * problem.kernel[1]
        columns_padded = round_up(area + problem.bias, 4)
        jobs = int32(problem.batch * self._tiles(problem), "the number of tiles of y")
        chunks = ceil_div(area, self.taps)
        most = max(1, workspace // (4 * problem.out_channels * columns_padded))
        per_slice = max(_per_block(jobs, problem.out_channels * chunks, sms), ceil_div(jobs, most))
        return HaloCut(chunks, jobs, per_slice, ceil_div(jobs, per_slice), columns_padded)

    def sums(self, problem: Problem, sms: int, workspace: int) -> tuple[int, ...]:
        """In a thread, across a warp, across warps, over slices."""
        cut = self.cut(problem, sms, workspace)
        in_thread = ceil_div(cut.jobs_per_slice * self.tile.positions, self.tile.threads)
        return (in_thread, 2, 2, 2, 2, 2, self.tile.threads // 32, cut.slices)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        cut = self.cut(problem, sms, workspace)
        yield self._task(problem, cut)
        yield reduction_task(problem, cut.slices, cut.columns_padded)

    def _task(self, problem: Problem, cut: HaloCut) -> Task:
        height, width = self.halo(problem)
        walked = cut.jobs * problem.out_channels * cut.chunks
        work = Work(
            cut.slices * problem.out_channels * cut.chunks,
            walked * ceil_div(height * width, self.tile.threads),
            walked * self.taps,
            moved_bytes(problem) + 4 * cut.slices * problem.out_channels * cut.columns_padded,
            **self._scattered(problem, walked, cut.chunks),
        )
        grid = (cut.slices, problem.out_channels, cut.chunks)
        return Task(self.kernel, grid, work, dynamic_shared=self.shared(problem))

    def _scattered(self, problem: Problem, tiles: int, chunks: int) -> dict[str, int]:
        """Extra lines of the tiles of x and dy, and sectors of both, read once per chunk of taps, where columns are not
        adjacent."""
        (height, width), (rows, columns) = self.halo(problem), problem.out_size
        (top, _, left, _), (stride_h, stride_w) = problem.padding, problem.stride
        inside = _inside(problem.in_size[0], rows, self.tile.height, stride_h, -top, height)
        inside *= _inside(problem.in_size[1], columns, self.tile.width, stride_w, -left, width)
        planes, each = problem.batch * problem.out_channels * chunks // 32, problem.element_bytes
        dy = planes * rows * columns
        of_x, _ = scattered_columns(problem.x_strides, int(tiles * inside) // 32, each=each)
        of_dy, sectors_dy = scattered_columns(problem.y_strides, dy, each=each)
        _, sectors_x = scattered_columns(problem.x_strides, planes * prod(problem.in_size), each=each)
        return {"scattered_lines": of_x + of_dy, "scattered_sectors": sectors_x + sectors_dy}

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        cut = self.cut(problem, sms, workspace)
        area = problem.kernel[0] * problem.kernel[1]
        p = HaloWgradParams(height=problem.in_size[0], width=problem.in_size[1])
        p.out_height, p.out_width = problem.out_size
        p.channels, p.taps, p.columns_padded, p.bias = problem.out_channels, area, cut.columns_padded, problem.bias
        p.border = BORDERS[problem.padding_mode] if bordered(problem) else 0
        p.place("x", problem.x_strides, "x")
        p.place("dy", problem.y_strides, "the gradient of y")
        p.stride_h, p.stride_w = problem.stride
        p.dilation_h, p.dilation_w = problem.dilation
        p.pad_top, p.pad_left = problem.padding[0], problem.padding[2]
        p.halo = HaloShape.of(*self.halo(problem))
        p.multiplier = problem.channels_per_group[1]
        p.kernel_width = problem.kernel[1]
        p.tiles = self._tiles(problem)
        p.tiles_w = ceil_div(problem.out_size[1], self.tile.width)
        p.jobs, p.jobs_per_slice = cut.jobs, cut.jobs_per_slice
        slots = kernel_params.slots(HaloWgradParams, x="x", dy="y", partial="workspace")
        first = self._task(problem, cut).launch(bytes(p), slots)
        second = reduction(problem, cut.slices, area, cut.columns_padded)
        return Schedule((first, second), 4 * cut.slices * problem.out_channels * cut.columns_padded)


FORWARD = {dtype: tuple(HaloCandidate(tile, dtype) for tile in PLANE_TILES) for dtype in DTYPES}
GRADIENTS = {
    dtype: tuple(HaloWgradCandidate(tile, taps, dtype) for tile in PLANE_TILES for taps in WGRAD_TAPS)
    for dtype in DTYPES
}


def candidates(problem: Problem) -> Iterator[CudaCandidate]:
    """Every tile, refused or not."""
    yield from (GRADIENTS if problem.kind is Pass.WGRAD else FORWARD)[problem.dtype]


def all_kernels() -> Iterator[KernelSpec]:
    for dtype in DTYPES:
        for forward in FORWARD[dtype]:
            yield forward.kernel
            if dtype == "float32":
                yield kernel_with_epilogue(forward.kernel)
        yield from (gradient.kernel for gradient in GRADIENTS[dtype])
