"""The NVIDIA driver: contexts, loaded kernels, launches. Nothing else in polyconv calls it.

Every call's status is checked here (the bindings return it and never raise), nothing here waits for the GPU, and
everything here may be used from several threads.

Launches go through ``cuda.bindings`` and not ``cuda.core.launch``: a kernel of ours takes one struct by value, which
``cuda.core`` 1.2 cannot pass, and with one prepared buffer a launch costs about two microseconds of Python. Those of a
whole plan go through native code, where there is some (:mod:`~.enqueue`): it gets the driver's own functions from here.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from ..forking import whole
from ..importing import imported
from ..plan.plan import KernelSpec, Launch
from .cubin import KernelInfo, is_cubin, kernel_info
from .errors import ContextLostError, DriverError, LaunchError

LAUNCH = "cuLaunchKernel"

_SHARED_WITHOUT_OPT_IN = 48 * 1024
_ENTRY_POINTS = ("cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", LAUNCH)
"""What ``csrc/cuda/driver.h`` has, in its order."""
_ENTRY_VERSION = 12000
"""Of CUDA, whose interface of these functions is meant: the first that has kernels which belong to no module."""
_LOADS_FUNCTIONS = 12040
"""The first driver that can be told to load a function. Those before it load it when it is looked up."""

_LOST = frozenset({4, 214, 220, 700, 702, 709, 710, *range(714, 720), 999})
"""Statuses after which a context is of no use: a memory access, an instruction or an assertion of some kernel that was
wrong, an error of the hardware, a driver that has shut down. The driver's word for them: sticky."""
_NOT_THE_KERNELS = frozenset({2, 3, 100, 101, 201, 400, *range(900, 911)})
"""Statuses that any kernel would have met: no memory, no context, no such stream, a graph that is being captured."""


@cache
def bindings() -> Any:
    """``cuda.bindings.driver``, ready to use.

    The library is probed by hand first: without it the bindings fail in ways that differ from call to call, and one of
    them never returns.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(
            "no NVIDIA driver on this machine: libcuda.so.1 cannot be loaded. The CUDA backend needs a GPU and its "
            "driver; tensors on the CPU take another path"
        ) from error
    try:
        driver: Any = imported("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError("cuda.bindings is not installed: install polyconv[cu12] or polyconv[cu13]") from error
    (status,) = _answer(driver.cuInit, 0)
    if status:
        raise DriverError(f"the NVIDIA driver does not start: {describe_status(driver, status)}")
    return driver


@cache
def bindings_version() -> str:
    """The version of CUDA that the bindings speak: 12.9."""
    with whole:
        return ".".join(version("cuda-bindings").split(".")[:2])


class _Unnamed(int):
    """A status that the bindings have no name for: a driver that is newer than they are may give one."""


def _answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of the bindings returns, a status first. At a status without a name they raise instead."""
    try:
        return function(*arguments)
    except ValueError as error:
        number = re.match(r"(\d+) is not a valid CUresult", str(error))
        if number is None:
            raise
        return (_Unnamed(number[1]),)


def describe_status(driver: Any, status: Any) -> str:
    """A CUDA error's name and text: ``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
    if isinstance(status, _Unnamed):
        return f"CUDA error {status} (which cuda.bindings {bindings_version()} has no name for)"
    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    return f"{name.decode() if name else f'CUDA error {int(status)}'} ({text.decode() if text else 'no description'})"


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function by name and return its value; raise :class:`DriverError` if it fails."""
    status, *values = _answer(getattr(bindings(), name), *arguments)
    if status:
        raise failed(name, status)
    return values[0] if len(values) == 1 else tuple(values)


def failed(name: str, status: Any) -> DriverError:
    """The error of a driver function that returned this status."""
    return DriverError(f"{name} failed: {describe_status(bindings(), status)}", status=int(status))


def status_of(number: int) -> Any:
    """A status as the bindings have it, from the number that native code was given."""
    try:
        return bindings().CUresult(number)
    except ValueError:
        return _Unnamed(number)


@cache
def entry_points() -> tuple[int, ...]:
    """Addresses of the functions that launching takes, in the library that the bindings have loaded."""
    return tuple(int(call("cuGetProcAddress", name.encode(), _ENTRY_VERSION, 0)[0]) for name in _ENTRY_POINTS)


def is_capturing(stream: int) -> bool:
    """Whether what is launched on a stream is written down for a graph. One that does not answer counts as such.

    The default stream never is, and is not asked.
    """
    if stream == 0:
        return False
    status, *capturing = _answer(bindings().cuStreamIsCapturing, stream)
    return bool(status) or int(capturing[0]) != 0


def launch_error(words: str, symbol: str, status: int) -> LaunchError:
    """The error of a kernel that the driver did not load or launch, told apart by what it returned."""
    if status not in _LOST:
        return LaunchError(words, symbol=symbol, status=status)
    return ContextLostError(
        f"{words}. With this error the GPU stops working for the whole process: a kernel that was launched earlier, "
        "and need not be polyconv's, went wrong. CUDA_LAUNCH_BLOCKING=1 tells which, compute-sanitizer why",
        symbol=symbol,
        status=status,
    )


def blames_the_kernel(error: LaunchError) -> bool:
    """Whether another kernel may do where this one could not be loaded or launched."""
    return not isinstance(error, ContextLostError) and error.status not in _NOT_THE_KERNELS


class Device:
    """One GPU: its primary context, which torch shares, and the kernels loaded on it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.handle = call("cuDeviceGet", index)
        # As C means it: what follows the first NUL is whatever the driver left in the buffer.
        self.name = call("cuDeviceGetName", 256, self.handle).split(b"\0")[0].decode(errors="replace").strip()
        # Retained for the life of the process: kernels stay loaded in it.
        self._context = call("cuDevicePrimaryCtxRetain", self.handle)
        self.context_address = int(self._context)
        self._kernels: dict[KernelSpec, Kernel] = {}

    def attribute(self, name: str) -> int:
        """A device attribute by the driver's own name, without its prefix."""
        attribute = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", attribute, self.handle))

    def activate(self) -> Activation:
        """A ``with`` block in which this device's context is the thread's current one."""
        return Activation(self)

    def has(self, spec: KernelSpec) -> bool:
        """Whether the kernel is loaded on this device."""
        return spec in self._kernels

    def load(self, spec: KernelSpec, cubin: bytes) -> Kernel:
        """The kernel, loaded on this device; the second time, the same object."""
        with whole:
            kernel = self._kernels.get(spec)
            if kernel is None:
                with self.activate(), relaxed():
                    kernel = self._kernels[spec] = Kernel(self, spec, cubin)
        return kernel

    def __str__(self) -> str:
        return f"device {self.index} ({self.name})"


class Activation:
    """Makes a device's context current and puts back what was there.

    torch has usually made the same context current already, so the common case is one question to the driver.
    """

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pushed = False

    def __enter__(self) -> None:
        status, *current = _answer(bindings().cuCtxGetCurrent)
        if status or int(current[0]) != self._device.context_address:
            call("cuCtxPushCurrent", self._device._context)
            self._pushed = True

    def __exit__(self, *_: object) -> None:
        if self._pushed:
            call("cuCtxPopCurrent")


@contextmanager
def relaxed() -> Iterator[None]:
    """A ``with`` block in which this thread may load kernels, although some thread captures a graph.

    Otherwise the driver refuses, and spoils the graph as well. Loading is not part of what a graph repeats.
    """
    before = call("cuThreadExchangeStreamCaptureMode", bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class Kernel:
    """A kernel loaded on one device, which is the active one when this is made.

    The driver loads lazily: a library brings no code to the device before one of its functions is wanted. A launch that
    is captured in a graph must not be what wants it first, so the function is loaded here.
    """

    def __init__(self, device: Device, spec: KernelSpec, code: bytes) -> None:
        self.device = device
        self.spec = spec
        info = kernel_info(code, spec.symbol) if is_cubin(code) else None
        if info is not None and info.params_bytes != spec.params_bytes:
            raise LaunchError(
                f"{spec.symbol} was compiled for {info.params_bytes} bytes of parameters, "
                f"its description says {spec.params_bytes}",
                symbol=spec.symbol,
            )
        try:
            # PTX ends with a NUL; a cubin knows its length.
            self._library = call("cuLibraryLoadData", code if info else code + b"\0", [], [], 0, [], [], 0)
            self._kernel = call("cuLibraryGetKernel", self._library, spec.symbol.encode())
            self.info: KernelInfo = info or self._translated()
            self.function = call("cuKernelGetFunction", self._kernel)
            if call("cuDriverGetVersion") >= _LOADS_FUNCTIONS:
                call("cuFuncLoad", self.function)
        except DriverError as error:
            words = f"{info or f'PTX of {spec.symbol}'} could not be loaded on {device}: {error}"
            raise launch_error(words, spec.symbol, error.status) from error
        self._dynamic_shared = _SHARED_WITHOUT_OPT_IN - self.info.static_shared

    def _translated(self) -> KernelInfo:
        """What the driver made of PTX."""
        return KernelInfo(
            self.spec.symbol,
            "PTX",
            registers=self._attribute("NUM_REGS"),
            static_shared=self._attribute("SHARED_SIZE_BYTES"),
            stack=self._attribute("LOCAL_SIZE_BYTES"),
            params_bytes=self.spec.params_bytes,
            max_threads=self._attribute("MAX_THREADS_PER_BLOCK"),
        )

    def _attribute(self, name: str) -> int:
        attribute = getattr(bindings().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return int(call("cuKernelGetAttribute", attribute, self._kernel, self.device.handle))

    def blocks_per_sm(self, dynamic_shared: int) -> int:
        """Blocks that a multiprocessor holds at once, as the driver says. The device is the active one."""
        return int(
            call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self.function, self.spec.threads, dynamic_shared)
        )

    def allow_shared(self, dynamic_shared: int) -> None:
        """Ask for more dynamic shared memory than a kernel gets by default (48 KiB, static included)."""
        with whole:
            if dynamic_shared <= self._dynamic_shared:
                return
            attribute = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            try:
                call("cuKernelSetAttribute", attribute, dynamic_shared, self._kernel, self.device.handle)
            except DriverError as error:
                words = (
                    f"{self.spec.symbol} needs {dynamic_shared} B of dynamic and {self.info.static_shared} B of static "
                    f"shared memory, which {self.device} does not give: {error}"
                )
                raise launch_error(words, self.spec.symbol, error.status) from error
            self._dynamic_shared = dynamic_shared


class PreparedLaunch:
    """One launch of a plan on one device, with all but the addresses and the stream already in place.

    The parameters lie in one buffer whose address the driver gets; a call writes the addresses into it. The driver
    copies the buffer before it returns; a thread that comes in between takes a buffer of its own.
    """

    __slots__ = ("_arguments", "_blob", "_kernel", "_launch", "_launch_kernel", "_lock", "_sizes", "_slots", "_where")

    def __init__(self, kernel: Kernel, launch: Launch) -> None:
        if len(launch.params) != launch.kernel.params_bytes:
            raise LaunchError(
                f"{launch.kernel.symbol} takes {launch.kernel.params_bytes} bytes of parameters, "
                f"the plan holds {len(launch.params)}",
                symbol=launch.kernel.symbol,
            )
        kernel.allow_shared(launch.dynamic_shared)
        self._kernel = kernel
        self._launch = launch
        self._blob = ctypes.create_string_buffer(launch.params, len(launch.params))
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self._blob))
        self._where = ctypes.addressof(self._arguments)
        self._slots = tuple(
            (ctypes.c_uint64.from_buffer(self._blob, slot.offset), slot.buffer, slot.byte_offset)
            for slot in launch.pointers
        )
        self._sizes = (*launch.grid, *launch.block, launch.dynamic_shared)
        self._launch_kernel = partial(_answer, bindings().cuLaunchKernel)
        self._lock = threading.Lock()

    def __call__(self, addresses: Mapping[str, int], stream: int) -> None:
        """Enqueue the kernel on a stream (its handle; 0 is the default stream). Returns before the kernel has run."""
        if status := self.enqueue(addresses, stream):
            raise self.error(status, stream)

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> Any:
        """The same; gives what the driver returned."""
        if not self._lock.acquire(blocking=False):
            # Another thread is between the two, or was when this process was forked off.
            return PreparedLaunch(self._kernel, self._launch).enqueue(addresses, stream)
        try:
            for slot, buffer, offset in self._slots:
                address = addresses.get(buffer, 0)
                slot.value = address + offset if address else 0
            (status,) = self._launch_kernel(self._kernel.function, *self._sizes, stream, self._where, 0)
        finally:
            self._lock.release()
        return status

    def described(self) -> tuple[Any, ...]:
        """As native code takes it (``csrc/cuda/module.cc``)."""
        launch = self._launch
        slots = tuple((slot.offset, slot.buffer, slot.byte_offset) for slot in launch.pointers)
        return int(self._kernel.function), launch.grid, launch.block, launch.dynamic_shared, launch.params, slots

    def error(self, status: Any, stream: int) -> LaunchError:
        """That of a launch for which the driver returned this status."""
        launch, kernel = self._launch, self._kernel
        words = (
            f"{describe_status(bindings(), status)} when launching {kernel.spec.symbol} on {kernel.device}: "
            f"grid {launch.grid}, block {launch.block}, {launch.dynamic_shared} B dynamic shared memory, "
            f"stream {stream:#x}; the kernel has {kernel.info.registers} registers, "
            f"{kernel.info.static_shared} B static shared memory and allows {kernel.info.max_threads} threads"
        )
        return launch_error(words, kernel.spec.symbol, int(status))

    @property
    def resident_blocks(self) -> int:
        """Blocks of this launch that a multiprocessor holds at once. The device is the active one."""
        return self._kernel.blocks_per_sm(self._launch.dynamic_shared)


_devices: dict[int, Device] = {}


def device(index: int) -> Device:
    """The GPU with this index, one object per process."""
    with whole:
        found = _devices.get(index)
        if found is None:
            found = _devices[index] = Device(index)
        return found


def release_devices() -> None:
    """Let go of all GPUs, in a process that launches nothing: one that serves a single process at a time may be wanted
    by another."""
    with whole:
        for found in _devices.values():
            call("cuDevicePrimaryCtxRelease", found.handle)
        _devices.clear()
