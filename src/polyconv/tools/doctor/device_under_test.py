"""The device under test, and how checks access it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from ...cpu import native
from ...cuda import CudaError, driver
from ...cuda.device import describe
from ...cuda.jit.cache import KernelCache
from ...cuda.jit.compile import compiler_id
from ...cuda.planner.device import CudaDevice
from ...measure.batch_limits import available_memory
from ...measure.timing import Sample, cuda_sample, sample
from ...util.cached import cached_property
from ...util.cpuinfo import processor_name
from .redzones import RedzoneBackend

T = TypeVar("T")
CPU = "cpu"


class DeviceUnderTest:
    """A device with PyTorch tensors in its memory: the CPU, or a GPU in the subclass.

    Args:
        name: ``cpu``, or ``cuda:0`` for the first GPU.
        quick: run a subset of each check's parts.
    """

    gpus = 1
    """Number of GPUs in this machine, as far as a check may need several."""
    why_no_torch = ""
    """Reason why PyTorch cannot use the device; empty if it can."""
    timer: Sample = staticmethod(sample)

    def __init__(self, name: str = CPU, quick: bool = False) -> None:
        self.name = name
        self.quick = quick
        self.device = torch.device(name)
        """Device of the tensors."""

    @property
    def why_no_tensors(self) -> str:
        """Reason why there are no tensors that its kernels can read; empty if there are."""
        return self.why_no_torch

    def about(self) -> dict[str, str]:
        """Names and versions on which results depend, the device first."""
        kernels = native.instruction_set() if native.is_available() else "no native kernels"
        return {"CPU": f"{processor_name()} ({torch.get_num_threads()} threads, {kernels})"}

    def at_work(self) -> AbstractContextManager[object]:
        """Context in which convolutions of :attr:`device`'s tensors run on this device. Real hardware needs none."""
        return nullcontext()

    def free_memory(self) -> int:
        """Bytes."""
        return available_memory()

    def wait(self) -> None:
        """Wait until all launched kernels have finished."""

    def some(self, every: Sequence[T], quickly: int) -> list[T]:
        """All items or, if quick, at most ``quickly`` of them, evenly spread."""
        return spread(every, quickly) if self.quick else list(every)


class GpuUnderTest(DeviceUnderTest):
    timer = staticmethod(cuda_sample)

    def __init__(self, name: str = "cuda:0", quick: bool = False) -> None:
        super().__init__(name, quick)
        self.index = self.device.index

    @cached_property
    def gpus(self) -> int:
        return int(driver.call("cuDeviceGetCount"))

    @cached_property
    def why_no_torch(self) -> str:
        return "" if torch.cuda.is_available() else "needs a build of PyTorch that can use this GPU"

    @cached_property
    def description(self) -> CudaDevice:
        return describe(self.index)

    @cached_property
    def cache(self) -> KernelCache:
        return KernelCache()

    def about(self) -> dict[str, str]:
        device, number = self.description, int(driver.call("cuDriverGetVersion"))
        try:
            compiler = compiler_id()
        except CudaError:
            compiler = "none"
        return {
            "GPU": f"{device.name} ({device.arch}, {device.sms} multiprocessors)",
            "NVRTC": compiler,
            "driver": f"for CUDA {number // 1000}.{number % 1000 // 10}",
        }

    def backend(self, **arguments: Any) -> RedzoneBackend:
        """New backend with red zones; arguments as for :class:`~polyconv.cuda.backend.CudaBackend`."""
        return RedzoneBackend(self.index, cache=self.cache, **arguments)

    def beside(self, index: int) -> GpuUnderTest:
        return GpuUnderTest(f"cuda:{index}", self.quick)

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0])

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


def under_test(name: str, quick: bool) -> DeviceUnderTest:
    """The device of this name."""
    return (DeviceUnderTest if name == CPU else GpuUnderTest)(name, quick)


def spread(every: Sequence[T], most: int) -> list[T]:
    """At most ``most`` items, evenly spread, including the first."""
    step = max(1, -(-len(every) // most))
    return list(every[::step])
