"""Plans for wgrad as an implicit GEMM over pixels (kernels/wgrad_gemm.cuh), and its second stage."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from ..problem import PaddingMode, Problem
from . import layout
from .errors import int32
from .gather import BORDERS, pixel_strides
from .layout import DIVIDEND_LIMIT, FastDivisor, ReduceParams, WgradParams
from .plan import KernelSpec, Launch, Schedule, Work
from .rounding import round_up
from .tiles import WGRAD_TILES, GemmTile
from .traffic import moved_bytes

MOST_PIXELS_PER_SLICE = 16384
"""Longest sum in one accumulator: keeps the rounding error of sums over millions of pixels small."""
MOST_SLICES = 65535
"""Slices are the grid's z dimension."""


def kernel(tile: GemmTile, vector: bool, bordered: bool) -> KernelSpec:
    flags = f"{'true' if vector else 'false'}, {'true' if bordered else 'false'}"
    return KernelSpec(
        stem="wgrad_gemm",
        symbol=f"wgrad_{tile.name}" + "_vector" * vector + "_bordered" * bordered,
        body=f"polyconv::wgrad_gemm<{tile.cpp}, {flags}>(params);",
        params="polyconv::WgradParams",
        params_bytes=ctypes.sizeof(WgradParams),
        threads=tile.threads,
        min_blocks=tile.min_blocks(weight=0 if tile.threads == 256 and vector and not bordered else 1),
    )


REDUCE = KernelSpec(
    stem="reduce_partials",
    symbol="reduce_partials",
    body="polyconv::reduce_partials(params);",
    params="polyconv::ReduceParams",
    params_bytes=ctypes.sizeof(ReduceParams),
    threads=256,
)


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    yield REDUCE
    for tile in WGRAD_TILES:
        for vector in (False, True):
            for bordered in (False, True):
                yield kernel(tile, vector, bordered)


def bordered(problem: Problem) -> bool:
    return problem.padding_mode is not PaddingMode.ZEROS and any(problem.padding)


def columns_of(problem: Problem) -> int:
    """Columns of one group's dw: channels times kernel area."""
    return problem.channels_per_group[0] * problem.kernel[0] * problem.kernel[1]


def slicing(problem: Problem, tile: GemmTile, resident: int, sms: int, workspace: int) -> tuple[int, int]:
    """Pixels per slice and number of slices.

    Enough slices to fill the device evenly and to keep each sum short, few enough for the workspace.
    """
    out_h, out_w = problem.out_size
    pixels = problem.batch * out_h * out_w
    columns = columns_of(problem) + problem.bias
    k = problem.channels_per_group[1]
    per_slice = 4 * problem.out_channels * round_up(columns, 4)
    tiles = -(-k // tile.m) * -(-columns // tile.n) * problem.groups
    wanted = max(-(-pixels // MOST_PIXELS_PER_SLICE), -(-2 * sms * resident // tiles))
    most = min(max(1, workspace // per_slice), max(1, pixels // 64), MOST_SLICES)
    pixels_per_slice = round_up(-(-pixels // min(wanted, most)), 8)
    return pixels_per_slice, -(-pixels // pixels_per_slice)


def launches(problem: Problem, tile: GemmTile, vector: bool, sms: int, workspace: int) -> Schedule:
    """The launches of one candidate: the partial sums, then their reduction."""
    spec = kernel(tile, vector, bordered(problem))
    pixels_per_slice, _ = slicing(problem, tile, spec.min_blocks, sms, workspace)
    channels, k = problem.channels_per_group
    columns = columns_of(problem)
    columns_padded = round_up(columns + problem.bias, 4)
    out_h, out_w = problem.out_size
    p = WgradParams(height=problem.in_size[0], width=problem.in_size[1], k=k, channels=channels, groups=problem.groups)
    p.columns, p.columns_padded, p.bias = int32(columns, "channels times kernel area"), columns_padded, problem.bias
    p.x_batch, p.x_channel = problem.x_strides[:2]
    p.dy_batch, p.dy_channel = problem.y_strides[:2]
    p.x_row, p.x_column = pixel_strides(problem.x_strides, "x")
    p.dy_row, p.dy_column = pixel_strides(problem.y_strides, "the gradient of y")
    p.border = BORDERS[problem.padding_mode] if bordered(problem) else 0
    p.stride_h, p.stride_w = problem.stride
    p.dilation_h, p.dilation_w = problem.dilation
    p.pad_top, p.pad_left = problem.padding[0], problem.padding[2]
    k_tiles, column_tiles = -(-k // tile.m), -(-(columns + problem.bias) // tile.n)
    p.k_tiles, p.out_height, p.out_width = FastDivisor.of(k_tiles), FastDivisor.of(out_h), FastDivisor.of(out_w)
    p.kernel_area = FastDivisor.of(problem.kernel[0] * problem.kernel[1])
    p.kernel_width = FastDivisor.of(problem.kernel[1])
    p.pixels_per_slice = pixels_per_slice

    # Flattened pixels must stay below 2^31: whole images per launch, each launch with slices of its own.
    found = []
    images = min(problem.batch, max(1, (DIVIDEND_LIMIT - 1 - pixels_per_slice) // (out_h * out_w)))
    int32(out_h * out_w + pixels_per_slice, "the number of pixels of one image of y")
    slices = 0
    for first_image in range(0, problem.batch, images):
        p.pixels = min(images, problem.batch - first_image) * out_h * out_w
        here = -(-p.pixels // pixels_per_slice)
        where = {
            "x": ("x", 4 * first_image * problem.x_strides[0]),
            "dy": ("y", 4 * first_image * problem.y_strides[0]),
            "partial": ("workspace", 4 * slices * problem.out_channels * columns_padded),
        }
        grid = (k_tiles * column_tiles, problem.groups, here)
        blocks = grid[0] * grid[1] * here
        part = p.pixels / (problem.batch * out_h * out_w)
        moved = int(part * moved_bytes(problem)) + 4 * here * problem.out_channels * columns_padded
        work = Work(blocks, blocks, -(-p.pixels // 8) * grid[0] * grid[1], moved)
        found.append(Launch(spec, grid, (tile.threads, 1, 1), 0, bytes(p), layout.slots(WgradParams, **where), work))
        slices += here
    found.append(reduction(problem, slices, columns, columns_padded))
    scratch = 4 * slices * problem.out_channels * columns_padded
    return Schedule(tuple(found), scratch, (pixels_per_slice, slices))


def reduction(problem: Problem, slices: int, columns: int, columns_padded: int) -> Launch:
    """The launch that adds the slices' partial sums, which start at the beginning of the workspace."""
    p = ReduceParams(slices=slices, columns=columns, elements=problem.out_channels * columns_padded)
    int32(p.elements, "the number of weights")
    p.dw_k, p.dw_channel, p.dw_row, p.dw_column = problem.w_strides
    p.columns_padded = FastDivisor.of(columns_padded)
    p.kernel_area = FastDivisor.of(problem.kernel[0] * problem.kernel[1])
    p.kernel_width = FastDivisor.of(problem.kernel[1])
    where = {"partial": "workspace", "dw": "dw"}
    if problem.bias:
        where["db"] = "db"
    grid = (-(-p.elements // REDUCE.threads), 1, 1)
    work = Work(grid[0], grid[0], grid[0] * slices, 4 * (slices + 1) * p.elements)
    return Launch(REDUCE, grid, (REDUCE.threads, 1, 1), 0, bytes(p), layout.slots(ReduceParams, **where), work)
