"""NVIDIA driver: contexts, loaded kernels, launches. The only module that calls the driver.

Every status is checked here (the bindings return it and never raise), nothing waits for the GPU, and everything is
thread-safe.

Launches use ``cuda.bindings`` and not ``cuda.core.launch``: our kernels take one struct by value, which ``cuda.core``
1.2 cannot pass, and with one prepared buffer a launch costs about two microseconds of Python. The launches of a whole
plan go through native code if it is built (:mod:`~.launch`), which gets the driver's functions from here.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from ..runtime.fork_safety import STATE_LOCK
from ..runtime.lazy_import import imported
from .errors import CompileError, ContextLostError, DriverError, LaunchError
from .jit.compile import why_unloadable
from .jit.cubin import KernelInfo, is_cubin, kernel_info
from .planner.plan import KernelSpec, Launch

LAUNCH = "cuLaunchKernel"

_SHARED_WITHOUT_OPT_IN = 48 * 1024
_ENTRY_POINTS = ("cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", LAUNCH)
"""Functions of ``csrc/cuda/driver.h``, in its order."""
_ENTRY_VERSION = 12000
"""CUDA version of these functions' interface: the first with kernels that belong to no module. Oldest driver."""
_LOADS_FUNCTIONS = 12040
"""First driver version with ``cuFuncLoad``. Older ones load a function when it is looked up."""

_LOST = frozenset({4, 214, 220, 700, 702, 709, 710, *range(714, 720), 999})
"""Sticky statuses, after which the context is unusable: illegal memory access, illegal instruction, device assertion,
hardware error, driver shut down."""
_UNREADABLE = frozenset({200, 209, 218, 222, 300})
"""Statuses for code that the driver cannot read: invalid image, no binary for this GPU, invalid or too new PTX."""
_NOT_THE_KERNELS = frozenset({2, 3, 100, 101, 201, 400, *range(900, 911)})
"""Statuses that any kernel would get: out of memory, no context, invalid stream, graph capture."""


@cache
def bindings() -> Any:
    """``cuda.bindings.driver``, initialised.

    libcuda is probed first: without it the bindings fail differently from call to call, and one call never returns.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(
            "no NVIDIA driver on this machine: libcuda.so.1 cannot be loaded. The CUDA backend needs a GPU and its "
            "driver; tensors on the CPU take another path"
        ) from error
    try:
        driver: Any = imported("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError("cuda.bindings is not installed: install polyconv[cu12] or polyconv[cu13]") from error
    number = ctypes.c_int()  # not by the bindings, whose every call fails on a driver of CUDA 11
    if failure := library.cuDriverGetVersion(ctypes.byref(number)):
        raise DriverError(f"cuDriverGetVersion failed: {describe_status(driver, _named(driver, failure))}")
    if number.value < _ENTRY_VERSION:
        raise DriverError(
            f"the NVIDIA driver is for CUDA {number.value // 1000}.{number.value % 1000 // 10}, and polyconv needs one "
            "for CUDA 12.0 or newer (driver 525): update it. polyconv.restore(model) gives a model torch's modules back"
        )
    (status,) = _answer(driver.cuInit, 0)
    if status:
        raise DriverError(f"the NVIDIA driver does not start: {describe_status(driver, status)}")
    return driver


@cache
def bindings_version() -> str:
    """CUDA version of the bindings, such as 12.9."""
    with STATE_LOCK:
        return ".".join(version("cuda-bindings").split(".")[:2])


class _Unnamed(int):
    """Status without a name in the bindings, from a driver newer than they are."""


def _answer(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the bindings; the result begins with the status. They raise for a status without a name."""
    try:
        return function(*arguments)
    except ValueError as error:
        number = re.match(r"(\d+) is not a valid CUresult", str(error))
        if number is None:
            raise
        return (_Unnamed(number[1]),)


def describe_status(driver: Any, status: Any) -> str:
    """Name and text of a CUDA error: ``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
    if isinstance(status, _Unnamed):
        return f"CUDA error {status} (which cuda.bindings {bindings_version()} has no name for)"
    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    return f"{name.decode() if name else f'CUDA error {int(status)}'} ({text.decode() if text else 'no description'})"


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function by name and return its value. Raises :class:`DriverError` if it fails."""
    status, *values = _answer(getattr(bindings(), name), *arguments)
    if status:
        raise failed(name, status)
    return values[0] if len(values) == 1 else tuple(values)


def failed(name: str, status: Any) -> DriverError:
    """Error for a driver function that returned this status."""
    return DriverError(f"{name} failed: {describe_status(bindings(), status)}", status=int(status))


def status_of(number: int) -> Any:
    """Status object of the bindings for a number from native code."""
    return _named(bindings(), number)


def _named(driver: Any, number: int) -> Any:
    try:
        return driver.CUresult(number)
    except ValueError:
        return _Unnamed(number)


@cache
def entry_points() -> tuple[int, ...]:
    """Addresses of the driver functions needed to launch, in the library loaded by the bindings."""
    return tuple(int(call("cuGetProcAddress", name.encode(), _ENTRY_VERSION, 0)[0]) for name in _ENTRY_POINTS)


def is_capturing(stream: int) -> bool:
    """Whether a stream is being captured into a graph; True if the query fails. The default stream never is."""
    if stream == 0:
        return False
    status, *capturing = _answer(bindings().cuStreamIsCapturing, stream)
    return bool(status) or int(capturing[0]) != 0


def launch_error(words: str, symbol: str, status: int) -> LaunchError:
    """Error for a kernel that was not loaded or launched; :class:`ContextLostError` for a sticky status."""
    if status not in _LOST:
        return LaunchError(words, symbol=symbol, status=status)
    return ContextLostError(
        f"{words}. With this error the GPU stops working for the whole process: a kernel that was launched earlier, "
        "and need not be polyconv's, went wrong. CUDA_LAUNCH_BLOCKING=1 tells which, compute-sanitizer why",
        symbol=symbol,
        status=status,
    )


def blames_the_kernel(error: LaunchError) -> bool:
    """Whether another kernel may succeed where this one could not be loaded or launched."""
    return not isinstance(error, ContextLostError) and error.status not in _NOT_THE_KERNELS


class Device:
    """One GPU: its primary context, shared with torch, and the kernels loaded on it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.handle = call("cuDeviceGet", index)
        # A C string: the bytes after the first NUL are undefined.
        self.name = call("cuDeviceGetName", 256, self.handle).split(b"\0")[0].decode(errors="replace").strip()
        # Retained for the life of the process, because kernels stay loaded in it.
        self._context = call("cuDevicePrimaryCtxRetain", self.handle)
        self.context_address = int(self._context)
        self._kernels: dict[KernelSpec, Kernel] = {}

    def attribute(self, name: str) -> int:
        """Device attribute by the driver's name without ``CU_DEVICE_ATTRIBUTE_``."""
        attribute = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call("cuDeviceGetAttribute", attribute, self.handle))

    def activate(self) -> Activation:
        """Scope in which this device's context is current for the thread."""
        return Activation(self)

    def has(self, spec: KernelSpec) -> bool:
        return spec in self._kernels

    def load(self, spec: KernelSpec, cubin: bytes) -> Kernel:
        """Load a kernel on this device, once."""
        with STATE_LOCK:
            kernel = self._kernels.get(spec)
            if kernel is None:
                with self.activate(), relaxed():
                    kernel = self._kernels[spec] = Kernel(self, spec, cubin)
        return kernel

    def __str__(self) -> str:
        return f"device {self.index} ({self.name})"


class Activation:
    """Scope with a device's context current. If torch has made it current, as usual, it costs one driver query."""

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
    """Scope in which this thread may load kernels although some thread captures a graph.

    Otherwise the driver refuses and invalidates the graph. Loading is not part of what a graph replays.
    """
    before = call("cuThreadExchangeStreamCaptureMode", bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class Kernel:
    """A kernel loaded on one device, which must be active during construction.

    The driver loads the code of a library lazily, at the first use of a function. That must not be a launch in graph
    capture, so the function is loaded here.
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
            # PTX is NUL-terminated; a cubin contains its length.
            self._library = call("cuLibraryLoadData", code if info else code + b"\0", [], [], 0, [], [], 0)
            self._kernel = call("cuLibraryGetKernel", self._library, spec.symbol.encode())
            self.info: KernelInfo = info or self._translated()
            self.function = call("cuKernelGetFunction", self._kernel)
            if call("cuDriverGetVersion") >= _LOADS_FUNCTIONS:
                call("cuFuncLoad", self.function)
        except DriverError as error:
            words = f"{info or f'PTX of {spec.symbol}'} could not be loaded on {device}: {error}"
            if error.status in _UNREADABLE and (reason := _too_new(device)):
                raise DriverError(f"{words}. {reason}", symbol=spec.symbol, status=error.status) from error
            raise launch_error(words, spec.symbol, error.status) from error
        self._dynamic_shared = _SHARED_WITHOUT_OPT_IN - self.info.static_shared

    def _translated(self) -> KernelInfo:
        """Resources of the kernel after the driver has translated its PTX."""
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
        """Occupancy [blocks per SM] according to the driver. The device must be active."""
        return int(
            call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self.function, self.spec.threads, dynamic_shared)
        )

    def allow_shared(self, dynamic_shared: int) -> None:
        """Opt in to more dynamic shared memory [bytes] than the default (48 KiB, static included)."""
        with STATE_LOCK:
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


def _too_new(device: Device) -> str | None:
    """User message if NVRTC is newer than the driver: then no other kernel would load either."""
    with suppress(CompileError):  # kernels of a bundle need no NVRTC
        arch = f"sm_{device.attribute('COMPUTE_CAPABILITY_MAJOR')}{device.attribute('COMPUTE_CAPABILITY_MINOR')}"
        return why_unloadable(call("cuDriverGetVersion"), arch)
    return None


class PreparedLaunch:
    """One launch of a plan on one device, complete except for addresses and stream.

    A call writes the addresses into the parameter buffer, which the driver copies before it returns. A concurrent
    thread uses a buffer of its own.
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
        """Enqueue the kernel on a stream handle (0: default stream), without waiting for it. Raises on failure."""
        if status := self.enqueue(addresses, stream):
            raise self.error(status, stream)

    def enqueue(self, addresses: Mapping[str, int], stream: int) -> Any:
        """Enqueue the kernel and return the driver's status."""
        if not self._lock.acquire(blocking=False):
            # Another thread is using the buffer, or was when this process was forked.
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
        """Description of the launch for native code (``csrc/cuda/module.cc``)."""
        launch = self._launch
        slots = tuple((slot.offset, slot.buffer, slot.byte_offset) for slot in launch.pointers)
        return int(self._kernel.function), launch.grid, launch.block, launch.dynamic_shared, launch.params, slots

    def error(self, status: Any, stream: int) -> LaunchError:
        """Error for a failed launch with this status."""
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
        """Occupancy [blocks per SM] of this launch. The device must be active."""
        return self._kernel.blocks_per_sm(self._launch.dynamic_shared)


_devices: dict[int, Device] = {}


def device(index: int) -> Device:
    """The GPU with this index, one object per process."""
    with STATE_LOCK:
        found = _devices.get(index)
        if found is None:
            found = _devices[index] = Device(index)
        return found


def release_devices() -> None:
    """Release all GPUs in a process that launches nothing: in exclusive mode a GPU serves one process at a time."""
    with STATE_LOCK:
        for found in _devices.values():
            call("cuDevicePrimaryCtxRelease", found.handle)
        _devices.clear()
