"""Plans for wgrad of float32 tensors by one scaled FP16 product.

Absmax of x and of dy; then, for each slab of images, both conversions (kernels/scaled_fp16/operand.cuh) and the GEMM of
cuda/planner/implicit_gemm/wgrad_nhwc.py; last, the sum of all slices, scaled back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf, prod

from ....problem import Pass, Problem
from ....util.intmath import ceil_div, round_up
from .. import kernel_params
from ..implicit_gemm.fprop_dgrad import MOST_GROUPS
from ..implicit_gemm.fprop_dgrad_nhwc import CHUNK, GENERATIONS
from ..implicit_gemm.wgrad import REDUCE, PixelGemm, WgradCut, bordered, reduction_task
from ..implicit_gemm.wgrad_nhwc import TILES, WgradNhwcCandidate
from ..kernel_params import declared
from ..plan import KernelSpec, Launch, Schedule, Task
from .operand import FACTS, Operand, evenly, on_converted, scaled_error, slabs, x_of, y_of

ScaledReduceParams = declared("scaled_fp16/operand", "ScaledReduceParams")

SCALED_REDUCE = replace(
    KernelSpec.of(
        ScaledReduceParams,
        "scaled_fp16/operand",
        function="scaled_fp16_reduce",
        symbol="scaled_fp16_reduce",
        threads=REDUCE.threads,
        facts=FACTS,
        generations=GENERATIONS,
    ),
    twin=REDUCE.symbol,
)
PARTIAL_SHARE = 4
"""One part in this many of the workspace is for partial sums."""


class ScaledWgradCandidate(WgradNhwcCandidate):
    """wgrad of float32 tensors."""

    direct = False

    @property
    def name(self) -> str:
        return f"scaled_fp16_wgrad_{self.tile.name}"

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if bordered(problem):
            return f"cannot read a {problem.padding_mode} border"
        if any(channels % CHUNK for channels in problem.channels_per_group):
            return f"channels per group are not multiples of {CHUNK}"
        return x_of(problem, 1).refusal or y_of(problem, 1).refusal

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        """Infinite if not even one pair of converted images fits the workspace."""
        converted = self._converted(problem)
        if not self._images(converted, workspace):
            return inf
        return scaled_error(problem, PixelGemm.sums(self, converted, sms, workspace))

    @staticmethod
    def _converted(problem: Problem) -> Problem:
        x, y = x_of(problem, 1).converted_strides(), y_of(problem, 1).converted_strides()
        return replace(on_converted(problem, problem.batch), x_strides=x, y_strides=y)

    @staticmethod
    def _images(converted: Problem, workspace: int) -> int:
        """Images of a slab; 0 if none fits."""
        each = 2 * (prod(converted.x_shape[1:]) + prod(converted.y_shape[1:]))
        most = (workspace - workspace // PARTIAL_SHARE - 2**15) // each
        return evenly(converted.batch, most) if most > 0 else 0

    def cut(self, problem: Problem, sms: int, workspace: int) -> WgradCut:
        """Each slab of images fills the device. ``problem``: that on converted tensors."""
        images = max(1, self._images(problem, workspace))
        number = ceil_div(problem.batch, images)
        cut = super().cut(replace(problem, batch=images), sms, workspace // PARTIAL_SHARE // number)
        return replace(cut, images=images)

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        converted, operands = self._converted(problem), (x_of(problem, sms), y_of(problem, sms))
        cut = self.cut(converted, sms, workspace)
        yield from (operand.magnitude_task for operand in operands)
        slab_bytes = cut.images * sum(operand.image_bytes for operand in operands)
        for (_, count), (_, pixels, slices) in zip(slabs(problem.batch, cut.images), cut.parts(converted), strict=True):
            yield from (operand.convert_task(count, slab_bytes) for operand in operands)
            yield self._gemm_task(converted, cut, pixels, slices)
        yield self._reduction_task(converted, cut)

    def _gemm_task(self, converted: Problem, cut: WgradCut, pixels: int, slices: int) -> Task:
        task = self._task(converted, cut, pixels, slices)
        read = 2 * (prod(converted.x_shape) + prod(converted.y_shape)) // converted.batch
        passed = read * pixels // prod(converted.out_size)
        return replace(task, work=replace(task.work, passed_bytes=passed, slab_bytes=read * cut.images))

    @staticmethod
    def _reduction_task(converted: Problem, cut: WgradCut) -> Task:
        return replace(reduction_task(converted, cut.slices(converted), cut.columns_padded), kernel=SCALED_REDUCE)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """Partial sums come first in the workspace, then both absmax, then the converted images."""
        converted, operands = self._converted(problem), (x_of(problem, sms), y_of(problem, sms))
        cut = self.cut(converted, sms, workspace)
        sums = super().schedule(converted, sms, workspace)
        *multiply, reduce = sums.launches
        at = round_up(sums.workspace_bytes, 256)
        magnitudes: dict[str, int] = {}
        for operand in operands:
            magnitudes[operand.buffer] = at
            at += operand.magnitude_bytes
        places: dict[str, int] = {}
        for operand in operands:
            places[operand.buffer] = at
            at += cut.images * operand.image_bytes
        slab_bytes = cut.images * sum(operand.image_bytes for operand in operands)
        found = [operand.magnitude(magnitudes[operand.buffer]) for operand in operands]
        parts = zip(slabs(problem.batch, cut.images), cut.parts(converted), multiply, strict=True)
        for (first, count), (_, pixels, slices), launch in parts:
            for operand in operands:
                here = operand.buffer
                found.append(operand.convert(first, count, slab_bytes, magnitudes[here], places[here]))
            pointers = tuple(
                replace(slot, buffer="workspace", byte_offset=places[slot.buffer]) if slot.buffer in places else slot
                for slot in launch.pointers
            )
            work = self._gemm_task(converted, cut, pixels, slices).work
            found.append(replace(launch, pointers=pointers, work=work))
        found.append(self._reduce(converted, cut, reduce, [operands[1], operands[0]], magnitudes))
        return Schedule(tuple(found), at)

    def _reduce(
        self, converted: Problem, cut: WgradCut, launch: Launch, scaled: list[Operand], magnitudes: dict[str, int]
    ) -> Launch:
        slots = kernel_params.slots(ScaledReduceParams, exponents=scaled[0].exponent(magnitudes[scaled[0].buffer]))
        (dy,) = slots
        of_x = scaled[1].exponent(magnitudes[scaled[1].buffer])
        x = replace(dy, offset=dy.offset + 8, byte_offset=of_x[1])
        params = launch.params.ljust(SCALED_REDUCE.params_bytes, b"\0")
        return self._reduction_task(converted, cut).launch(params, (*launch.pointers, dy, x))


CANDIDATES = tuple(ScaledWgradCandidate(tile.of("float16")) for tile in TILES)


def candidates(problem: Problem) -> Iterator[ScaledWgradCandidate]:
    """Every tile, refused or not; only for the weight gradient."""
    if problem.kind is Pass.WGRAD:
        yield from CANDIDATES


def all_kernels() -> Iterator[KernelSpec]:
    yield SCALED_REDUCE
    yield from (candidate.kernel for candidate in CANDIDATES)
