"""Tile shapes of implicit GEMM kernels. Each family lists those that it is instantiated for, in its own module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar


class BlockTile(ABC):
    """Block tile of an implicit GEMM: M rows by N columns, ``depth`` reduction rows per step."""

    __slots__ = ()
    warps_m: int
    warps_n: int
    depth: ClassVar[int]
    depth_constant: ClassVar[str]

    @property
    @abstractmethod
    def m(self) -> int: ...

    @property
    @abstractmethod
    def n(self) -> int: ...

    @property
    @abstractmethod
    def cpp(self) -> str:
        """C++ name of the tile."""

    @abstractmethod
    def min_blocks(self, weight: int) -> int:
        """Second launch bound for a loader of the given register weight."""

    @property
    def stored_lanes(self) -> tuple[int, int]:
        """Lanes that together store elements of one channel, and the pixels from lane to lane."""
        return 32, 1

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}"

    @property
    def facts(self) -> dict[str, int]:
        """Device constants that launches rely on."""
        sizes = {f"{self.cpp}::kM": self.m, f"{self.cpp}::kN": self.n, f"{self.cpp}::kThreads": self.threads}
        return {self.depth_constant: self.depth, **sizes}


@dataclass(frozen=True, slots=True)
class GemmTile(BlockTile):
    """``polyconv::GemmTile`` of implicit_gemm/tile.cuh: M rows (pixels) by N columns (channels) per block."""

    warps_m: int
    warps_n: int
    lanes_m: int
    thread_m: int
    thread_n: int
    depth: ClassVar[int] = 8
    """Reduction rows per step (``kDepth`` in implicit_gemm/tile.cuh)."""
    depth_constant: ClassVar[str] = "polyconv::kDepth"

    @property
    def m(self) -> int:
        return self.warps_m * self.lanes_m * self.thread_m

    @property
    def n(self) -> int:
        return self.warps_n * (32 // self.lanes_m) * self.thread_n

    @property
    def stored_lanes(self) -> tuple[int, int]:
        return self.lanes_m, 4

    @property
    def cpp(self) -> str:
        return f"polyconv::GemmTile<{self.warps_m}, {self.warps_n}, {self.lanes_m}, {self.thread_m}, {self.thread_n}>"

    def min_blocks(self, weight: int) -> int:
        """Second launch bound. 64 accumulators and a lean loader (weight 0) just fit 128 registers: 512 threads per
        multiprocessor. Each step of weight gives up 128 threads, so that the loader's registers are never spilled."""
        weight += self.m > self.threads or self.threads < 128  # two pixels, or two rows of weights, per thread
        threads = (512, 384, 256, 256) if self.thread_m * self.thread_n == 64 else (768, 512, 512, 384)
        return max(1, threads[weight] // self.threads)


ELEMENTS = {"float16": "polyconv::Half", "bfloat16": "polyconv::BFloat16"}
"""C++ names of the 16-bit formats in common/elements.cuh."""
Matrix = TypeVar("Matrix", bound="MatrixTile")


@dataclass(frozen=True, slots=True)
class MatrixTile(BlockTile):
    """``polyconv::MatrixTile`` of implicit_gemm/mma_tile.cuh: 16-bit elements, 16 x 16 products."""

    warps_m: int
    warps_n: int
    units_m: int
    units_n: int
    dtype: str = "float16"
    depth: ClassVar[int] = 16
    """Reduction rows per step (``kMatrixDepth`` in implicit_gemm/mma_tile.cuh)."""
    depth_constant: ClassVar[str] = "polyconv::kMatrixDepth"

    @property
    def m(self) -> int:
        return 16 * self.warps_m * self.units_m

    @property
    def n(self) -> int:
        return 16 * self.warps_n * self.units_n

    @property
    def cpp(self) -> str:
        numbers = f"{self.warps_m}, {self.warps_n}, {self.units_m}, {self.units_n}"
        return f"polyconv::MatrixTile<{ELEMENTS[self.dtype]}, {numbers}>"

    def of(self: Matrix, dtype: str) -> Matrix:
        """This shape for another 16-bit format."""
        return replace(self, dtype=dtype)

    def min_blocks(self, weight: int) -> int:
        threads = (512, 384, 256)[weight] if self.units_m * self.units_n == 8 else 512
        return max(1, threads // self.threads)


@dataclass(frozen=True, slots=True)
class PipelinedTile(MatrixTile):
    """``polyconv::PipelinedTile`` of implicit_gemm/mma_tile.cuh: operands are copied ``stages`` - 1 steps
    ahead into a ring in dynamic shared memory."""

    stages: int = 3
    depth: ClassVar[int] = 32
    depth_constant: ClassVar[str] = "polyconv::kPipelinedDepth"

    @property
    def cpp(self) -> str:
        numbers = f"{self.warps_m}, {self.warps_n}, {self.units_m}, {self.units_n}, {self.stages}"
        return f"polyconv::PipelinedTile<{ELEMENTS[self.dtype]}, {numbers}>"

    @property
    def ring_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.stages * 2 * self.depth * (self.m + self.n)

    def min_blocks(self, weight: int) -> int:
        """Second launch bound: 128, 64 or 32 accumulators in at most 255, 168 or 128 registers."""
        return {16: 2, 8: 3, 4: 4}[self.units_m * self.units_n]


SQUARE = GemmTile(2, 4, 8, 8, 8)
TALL = GemmTile(4, 1, 4, 8, 8)
WIDE = GemmTile(2, 2, 4, 8, 8)
NARROW = GemmTile(4, 1, 8, 8, 8)
SMALL = GemmTile(2, 1, 4, 8, 8)
TINY = GemmTile(2, 2, 8, 4, 4)
SLIM = GemmTile(4, 1, 8, 8, 4)
SLIMMER = GemmTile(4, 1, 16, 4, 4)

MATRIX_SQUARE = MatrixTile(4, 2, 2, 4)
MATRIX_TALL = MatrixTile(4, 1, 2, 4)
MATRIX_SMALL = MatrixTile(2, 2, 2, 2)
MATRIX_SLIM = MatrixTile(4, 1, 2, 1)

PIPELINED_SQUARE = PipelinedTile(2, 2, 4, 4)
PIPELINED_LONG = PipelinedTile(4, 1, 4, 4)
PIPELINED_TALL = PipelinedTile(2, 2, 4, 2, stages=4)
PIPELINED_SMALL = PipelinedTile(2, 2, 2, 2, stages=4)
PIPELINED_WIDEST = PipelinedTile(1, 4, 4, 4)
PIPELINED_WIDE = PipelinedTile(2, 2, 2, 4, stages=4)
