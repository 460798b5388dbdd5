"""Operands of the scaled FP16 product (kernels/scaled_fp16/operand.cuh): absmax, conversion, and the error.

FP16 keeps as many bits as TF32, so that a product of two scaled operands has TF32's error at twice its rate. A tensor
has one scale; only values below 2^-29 of its largest magnitude keep fewer bits than in TF32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from ....numerics.prediction import direct_error
from ....numerics.tensor_core import AMPERE, SplitProducts
from ....problem import Extents, Problem, Strides, channels_last_strides
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..implicit_gemm.fprop_dgrad_nhwc import CHUNK, GENERATIONS
from ..kernel_params import DIVIDEND_LIMIT, declared
from ..plan import KernelSpec, Launch, Task, Work
from ..winograd_fp16x3.nonfused import MAGNITUDE, magnitude_params

ScaledConvertParams = declared("scaled_fp16/operand", "ScaledConvertParams")

THREADS = 256
TILES = 4
FACTS = {"int(polyconv::kConvertThreads)": THREADS, "int(polyconv::kConvertTiles)": TILES, "polyconv::kChunk": CHUNK}
PIXELS = 32
"""Pixels of a tile of a conversion from any strides; it has eight chunks."""
PRODUCTS = SplitProducts(AMPERE, parts=1)
PARTS_PER_SM = 4
"""Blocks of an absmax launch, each of one part, per multiprocessor."""

ABSMAX = replace(
    MAGNITUDE,
    symbol="scaled_fp16_absmax",
    generations=GENERATIONS,
    twin=MAGNITUDE.symbol,
)
"""The absmax kernel of winograd_fp16x3, also for GPUs that its other kernels are not made for."""

CONVERTS = {
    vector: KernelSpec.of(
        ScaledConvertParams,
        "scaled_fp16/operand",
        vector,
        function="scaled_fp16_convert",
        symbol="scaled_fp16_convert" + "_vector" * vector,
        threads=THREADS,
        min_blocks=4,
        facts=FACTS,
        generations=GENERATIONS,
    )
    for vector in (True, False)
}
"""Conversions, by whether channels are adjacent and aligned quads."""


def padded(channels: int) -> int:
    """Channels of a group, padded to whole chunks."""
    return round_up(channels, CHUNK)


def scaled_error(problem: Problem, sums: tuple[int, ...]) -> float:
    """Error of direct summation of scaled products on tensor cores."""
    return direct_error(problem, sums, PRODUCTS)


@dataclass(frozen=True)
class Operand:
    """A tensor that is scaled by one power of two."""

    buffer: str
    shape: tuple[int, ...]
    strides: Strides
    groups: int
    aligned: bool
    sms: int

    @property
    def size(self) -> Extents:
        return self.shape[2:]

    @property
    def channels(self) -> int:
        """Channels of a group."""
        return self.shape[1] // self.groups

    @property
    def stored_channels(self) -> int:
        """Channels of all groups after conversion."""
        return self.groups * padded(self.channels)

    @property
    def refusal(self) -> str | None:
        if prod(self.shape) >= DIVIDEND_LIMIT:
            return f"{self.buffer} has 2^31 elements or more"
        if self._runs() > 3:
            return f"the elements of {self.buffer} are too scattered to look for the largest"
        return None

    def _runs(self) -> int:
        """Nested runs of elements with equal distances, after axes without gaps are merged."""
        runs, end = 0, -1
        for n, step in sorted(zip(self.shape, self.strides, strict=True), key=lambda axis: abs(axis[1])):
            if n > 1:
                runs, end = runs + (step != end), n * step
        return runs

    # ---- absmax

    @property
    def parts(self) -> int:
        return max(1, min(PARTS_PER_SM * self.sms, ceil_div(prod(self.shape), 4096)))

    @property
    def magnitude_bytes(self) -> int:
        """Workspace of the parts of the absmax, then the exponent of the scale."""
        return round_up(4 * self.parts + 4, 256)

    def exponent(self, at: int) -> tuple[str, int]:
        """Place of the exponent, whose absmax is at ``at``."""
        return "workspace", at + 4 * self.parts

    @property
    def magnitude_task(self) -> Task:
        read = 4 * prod(self.shape)
        return Task(ABSMAX, (self.parts, 1, 1), Work(self.parts, self.parts, ceil_div(read, 4 * THREADS), read))

    def magnitude(self, at: int) -> Launch:
        axes = tuple(zip(self.shape, self.strides, strict=True))
        p, slots = magnitude_params(self.buffer, (0, 0), 1, axes, at)
        return self.magnitude_task.launch(bytes(p), slots)

    # ---- conversion

    @property
    def image_bytes(self) -> int:
        """Workspace of a converted image."""
        return 2 * self.stored_channels * prod(self.size)

    def converted_strides(self) -> Strides:
        return channels_last_strides((1, self.stored_channels, *self.size))

    @property
    def _vector(self) -> bool:
        batch, channel, row, column = self.strides
        quads = self.channels % 4 == 0 and batch % 4 == 0 and row % 4 == 0 and column % 4 == 0
        return channel == 1 and quads and self.aligned

    def convert_task(self, images: int, slab_bytes: int) -> Task:
        pixels, chunks = images * prod(self.size), self.stored_channels // CHUNK
        if self._vector:
            grid = (ceil_div(pixels * chunks, THREADS * TILES), 1, 1)
            steps, scattered = ceil_div(pixels * chunks, THREADS), 0
        else:
            grid = (ceil_div(pixels, PIXELS * TILES), ceil_div(chunks, 8), 1)
            steps = ceil_div(pixels, PIXELS) * grid[1]
            lines = min(PIXELS, max(1, PIXELS * abs(self.strides[3]) // 32))
            scattered = ceil_div(pixels, PIXELS) * chunks * CHUNK * (lines - 1)
        written = images * self.image_bytes
        moved = 4 * images * prod(self.shape[1:]) + written
        blocks = grid[0] * grid[1]
        work = Work(blocks, blocks, steps, moved, scattered, passed_bytes=written, slab_bytes=slab_bytes)
        return Task(CONVERTS[self._vector], grid, work)

    def convert(self, first_image: int, images: int, slab_bytes: int, magnitudes: int, to: int) -> Launch:
        """Conversion of some images to workspace offset ``to``; the parts of the absmax are at ``magnitudes``."""
        p = ScaledConvertParams(magnitudes=self.parts, channels=self.channels, pixels=images * prod(self.size))
        p.place("source", self.strides, self.buffer)
        p.height, p.width = self.size
        p.chunks, p.chunks_per_group = self.stored_channels // CHUNK, padded(self.channels) // CHUNK
        slots = kernel_params.slots(
            ScaledConvertParams,
            source=(self.buffer, 4 * first_image * self.strides[0]),
            converted=("workspace", to),
            largest=("workspace", magnitudes),
            exponent=self.exponent(magnitudes),
        )
        return self.convert_task(images, slab_bytes).launch(bytes(p), slots)


def x_of(problem: Problem, sms: int) -> Operand:
    return Operand("x", problem.x_shape, problem.x_strides, problem.groups, problem.vector_aligned, sms)


def y_of(problem: Problem, sms: int) -> Operand:
    return Operand("y", problem.y_shape, problem.y_strides, problem.groups, problem.vector_aligned, sms)


def w_of(problem: Problem, sms: int) -> Operand:
    return Operand("w", problem.w_shape, problem.w_strides, 1, False, sms)


def slabs(batch: int, images: int) -> Iterable[tuple[int, int]]:
    """First image and number of images of each slab."""
    return ((first, min(images, batch - first)) for first in range(0, batch, images))


def evenly(batch: int, most: int) -> int:
    """Images of a slab: as few slabs as ``most`` images allow, of about equal size."""
    return ceil_div(batch, ceil_div(batch, max(1, most)))


def on_converted(problem: Problem, images: int) -> Problem:
    """The problem of ``images`` images in FP16; strides and channels of converted tensors are the caller's."""
    return replace(problem, batch=images, dtype="float16")
