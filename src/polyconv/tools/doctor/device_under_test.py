"""The GPU under test, and how checks access it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, TypeVar

import torch

from ...cuda import driver
from ...cuda.device import describe
from ...cuda.jit.cache import KernelCache
from ...cuda.planner.device import CudaDevice
from .redzones import FencedBackend

T = TypeVar("T")


class Subject:
    """A GPU with PyTorch tensors in its memory.

    Args:
        index: CUDA device index.
        quick: run a subset of each check's parts.
    """

    def __init__(self, index: int = 0, quick: bool = False) -> None:
        self.index = index
        self.quick = quick
        self.device = torch.device("cuda", index)
        """Device of the tensors."""

    @cached_property
    def gpus(self) -> int:
        """Number of GPUs in this machine."""
        return int(driver.call("cuDeviceGetCount"))

    @cached_property
    def description(self) -> CudaDevice:
        return describe(self.index)

    @cached_property
    def cache(self) -> KernelCache:
        return KernelCache()

    @cached_property
    def why_no_torch(self) -> str:
        """Reason why PyTorch cannot use the GPU; empty if it can."""
        return "" if torch.cuda.is_available() else "needs a build of PyTorch that can use this GPU"

    @property
    def why_no_tensors(self) -> str:
        """Reason why there are no tensors that its kernels can read; empty if there are."""
        return self.why_no_torch

    def backend(self, **arguments: Any) -> FencedBackend:
        """New backend with red zones; arguments as for :class:`~polyconv.cuda.backend.CudaBackend`."""
        return FencedBackend(self.index, cache=self.cache, **arguments)

    def beside(self, index: int) -> Subject:
        return Subject(index, self.quick)

    def at_work(self) -> AbstractContextManager[object]:
        """Context in which convolutions of :attr:`device`'s tensors run on this GPU. Real hardware needs none."""
        return nullcontext()

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def some(self, every: Sequence[T], quickly: int) -> list[T]:
        """All items or, if quick, at most ``quickly`` of them, evenly spread."""
        return spread(every, quickly) if self.quick else list(every)


def spread(every: Sequence[T], most: int) -> list[T]:
    """At most ``most`` items, evenly spread, including the first."""
    step = max(1, -(-len(every) // most))
    return list(every[::step])
