"""Inside the child: the virtual GPU, and a backend that runs on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fake_cuda import Executor, LaunchRecord, PretendedGpu, compute_nothing, counts, execute
from polyconv.cuda import LaunchError
from polyconv.cuda.backend import CudaBackend, PreparedPlan
from polyconv.problem import Pass

record_only = compute_nothing
OUTPUTS = {Pass.FPROP: ("y",), Pass.DGRAD: ("x",), Pass.WGRAD: ("dw", "db")}


def emulator_executor(launch: LaunchRecord, buffers: list[tuple[int, int]]) -> None:
    """Execute the machine code, also checking for data races in global memory."""
    execute(launch, buffers, check_global=True)


class VirtualGpu(PretendedGpu):
    """The virtual V100 of this process, inside a ``with`` block.

    Args:
        executor: computes each launch; :func:`emulator_executor` if absent, :func:`record_only` to compute nothing.
    """

    executes_captures = True

    def __init__(self, executor: Executor | None = None) -> None:
        super().__init__(executor or emulator_executor)
        self._buffers: list[tuple[int, int]] = []

    def __exit__(self, *_: object) -> None:
        self._failure = None  # :meth:`memory` has raised it
        super().__exit__(None, None, None)

    @property
    def synchronisations(self) -> int:
        """Number of synchronisations with the GPU since the process started."""
        return int(counts().synchronisations)

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

    def _accessible(self, launch: LaunchRecord) -> list[tuple[int, int]]:
        return list(self._buffers)


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


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes from the tensor's first element to its last, for any strides."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), elements * tensor.element_size()
