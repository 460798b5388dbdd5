"""Plans for fprop and dgrad of float32 tensors by one scaled FP16 product (kernels/scaled_fp16/fprop_dgrad.cuh).

Absmax of the weight, packed weights, absmax of the source; then, for each slab of images, their conversion to FP16 with
adjacent channels and the GEMM of cuda/planner/implicit_gemm/fprop_dgrad_nhwc.py, which stores float32 in any layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf, prod

from ....problem import PaddingMode, Pass, Problem
from ....util.cached import cached_property
from ....util.intmath import round_up
from .. import kernel_params
from ..epilogue import finishing
from ..implicit_gemm.fprop_dgrad import MOST_GROUPS, PACK_FACTS, PhaseTables, Roles, Slab, phase_tables, roles
from ..implicit_gemm.fprop_dgrad_nhwc import COPIED, GENERATIONS, TILES, ImplicitGemmNhwcCandidate, pipeline_facts
from ..implicit_gemm.tiles import PipelinedTile
from ..kernel_params import PHASE_FACTS, declared
from ..plan import KernelSpec, Launch, PointerSlot, Schedule, Task
from .operand import (
    ABSMAX,
    CONVERTS,
    FACTS,
    THREADS,
    Operand,
    evenly,
    on_converted,
    scaled_error,
    w_of,
    x_of,
    y_of,
)
from .operand import slabs as slabs_of

ScaledPackParams = declared("scaled_fp16/operand", "ScaledPackParams")
ScaledImplicitGemmParams = declared("scaled_fp16/fprop_dgrad", "ScaledImplicitGemmParams")

PACK = KernelSpec.of(
    ScaledPackParams,
    "scaled_fp16/operand",
    PipelinedTile.depth,
    function="scaled_fp16_pack",
    symbol="scaled_fp16_pack",
    threads=THREADS,
    facts={**FACTS, **PACK_FACTS},
    generations=GENERATIONS,
)


class ScaledCandidate(ImplicitGemmNhwcCandidate):
    """fprop or dgrad of float32 tensors."""

    direct = False

    @property
    def pack(self) -> KernelSpec:
        return PACK

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = self.tile
        plain = KernelSpec.of(
            ScaledImplicitGemmParams,
            "scaled_fp16/fprop_dgrad",
            tile,
            symbol=f"scaled_fp16_{tile.name}",
            threads=tile.threads,
            min_blocks=tile.min_blocks(0),
            facts={**pipeline_facts(tile), **PHASE_FACTS},
            generations=GENERATIONS,
        )
        return replace(finishing(plain), dtype="float16")

    def refusal(self, problem: Problem) -> str | None:
        if problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} groups"
        if (border := roles(problem).border) is not PaddingMode.ZEROS:
            return f"cannot read a {border} border"
        return self._source(problem, 1).refusal or w_of(problem, 1).refusal

    def error(self, problem: Problem, sms: int, workspace: int) -> float:
        """Infinite if not even one converted image fits the workspace."""
        fits = self._images(problem, sms, workspace) > 0
        return scaled_error(problem, self.sums(problem, sms, workspace)) if fits else inf

    # ---- the problem on converted tensors

    @staticmethod
    def _source(problem: Problem, sms: int) -> Operand:
        return (x_of if problem.kind is Pass.FPROP else y_of)(problem, sms)

    def _converted(self, problem: Problem, images: int) -> Problem:
        source = self._source(problem, 1)
        strides, channels = source.converted_strides(), source.stored_channels
        if problem.kind is Pass.FPROP:
            return replace(on_converted(problem, images), x_strides=strides, in_channels=channels)
        return replace(on_converted(problem, images), y_strides=strides, out_channels=channels)

    def _packed_bytes(self, problem: Problem, tables: PhaseTables) -> int:
        """With one step of slack, as for the other implicit GEMMs."""
        rows = problem.groups * tables.rows + self.tile.depth
        return round_up(2 * rows * self._outputs_padded(roles(problem)), 256)

    def _before(self, problem: Problem, sms: int) -> int:
        """Workspace of the weights and of both absmax."""
        tables = phase_tables(self._converted(problem, 1), self.tile.depth)
        packed = sum(self._packed_bytes(problem, one) for one in tables)
        return w_of(problem, sms).magnitude_bytes + packed + self._source(problem, sms).magnitude_bytes

    def _images(self, problem: Problem, sms: int, workspace: int) -> int:
        """Images of a slab; 0 if none fits."""
        room = workspace - self._before(problem, sms)
        most = room // self._source(problem, sms).image_bytes
        return evenly(problem.batch, most) if most > 0 else 0

    # ---- tasks

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        source, w = self._source(problem, sms), w_of(problem, sms)
        yield w.magnitude_task
        images = max(1, self._images(problem, sms, workspace))
        converted = self._converted(problem, images)
        r, tables = roles(converted), phase_tables(converted, self.tile.depth)
        for one in tables:
            if one.rows:
                yield self._pack_task(converted, r, one)
        yield source.magnitude_task
        whole, rest = divmod(problem.batch, images)
        for times, count in ((whole, images), (1, rest)):
            if not count:
                continue
            part = self._converted(problem, count)
            yield replace(source.convert_task(count, images * source.image_bytes), times=times)
            for one in tables:
                for slab in self._slabs(part, r, one):
                    yield replace(self._gather_task(part, r, one, slab), times=times)

    def _pack_task(self, problem: Problem, r: Roles, tables: PhaseTables) -> Task:
        task = super()._pack_task(problem, r, tables)
        return replace(task, work=replace(task.work, dram_bytes=3 * task.work.dram_bytes // 2))

    def _gather_task(self, problem: Problem, r: Roles, tables: PhaseTables, slab: Slab) -> Task:
        """``problem``: that of the slab's images on converted tensors."""
        task = super()._gather_task(problem, r, tables, slab)
        most_rows = max(h.count for h in tables.h)
        part = slab.images * min(slab.lines, most_rows) / (problem.batch * most_rows)
        read = 2 * problem.batch * problem.groups * r.channels * prod(r.source_size)
        written = 4 * problem.batch * problem.groups * r.outputs * prod(r.written_size)
        packed = 2 * problem.groups * tables.rows * self._outputs_padded(r)
        moved = int(part * (read + (1 + problem.residual) * written)) + packed
        return replace(task, work=replace(task.work, dram_bytes=moved, passed_bytes=int(part * read), slab_bytes=read))

    # ---- launches

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        source, w = self._source(problem, sms), w_of(problem, sms)
        images = max(1, self._images(problem, sms, workspace))
        converted = self._converted(problem, images)
        r, tables = roles(converted), phase_tables(converted, self.tile.depth)
        found = [w.magnitude(0)]
        used = w.magnitude_bytes
        packed = []
        for one in tables:
            packed.append(("workspace", used))
            if one.rows:
                found.append(self._scaled_pack(problem, converted, r, one, w, packed[-1]))
            used += self._packed_bytes(problem, one)
        weights_bytes, magnitudes = used, used
        found.append(source.magnitude(magnitudes))
        to = magnitudes + source.magnitude_bytes
        slab_bytes = images * source.image_bytes
        exponents = kernel_params.slots(
            ScaledImplicitGemmParams, source_exponent=source.exponent(magnitudes), packed_exponent=w.exponent(0)
        )
        for first, count in slabs_of(problem.batch, images):
            found.append(source.convert(first, count, slab_bytes, magnitudes, to))
            part = self._converted(problem, count)
            for one, place in zip(tables, packed, strict=True):
                for launch in self._gather(part, r, one, None, place):
                    pointers = (self._placed(slot, r, to, 4 * first * r.written_strides[0]) for slot in launch.pointers)
                    found.append(replace(launch, pointers=(*pointers, *exponents)))
        forward = problem.kind is Pass.FPROP
        return Schedule(tuple(found), to + slab_bytes, weights_bytes if forward else 0)

    @staticmethod
    def _placed(slot: PointerSlot, r: Roles, to: int, first_written: int) -> PointerSlot:
        """A slot of the GEMM on 16-bit tensors: the source lies in the workspace, the result has four bytes."""
        if slot.buffer == r.source:
            return replace(slot, buffer="workspace", byte_offset=to + slot.byte_offset)
        if slot.buffer in (r.written, "residual"):
            return replace(slot, byte_offset=first_written + 2 * slot.byte_offset)
        return slot

    def _scaled_pack(
        self, problem: Problem, converted: Problem, r: Roles, tables: PhaseTables, w: Operand, packed: tuple[str, int]
    ) -> Launch:
        launch = self._pack(converted, r, tables, None, packed)
        p = ScaledPackParams.from_buffer_copy(launch.params.ljust(PACK.params_bytes, b"\0"))
        p.w_group = problem.channels_per_group[1] * problem.w_strides[0]
        p.magnitudes, p.unpadded = w.parts, roles(problem).channels
        slots = kernel_params.slots(
            ScaledPackParams, weights="w", packed=packed, largest=("workspace", 0), exponent=w.exponent(0)
        )
        return replace(launch, params=bytes(p), pointers=slots)


CANDIDATES = tuple(ScaledCandidate(tile, COPIED) for tile in TILES)


def candidates(problem: Problem) -> Iterator[ScaledCandidate]:
    """Every tile, refused or not; none for the weight gradient."""
    if problem.kind is not Pass.WGRAD:
        yield from CANDIDATES


def all_kernels() -> Iterator[KernelSpec]:
    yield from (ABSMAX, PACK, *CONVERTS.values())
    yield from (candidate.kernel for candidate in CANDIDATES)
