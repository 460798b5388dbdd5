"""Plans for fprop and dgrad of few channels as one fast kernel on FP16 tensor cores, at the accuracy of FP32
(kernels/fused_tensor.cuh).

Tiles and launches are those of :class:`polyconv.plan.fused.ResidentCandidate`; what is new comes before: the largest
magnitudes of the filters, by which they are scaled. The source needs none: a block finds its own scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ..accuracy import Way
from ..algebra.lattice import DenseAxis
from ..algebra.segments import Scheme2d
from ..problem import Problem
from . import layout
from .epilogue import kernel_with_epilogue
from .fused import F43, FusedTile, ResidentCandidate
from .gather import MOST_GROUPS, Roles, roles
from .layout import FusedTensorParams, FusedTensorWeightsParams
from .plan import KernelSpec, Launch, Schedule, Task
from .tensor import CHUNK, M8N8K4, MAGNITUDE, filters, filters_bytes, filters_task, headroom

FLIGHT = 8
"""Channels that the tensor cores sum by themselves (``kOfFlight`` quads): FP32 additions sum the rest."""
PRODUCTS = replace(M8N8K4.products, small_first=True)


@dataclass(frozen=True)
class FusedTensorCandidate(ResidentCandidate):
    """The transformed source of few channels stays in shared memory, as two halves."""

    params = FusedTensorParams
    weights_params = FusedTensorWeightsParams
    channels_together = CHUNK

    @property
    def name(self) -> str:
        return super().name.replace("fused", "fused_tensor", 1)

    @property
    def _headrooms(self) -> tuple[int, int]:
        """Bits by which transformed sources and weights may exceed the largest one."""
        h, w = self.h.transforms(), self.w.transforms()
        return headroom(h["input"]) + headroom(w["input"]), headroom(h["weights"]) + headroom(w["weights"])

    @cached_property
    def kernel(self) -> KernelSpec:
        tile = "FusedTensorTile"
        found = self._instance("fused_tensor", tile, self.sizes, self.floats_of_shared, M8N8K4.generations)
        flight = f"{self._tile_cpp(tile, self.sizes)}::kOfFlight * polyconv::kTensorChannels"
        return replace(found, facts=(*found.facts, (flight, FLIGHT)))

    @cached_property
    def weights_kernel(self) -> KernelSpec:
        return KernelSpec.of(
            FusedTensorWeightsParams,
            "fused_tensor_weights",
            self._tile_cpp("FusedTensorTile", self.sizes),
            symbol=f"fused_tensor_weights_f{self.h.m}{self.h.taps}_f{self.w.m}{self.w.taps}",
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
        """The largest magnitudes of the filters come first, in time and in the workspace."""
        found = super().schedule(problem, sms, workspace)
        return replace(found, launches=(filters(problem), *found.launches))

    def _weights(self, problem: Problem, r: Roles, h: DenseAxis, w: DenseAxis, at: int) -> Launch:
        launch = super()._weights(problem, r, h, w, at)
        p = FusedTensorWeightsParams.from_buffer_copy(launch.params)
        _, p.headroom = self._headrooms
        slots = layout.slots(FusedTensorWeightsParams, largest=("workspace", 0))
        return replace(launch, params=bytes(p), pointers=(*launch.pointers, *slots))

    def _convolve(self, problem: Problem, r: Roles, h: DenseAxis, w: DenseAxis, at: int, sms: int) -> Launch:
        launch = super()._convolve(problem, r, h, w, at, sms)
        p = FusedTensorParams.from_buffer_copy(launch.params)
        p.headroom_sources, p.headroom_filters = self._headrooms
        own = bytes(p)
        slots = layout.slots(FusedTensorParams, largest_filters=("workspace", 0))
        # Behind them are the parameters of an epilogue, if there is one.
        return replace(launch, params=own + launch.params[len(own) :], pointers=(*launch.pointers, *slots))

    def _way(self, channels: int, taps: tuple[int, int]) -> Way:
        return Way(Scheme2d(self.h.scheme(), self.w.scheme()), channels, (FLIGHT,), taps, PRODUCTS)


CANDIDATE = FusedTensorCandidate(F43, F43, FusedTile(4, 8, 8, 4, 3, 16, 1, 1, 64))
"""All sixteen channels at once, whether they are there or not."""


def candidates(problem: Problem) -> Iterator[FusedTensorCandidate]:
    """The one that there is, refused or not, so that the planner can say why."""
    yield CANDIDATE


def all_kernels() -> Iterator[KernelSpec]:
    """Every instance that this planner can choose."""
    yield from (MAGNITUDE, CANDIDATE.weights_kernel, CANDIDATE.kernel, kernel_with_epilogue(CANDIDATE.kernel))
