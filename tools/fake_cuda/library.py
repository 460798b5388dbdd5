"""The library that is both runtime and driver: how a process gets it, and how Python talks to it."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .building import build

_HERE = Path(__file__).resolve().parent
_LIBRARY = "libcuda.so.1"
_PARTS = ("runtime", "driver", "nccl")
_MAX_PARAMETERS = 64


def process_environment(
    headers: Sequence[Path], devices: str = "v100", base: Mapping[str, str] = os.environ, *, caching: bool = False
) -> dict[str, str]:
    """The environment of a process that has fake GPUs: ``"v100,t4"`` are two (``runtime/device.c`` lists them).

    ``headers``: folders with those of the CUDA version that PyTorch was built with, the runtime's first.

    PyTorch gets each tensor's memory from the runtime itself, not out of larger blocks, so that the emulator sees
    where each one ends. ``caching``: out of larger blocks after all, as on a GPU; graphs can be captured only so.
    """
    sources = [source for part in _PARTS for source in (_HERE / part).iterdir()]
    included = [word for folder in headers for word in ("-I", str(folder.resolve()))]
    library = build(_LIBRARY, (*sources, headers[0] / "cuda_runtime_api.h"), included)
    found = {
        **base,
        "LD_PRELOAD": _joined(str(library), base.get("LD_PRELOAD")),
        "LD_LIBRARY_PATH": _joined(str(library.parent), base.get("LD_LIBRARY_PATH")),
        "PYTHONPATH": _joined(str(_HERE.parent), base.get("PYTHONPATH")),
        "PRETENDED_CUDA_DEVICES": devices,
    }
    if not caching:
        found["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return found


def _joined(first: str, rest: str | None) -> str:
    return os.pathsep.join(filter(None, [first, rest]))


class Parameter(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint32), ("size", ctypes.c_uint32)]


class Description(ctypes.Structure):
    """What the machine code of a kernel says about it; see ``runtime/fake_cuda.h`` for this and the following."""

    _fields_ = [
        ("cubin", ctypes.c_char_p),
        ("cubin_bytes", ctypes.c_uint64),
        ("registers", ctypes.c_int32),
        ("static_shared", ctypes.c_int32),
        ("local_bytes", ctypes.c_int32),
        ("max_threads", ctypes.c_int32),
        ("params_bytes", ctypes.c_uint32),
        ("parameters", ctypes.c_int32),
        ("parameter", Parameter * _MAX_PARAMETERS),
    ]


class Launch(ctypes.Structure):
    """``LaunchRecord``; the driver of tests/virtual_gpu hands over the same."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("cubin", ctypes.c_void_p),
        ("cubin_bytes", ctypes.c_uint64),
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
    """What the process has done since it started."""

    _fields_ = [
        ("launches", ctypes.c_uint64),
        ("launches_with_gil", ctypes.c_uint64),
        ("synchronisations", ctypes.c_uint64),
        ("allocations", ctypes.c_uint64),
        ("attributes_set", ctypes.c_uint64),
    ]


DESCRIBE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(Description))
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch))


@functools.cache
def loaded() -> Any:
    """The runtime of this process, which it must have been started with."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "fake_cuda_counts"):
        raise RuntimeError("this process has no fake CUDA runtime: start it with process_environment()")
    library.fake_cuda_on_describe.argtypes = [DESCRIBE]
    library.fake_cuda_on_launch.argtypes = [LAUNCH]
    library.fake_cuda_counts.restype = Counts
    library.fake_cuda_allocations.argtypes = [ctypes.POINTER(Allocation), ctypes.c_uint64]
    library.fake_cuda_allocations.restype = ctypes.c_uint64
    library.fake_cuda_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    return library


def allocations(device: int) -> list[tuple[int, int]]:
    """Address and size of all memory that a kernel on a device may touch."""
    room = 1024
    while True:
        found = (Allocation * room)()
        count = int(loaded().fake_cuda_allocations(found, room))
        if count <= room:
            return [(a.address, a.size) for a in found[:count] if a.device in (device, -1)]
        room = 2 * count
