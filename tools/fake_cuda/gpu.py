"""Inside the process that has a fake GPU: what is launched, and who computes it."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gpu_emulator
from gpu_emulator import elf

from . import fat_binary, library

ARCH = 70
"""The machine code that is executed: the emulator's, which every GPU of compute capability 7.x runs."""
_NO_KERNEL_IMAGE, _LAUNCH_FAILED = 209, 719


@dataclass(frozen=True)
class LaunchRecord:
    """A launch that a driver or runtime accepted."""

    name: str
    cubin: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_shared: int
    max_dynamic_shared: int
    stream: int
    device: int
    params: bytes

    @classmethod
    def read(cls, struct: Any) -> LaunchRecord:
        """A copy of what a callback is given, which lives no longer than the call."""
        return cls(
            name=struct.name.decode(),
            cubin=ctypes.string_at(struct.cubin, struct.cubin_bytes),
            grid=tuple(struct.grid),
            block=tuple(struct.block),
            dynamic_shared=struct.dynamic_shared,
            max_dynamic_shared=struct.max_dynamic_shared,
            stream=struct.stream,
            device=struct.device,
            params=ctypes.string_at(struct.params, struct.params_bytes),
        )


Executor = Callable[[LaunchRecord, "list[tuple[int, int]]"], None]
"""Computes a launch, given the (address, size) ranges that it may touch."""


def execute(launch: LaunchRecord, buffers: list[tuple[int, int]], check_global: bool = False) -> None:
    """Execute the machine code. Races, reads of what nobody wrote and accesses outside the buffers raise.

    ``check_global``: races in global memory, too.
    """
    gpu_emulator.run_raw(
        launch.cubin,
        launch.name,
        launch.grid,
        launch.block,
        launch.params,
        buffers,
        shared=launch.dynamic_shared,
        max_dynamic_shared=launch.max_dynamic_shared,
        check_global=check_global,
    )


def compute_nothing(launch: LaunchRecord, buffers: list[tuple[int, int]]) -> None:
    """An executor that leaves all memory as it is."""


class PretendedGpu:
    """The fake GPUs of this process, inside a ``with`` block: its launches are executed and recorded.

    Outside of every block launches are checked and counted, and compute nothing. What an executor raises reaches the
    caller at the end of the block; PyTorch hears of a failed launch.
    """

    def __init__(self, executor: Executor = execute) -> None:
        self.launches: list[LaunchRecord] = []
        self._executor = executor
        self._failure: BaseException | None = None
        self._one_at_a_time = threading.Lock()
        self._callback = library.LAUNCH(self._on_launch)

    def __enter__(self) -> PretendedGpu:
        describe_kernels()
        library.loaded().fake_cuda_on_launch(self._callback)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        library.loaded().fake_cuda_on_launch(library.LAUNCH())
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure from error

    def fail(self, function: str, nth: int, count: int, code: int) -> None:
        """Let so many calls of a runtime function fail, from the n-th on (1 is the next); see runtime/fake_cuda.h."""
        library.loaded().fake_cuda_fail(function.encode(), nth, count, code)

    def repair(self) -> int:
        """Let nothing fail any more; gives the number of calls that did."""
        faults = int(library.loaded().fake_cuda_faults())
        library.loaded().fake_cuda_fail(None, 0, 0, 0)
        return faults

    def _on_launch(self, struct: Any) -> int:
        """Called by the runtime. No exception can cross it, so one is kept and the launch reported as failed."""
        try:
            launch = LaunchRecord.read(struct.contents)
            with self._one_at_a_time:
                self.launches.append(launch)
                self._executor(launch, library.allocations(launch.device))
        except BaseException as error:
            self._failure = self._failure or error
            return _LAUNCH_FAILED
        return 0


def counts() -> Any:
    """Launches, synchronisations, allocations and attributes set since the process started."""
    return library.loaded().fake_cuda_counts()


@functools.cache
def describe_kernels() -> object:
    """From now on the runtime knows registers, shared memory and parameters of every kernel that is asked about."""
    callback = library.DESCRIBE(_describe)
    library.loaded().fake_cuda_on_describe(callback)
    return callback  # which must live as long as the process


def _describe(address: int, name: bytes, description: Any) -> int:
    try:
        cubin = fat_binary.machine_code(address, ARCH)
        kernel = elf.load(cubin).kernel(name.decode())
    except (fat_binary.FatBinaryError, elf.CubinError):
        traceback.print_exc(file=sys.stderr)
        return _NO_KERNEL_IMAGE
    found = description.contents
    found.cubin, found.cubin_bytes = cubin, len(cubin)
    found.registers, found.static_shared = kernel.registers, kernel.static_shared
    found.local_bytes, found.max_threads = kernel.frame_bytes, kernel.max_threads
    found.params_bytes, found.parameters = kernel.param_bytes, len(kernel.parameters)
    for i, parameter in enumerate(kernel.parameters):
        found.parameter[i] = (parameter.offset, parameter.size)
    return 0
