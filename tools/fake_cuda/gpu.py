"""Inside a process with fake GPUs: launches, and their execution."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gpu_emulator

from . import fat_binary, library

if TYPE_CHECKING:
    from typing import Self

ARCHS = 70, 80
"""Architectures of the machine code taken from fat binaries: the emulator runs both. 7.x GPUs run the first, 8.x both,
the first in place of what the driver would translate from its PTX."""
_LAUNCH_FAILED = 719


@dataclass(frozen=True)
class LaunchRecord:
    """A launch that the driver accepted."""

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
        """A copy: the structure is valid during the callback only."""
        return cls(
            name=struct.name.decode(),
            cubin=ctypes.string_at(struct.code, struct.code_bytes),
            grid=tuple(struct.grid),
            block=tuple(struct.block),
            dynamic_shared=struct.dynamic_shared,
            max_dynamic_shared=struct.max_dynamic_shared,
            stream=struct.stream,
            device=struct.device,
            params=ctypes.string_at(struct.params, struct.params_bytes),
        )


Executor = Callable[[LaunchRecord, "list[tuple[int, int]]"], None]
"""Computes a launch, given the (address, size) ranges that it may access."""


def execute(launch: LaunchRecord, buffers: list[tuple[int, int]], check_global: bool = False) -> None:
    """Execute the machine code. Races, reads of uninitialised memory and accesses outside the buffers raise.

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

    Outside of every block launches are checked and counted, and compute nothing. An exception of the executor is
    raised at the end of the block; PyTorch sees a failed launch.
    """

    executes_captures = False
    """Whether a captured launch is executed at once, too, and not only when its graph runs."""

    def __init__(self, executor: Executor = execute) -> None:
        self.launches: list[LaunchRecord] = []
        self._executor = executor
        self._failure: BaseException | None = None
        self._one_at_a_time = threading.Lock()
        self._callback = library.LAUNCH(self._on_launch)

    def __enter__(self) -> Self:
        unpack_fat_binaries()
        library.loaded().fake_cuda_on_launch(self._callback, self.executes_captures)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        library.loaded().fake_cuda_on_launch(library.LAUNCH(), 0)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure from error

    def fail(self, function: str, nth: int, count: int, code: int) -> None:
        """Let ``count`` calls of a function of driver or runtime return ``code``, from the nth on (1 is the next)."""
        library.loaded().fake_cuda_fail(function.encode(), nth, count, code)

    def repair(self) -> int:
        """End the effect of :meth:`fail`. Returns the number of calls that failed."""
        faults = int(library.loaded().fake_cuda_faults())
        library.loaded().fake_cuda_fail(None, 0, 0, 0)
        return faults

    def _on_launch(self, struct: Any) -> int:
        """Called by the driver. No exception can cross it: it is kept, and the launch reported as failed."""
        try:
            launch = LaunchRecord.read(struct.contents)
            with self._one_at_a_time:
                self.launches.append(launch)
                self._executor(launch, self._accessible(launch))
        except BaseException as error:
            self._failure = self._failure or error
            return _LAUNCH_FAILED
        return 0

    def _accessible(self, launch: LaunchRecord) -> list[tuple[int, int]]:
        """The (address, size) ranges that a launch may access."""
        return library.allocations(launch.device)


def counts() -> Any:
    """Launches, synchronisations, allocations and attributes set since the process started."""
    return library.loaded().fake_cuda_counts()


@functools.cache
def unpack_fat_binaries() -> object:
    """Let the runtime, if there is one, read registers, shared memory and parameters of registered kernels."""
    callback = library.UNPACK(_unpack)
    if hasattr(library.loaded(), "fake_cuda_on_unpack"):
        library.loaded().fake_cuda_on_unpack(callback)
    return callback  # which must live as long as the process


def _unpack(address: int) -> int | None:
    """Address of the newest cubin in a fat binary for all GPUs; ``machine_code`` keeps it alive."""
    for arch in reversed([arch for arch in ARCHS if arch <= library.loaded().fake_cuda_oldest_arch()]):
        try:
            return ctypes.cast(ctypes.c_char_p(fat_binary.machine_code(address, arch)), ctypes.c_void_p).value
        except fat_binary.FatBinaryError:
            if arch == ARCHS[0]:
                traceback.print_exc(file=sys.stderr)
    return None
