"""Inside the child: launches received by the stub driver, and their execution."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fake_cuda import Executor, LaunchRecord, execute
from fake_cuda.library import LAUNCH
from polyconv.cuda import LaunchError
from polyconv.cuda.backend import CudaBackend, PreparedPlan
from polyconv.problem import Pass

_LAUNCH_FAILED = 719

OUTPUTS = {Pass.FPROP: ("y",), Pass.DGRAD: ("x",), Pass.WGRAD: ("dw", "db")}


def emulator_executor(launch: LaunchRecord, buffers: list[tuple[int, int]]) -> None:
    """Execute the machine code, also checking for data races in global memory."""
    execute(launch, buffers, check_global=True)


@functools.cache
def _stub() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class VirtualGpu:
    """The virtual V100 of this process, inside a ``with`` block.

    Args:
        executor: computes each launch; :func:`emulator_executor` if absent, :func:`record_only` to compute nothing.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        self.launches: list[LaunchRecord] = []
        self._executor = executor or emulator_executor
        self._buffers: list[tuple[int, int]] = []
        self._failure: BaseException | None = None
        self._callback = LAUNCH(self._on_launch)

    def __enter__(self) -> VirtualGpu:
        _stub().virtual_gpu_on_launch(self._callback)
        return self

    def __exit__(self, *_: object) -> None:
        _stub().virtual_gpu_on_launch(LAUNCH())

    @property
    def synchronisations(self) -> int:
        """Number of synchronisations with the GPU since the process started."""
        count = _stub().virtual_gpu_synchronisations
        count.restype = ctypes.c_uint64
        return int(count())

    def fail(self, function: str, nth: int, count: int, code: int) -> None:
        """Let this many calls of a driver function fail, from the n-th on (1 is the next); see driver/virtual_gpu.h."""
        _stub().virtual_gpu_fail(function.encode(), nth, count, code)

    def repair(self) -> int:
        """Let nothing fail any more; returns the number of failed calls."""
        failed = int(_stub().virtual_gpu_faults())
        _stub().virtual_gpu_fail(None, 0, 0, 0)
        return failed

    @contextmanager
    def memory(self, *tensors: Tensor) -> Iterator[None]:
        """Allow kernels in this block to touch the elements of these tensors, and raise their faults here.

        A range covers a tensor from first to last element; the rest of its storage is outside.
        """
        ranges = [_extent(tensor) for tensor in tensors if tensor.numel()]
        self._buffers += ranges
        try:
            yield
        except LaunchError as error:
            failure, self._failure = self._failure, None
            raise failure or error from error
        finally:
            for found in ranges:
                self._buffers.remove(found)

    def backend(self, **arguments: Any) -> VirtualBackend:
        """A CUDA backend whose device is this GPU; arguments as for :class:`polyconv.cuda.backend.CudaBackend`."""
        return VirtualBackend(self, **arguments)

    def _on_launch(self, struct: Any) -> int:
        """Called by the driver. No exception can cross it, so it is stored and the launch reported as failed."""
        try:
            launch = LaunchRecord.read(struct.contents)
            self.launches.append(launch)
            self._executor(launch, list(self._buffers))
        except BaseException as error:
            self._failure = error
            return _LAUNCH_FAILED
        return 0


class VirtualBackend(CudaBackend):
    """The CUDA backend on CPU tensors, with checks.

    Outputs and workspace are filled with NaN before the run, except an output that is added to, so that unwritten
    elements show. Inputs are compared afterwards, so that writes to them show.
    """

    def __init__(self, gpu: VirtualGpu, **arguments: Any) -> None:
        super().__init__(stream=arguments.pop("stream", lambda: 0), **arguments)
        self._gpu = gpu
        self._run = threading.local()

    def allocate(self, size: int) -> Tensor:
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8)  # all ones is NaN in every float format
        self._run.memory.enter_context(self._gpu.memory(workspace))
        return workspace

    def enqueue(self, prepared: PreparedPlan, tensors: Mapping[str, Tensor]) -> None:
        problem = prepared.plan.problem
        outputs = OUTPUTS[problem.kind]
        added_to = [name for name, tensor in tensors.items() if name == "residual" and tensor is tensors["y"]]
        for name in outputs:
            if name in tensors and not added_to:
                tensors[name].fill_(float("nan"))
        before = {name: tensor.clone() for name, tensor in tensors.items() if name not in (*outputs, *added_to)}
        with ExitStack() as self._run.memory:
            self._run.memory.enter_context(self._gpu.memory(*tensors.values()))
            if prepared.keeping is not None:
                held = [kept.memory for kept in prepared.keeping.weights._kept.values()]
                self._run.memory.enter_context(self._gpu.memory(*held))
            super().enqueue(prepared, tensors)
        for name, tensor in before.items():
            if not torch.equal(tensor, tensors[name]):
                raise AssertionError(f"{problem}: the run changed its input {name!r}")


def record_only(launch: LaunchRecord, buffers: list[tuple[int, int]]) -> None:
    """An executor that computes nothing."""


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes from the tensor's first element to its last, for any strides."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), elements * tensor.element_size()
