"""``polyconv.tools.doctor.worker`` on the virtual GPU, with planted faults.

    python -m virtual_gpu.doctor "every kernel"       # with the environment that virtual_gpu.process sets

Kernels may touch the whole storage of their tensors and scratch, red zones included: a GPU would not stop them either.
A fault is a kernel with an added line (``PLANTED=out of bounds``), or a driver that refuses.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fake_cuda import execute
from polyconv.backend import override
from polyconv.cuda.backend import PreparedPlan
from polyconv.cuda.jit.cache import KernelCache
from polyconv.cuda.planner import KernelSpec
from polyconv.tools.doctor import worker
from polyconv.tools.doctor.device_under_test import GpuUnderTest, spread
from polyconv.tools.doctor.redzones import RedzoneBackend
from virtual_gpu.gpu import VirtualGpu

T = TypeVar("T")
CPU = torch.device("cpu")
SPOILT = "depthwise_halo_8x8"
FIRST = "blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0"
PLANTS = {
    "out of bounds": f"{{body}} if ({FIRST}) params.written[-3] = 1.0f;",
    "uninitialised": f"const float old = params.written[0]; {{body}} __syncthreads(); "
    f"if ({FIRST}) params.written[0] += 0.0f * old;",
    "wrong result": f"{{body}} __syncthreads(); if ({FIRST}) params.written[0] += 0.01f;",
    "occupancy": "__shared__ volatile float much[10000]; much[threadIdx.x] = 0.0f; {body}",
}
LAUNCH_OUT_OF_RESOURCES = 701
FEW = 3


class SpoiltCache(KernelCache):
    """Kernels, one of them with an added line."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self._plant = plant

    def get_many(self, specs: Sequence[KernelSpec], arch: str, wanted_for: str | None = None) -> list[bytes]:
        return super().get_many([self._spoilt(spec) for spec in specs], arch, wanted_for)

    def _spoilt(self, spec: KernelSpec) -> KernelSpec:
        return replace(spec, body=self._plant.format(body=spec.body)) if spec.symbol == SPOILT else spec


class VirtualRedzoneBackend(RedzoneBackend):
    """The doctor's backend on CPU tensors."""

    def __init__(self, gpu: VirtualGpu, index: int, **arguments: Any) -> None:
        super().__init__(index, memory=CPU, stream=lambda: 0, **arguments)
        self._gpu = gpu
        self._run = threading.local()

    def allocate(self, size: int) -> Tensor:
        scratch = super().allocate(size)
        self._run.memory.enter_context(self._gpu.memory(_all_around(scratch)))
        return scratch

    def enqueue(self, prepared: PreparedPlan, tensors: Mapping[str, Tensor]) -> None:
        with ExitStack() as self._run.memory:
            self._run.memory.enter_context(self._gpu.memory(*map(_all_around, tensors.values())))
            super().enqueue(prepared, tensors)


class VirtualGpuUnderTest(GpuUnderTest):
    """The virtual V100 with CPU tensors. Time allows few parts."""

    why_no_torch = "needs a CUDA build of PyTorch"
    why_no_tensors = ""

    def __init__(self, gpu: VirtualGpu, name: str = "cuda:0", quick: bool = True) -> None:
        super().__init__(name, quick=True)
        self.device = CPU
        self._gpu = gpu

    @cached_property
    def cache(self) -> KernelCache:
        plant = PLANTS.get(os.environ.get("PLANTED", ""))
        return SpoiltCache(plant) if plant else KernelCache()

    def backend(self, **arguments: Any) -> VirtualRedzoneBackend:
        return VirtualRedzoneBackend(self._gpu, self.index, cache=self.cache, **arguments)

    def at_work(self) -> AbstractContextManager[object]:
        return override("cpu", self.backend())

    def beside(self, index: int) -> VirtualGpuUnderTest:
        return VirtualGpuUnderTest(self._gpu, f"cuda:{index}")

    def wait(self) -> None:
        """The emulator has finished when a launch returns."""

    def some(self, every: Sequence[T], quickly: int) -> list[T]:
        """Even fewer. With a planted fault, those that contain it."""
        if "PLANTED" in os.environ:
            return [one for one in every if one == SPOILT]
        return spread(every, min(max(1, quickly - 1), FEW))


def _all_around(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


if __name__ == "__main__":
    torch.set_num_threads(1)
    with VirtualGpu(execute) as gpu:
        if os.environ.get("PLANTED") == "launch":
            gpu.fail("cuLaunchKernel", 2, 1, LAUNCH_OUT_OF_RESOURCES)
        status = worker.main(subject=partial(VirtualGpuUnderTest, gpu))
    sys.exit(status)
