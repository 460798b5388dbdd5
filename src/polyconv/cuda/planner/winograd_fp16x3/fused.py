"""Plans for fprop and dgrad of few channels as one fused Winograd kernel with FP32 accuracy on FP16 tensor cores
(kernels/winograd_fp16x3/fused.cuh).

Tiles and launches are those of :class:`polyconv.cuda.planner.winograd.fused.ResidentCandidate`. The absmax of every
filter, by which it is scaled, is computed first; each block finds the scale of its source itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ....algebra.polyphase import DenseAxis
from ....algebra.segments import Scheme2d
from ....numerics.prediction import Way
from ....problem import Problem
from ....util.cached import cached_property
from .. import kernel_params
from ..epilogue import kernel_with_epilogue
from ..implicit_gemm.fprop_dgrad import MOST_GROUPS, Roles, roles
from ..kernel_params import declared
from ..plan import KernelSpec, Launch, Schedule, Task
from ..winograd.fused import F43, FusedTile, ResidentCandidate
from .nonfused import M8N8K4, MAGNITUDE, filters, filters_bytes, filters_task, headroom
from .nonfused_tiling import CHUNK

Fp16x3FusedParams = declared("winograd_fp16x3/fused", "Fp16x3FusedParams")
Fp16x3FusedFilterParams = declared("winograd_fp16x3/fused_filter", "Fp16x3FusedFilterParams")


FLIGHT = 8
"""Channels accumulated on the tensor cores (``kOfFlight`` quads); FP32 additions sum the flights."""
PRODUCTS = replace(M8N8K4.products, small_first=True)


@dataclass(frozen=True)
class Fp16x3FusedCandidate(ResidentCandidate):
    """Resident candidate whose transformed source lies in shared memory split into two FP16 values."""

    params = Fp16x3FusedParams
    weights_params = Fp16x3FusedFilterParams
    channels_together = CHUNK

    @property
    def name(self) -> str:
        return super().name.replace("winograd_fused", "winograd_fp16x3_fused", 1)

    @property
    def _headrooms(self) -> tuple[int, int]:
        """Bits by which transformed sources and weights may exceed their absmax."""
        h, w = self.h, self.w
        return headroom(h, "input") + headroom(w, "input"), headroom(h, "weights") + headroom(w, "weights")

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = "Fp16x3FusedTile"
        # The efficiency gives the simulated ratio to winograd/fused_resident.
        found = self._instance(
            "winograd_fp16x3/fused", tile, self.sizes, self.floats_of_shared, M8N8K4.generations, efficiency=0.55
        )
        flight = f"{self._tile_cpp(tile, self.sizes)}::kOfFlight * polyconv::kTensorChannels"
        return replace(found, facts=(*found.facts, (flight, FLIGHT)))

    @cached_property
    def weights_kernel(self) -> KernelSpec:
        return KernelSpec.of(
            Fp16x3FusedFilterParams,
            "winograd_fp16x3/fused_filter",
            self._tile_cpp("Fp16x3FusedTile", self.sizes),
            symbol=f"winograd_fp16x3_fused_filter_f{self.h.m}{self.h.taps}_f{self.w.m}{self.w.taps}",
            threads=self.tile.k,
            axes=(self.h, self.w),
            generations=M8N8K4.generations,
        )

    def refusal(self, problem: Problem) -> str | None:
        refused = super().refusal(problem)
        if refused is None and roles(problem).outputs * problem.groups > MOST_GROUPS:
            return f"more than {MOST_GROUPS} filters"
        return refused

    def tasks(self, problem: Problem, sms: int, workspace: int) -> Iterator[Task]:
        yield filters_task(problem)
        yield from super().tasks(problem, sms, workspace)

    def weights_at(self, problem: Problem) -> int:
        return filters_bytes(problem)

    def schedule(self, problem: Problem, sms: int, workspace: int) -> Schedule:
        """Absmax of the filters, which also comes first in the workspace, then the launches of the FP32 kernel."""
        found = super().schedule(problem, sms, workspace)
        return replace(found, launches=(filters(problem), *found.launches))

    def _weights(self, problem: Problem, r: Roles, h: DenseAxis, w: DenseAxis, at: int) -> Launch:
        launch = super()._weights(problem, r, h, w, at)
        p = Fp16x3FusedFilterParams.from_buffer_copy(launch.params)
        _, p.headroom = self._headrooms
        slots = kernel_params.slots(Fp16x3FusedFilterParams, largest=("workspace", 0))
        return replace(launch, params=bytes(p), pointers=(*launch.pointers, *slots))

    def _convolve(self, problem: Problem, r: Roles, h: DenseAxis, w: DenseAxis, at: int, sms: int) -> Launch:
        launch = super()._convolve(problem, r, h, w, at, sms)
        p = Fp16x3FusedParams.from_buffer_copy(launch.params)
        p.headroom_sources, p.headroom_filters = self._headrooms
        own = bytes(p)
        slots = kernel_params.slots(Fp16x3FusedParams, largest_filters=("workspace", 0))
        # Epilogue parameters, if any, follow the kernel's own.
        return replace(launch, params=own + launch.params[len(own) :], pointers=(*launch.pointers, *slots))

    def _way(self, channels: int, taps: tuple[int, int]) -> Way:
        return Way(Scheme2d(self.h.scheme(), self.w.scheme()), channels, (FLIGHT,), taps, PRODUCTS)


CANDIDATE = Fp16x3FusedCandidate(F43, F43, FusedTile(4, 8, 8, 4, 3, 16, 1, 1, 64))
"""One chunk of all sixteen channels, present or not."""


def candidates(problem: Problem) -> Iterator[Fp16x3FusedCandidate]:
    """The only candidate, refused or not, so that the planner can say why."""
    yield CANDIDATE


def all_kernels() -> Iterator[KernelSpec]:
    yield from (MAGNITUDE, CANDIDATE.weights_kernel, CANDIDATE.kernel, kernel_with_epilogue(CANDIDATE.kernel))
