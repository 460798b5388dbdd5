"""The GPU that is examined, and how its examinations get at it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, TypeVar

import torch

from ..cuda import driver
from ..cuda.cache import KernelCache
from ..cuda.device import describe
from ..plan.device import CudaDevice
from .fences import FencedBackend

T = TypeVar("T")


class Subject:
    """A GPU, with tensors of PyTorch's on it.

    Args:
        index: which.
        quick: whether a choice of all that could be examined has to do.
    """

    def __init__(self, index: int = 0, quick: bool = False) -> None:
        self.index = index
        self.quick = quick
        self.device = torch.device("cuda", index)
        """Where its tensors are."""

    @cached_property
    def gpus(self) -> int:
        """How many there are on this machine."""
        return int(driver.call("cuDeviceGetCount"))

    @cached_property
    def description(self) -> CudaDevice:
        return describe(self.index)

    @cached_property
    def cache(self) -> KernelCache:
        """Where its kernels come from."""
        return KernelCache()

    @cached_property
    def why_no_torch(self) -> str:
        """Why PyTorch cannot use it; empty if it can."""
        return "" if torch.cuda.is_available() else "needs a build of PyTorch that can use this GPU"

    @property
    def why_no_tensors(self) -> str:
        """Why there are no tensors that its kernels could read; empty if there are."""
        return self.why_no_torch

    def backend(self, **arguments: Any) -> FencedBackend:
        """A backend of its own, with fences; arguments as for :class:`~polyconv.cuda.backend.CudaBackend`."""
        return FencedBackend(self.index, cache=self.cache, **arguments)

    def beside(self, index: int) -> Subject:
        """Another GPU of this machine."""
        return Subject(index, self.quick)

    def at_work(self) -> AbstractContextManager[object]:
        """A ``with`` block in which convolutions of its tensors run on it, as they do for everybody."""
        return nullcontext()

    def wait(self) -> None:
        """Until it has done what it was told to."""
        torch.cuda.synchronize(self.device)

    def some(self, every: Sequence[T], quickly: int) -> list[T]:
        """All of them, or so many, evenly spread, if it has to be quick."""
        return spread(every, quickly) if self.quick else list(every)


def spread(every: Sequence[T], most: int) -> list[T]:
    """At most so many, from the first on, evenly spread."""
    step = max(1, -(-len(every) // most))
    return list(every[::step])
