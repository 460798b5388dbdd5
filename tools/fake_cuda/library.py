"""The fake libcuda, alone or with the runtime: how a process gets it, and its interface for Python."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .building import build

_HERE = Path(__file__).resolve().parent
_LIBRARY = "libcuda.so.1"


def process_environment(
    headers: Sequence[Path], devices: str = "v100", base: Mapping[str, str] = os.environ, *, caching: bool = False
) -> dict[str, str]:
    """The environment of a process that has fake GPUs: ``"v100,t4"`` are two (``driver/device.c`` lists them).

    ``headers``: include folders of the CUDA version that PyTorch was built with, the runtime's first.

    PyTorch allocates each tensor's memory from the runtime, not from larger blocks, so that the emulator knows where
    each tensor ends. ``caching``: PyTorch's caching allocator is on, as on a GPU; graph capture needs it.
    """
    sources = (*_sources("driver", "runtime", "nccl"), headers[0] / "cuda_runtime_api.h")
    library = build(_LIBRARY, sources, [word for folder in headers for word in ("-I", str(folder.resolve()))])
    found = {
        **base,
        "LD_PRELOAD": _joined(str(library), base.get("LD_PRELOAD")),
        "LD_LIBRARY_PATH": _joined(str(library.parent), base.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _joined(str(_HERE.parent), base.get("PYTHONPATH")),
        "FAKE_CUDA_DEVICES": devices,
    }
    if not caching:
        found["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return found


def driver_folder() -> Path:
    """Folder for ``LD_LIBRARY_PATH`` with the driver alone. It links without the runtime, so it never calls it."""
    return build(_LIBRARY, _sources("driver"), ["-Wl,-z,defs"]).parent


def _sources(*parts: str) -> list[Path]:
    return [source for part in parts for source in (_HERE / part).iterdir()]


def _joined(first: str, rest: str | None) -> str:
    return os.pathsep.join(filter(None, [first, rest]))


class Launch(ctypes.Structure):
    """``LaunchRecord`` of ``driver/driver.h``."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("code", ctypes.c_void_p),
        ("code_bytes", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint32),
        ("max_dynamic_shared", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("params_bytes", ctypes.c_uint32),
        ("params", ctypes.c_void_p),
    ]


class Allocation(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("size", ctypes.c_uint64), ("device", ctypes.c_int32)]


class Counts(ctypes.Structure):
    """Calls since the process started."""

    _fields_ = [
        ("launches", ctypes.c_uint64),
        ("launches_with_gil", ctypes.c_uint64),
        ("synchronisations", ctypes.c_uint64),
        ("allocations", ctypes.c_uint64),
        ("attributes_set", ctypes.c_uint64),
    ]


UNPACK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch))


@functools.cache
def loaded() -> Any:
    """The fake libcuda of this process, which must have been started with it."""
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(_LIBRARY)
        if hasattr(library, "fake_cuda_counts"):
            library.fake_cuda_on_launch.argtypes = [LAUNCH, ctypes.c_int]
            library.fake_cuda_counts.restype = Counts
            library.fake_cuda_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
            return library
    raise RuntimeError("this process has no fake CUDA driver: start it with process_environment()")


def allocations(device: int) -> list[tuple[int, int]]:
    """Address and size of all memory that a kernel on a device may access; needs the runtime."""
    read = loaded().fake_cuda_allocations
    read.argtypes, read.restype = [ctypes.POINTER(Allocation), ctypes.c_uint64], ctypes.c_uint64
    room = 1024
    while True:
        found = (Allocation * room)()
        count = int(read(found, room))
        if count <= room:
            return [(a.address, a.size) for a in found[:count] if a.device in (device, -1)]
        room = 2 * count
