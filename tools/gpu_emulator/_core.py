"""Builds the C++ core on first use and binds it with ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from . import toolchain

_SOURCES = Path(__file__).parent / "core"
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # FMUL and FADD round twice; only FFMA is fused
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
)


def _flags() -> tuple[str, ...]:
    """With $GPU_EMULATOR_SANITIZE (address,undefined or thread) the core reports its mistakes (csrc/sanitize.py)."""
    sanitizers = os.environ.get("GPU_EMULATOR_SANITIZE")
    if not sanitizers:
        return _FLAGS
    return (*_FLAGS, "-O1", "-g1", "-fno-omit-frame-pointer", "-D_GLIBCXX_ASSERTIONS", f"-fsanitize={sanitizers}")


class Bank(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int32), ("data", ctypes.c_char_p), ("size", ctypes.c_uint64)]


class Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("size", ctypes.c_uint64), ("origin", ctypes.c_uint64)]


class Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("local_bytes", ctypes.c_uint32),
        ("registers", ctypes.c_uint32),
        ("banks", ctypes.POINTER(Bank)),
        ("bank_count", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(Range)),
        ("buffer_count", ctypes.c_uint64),
        ("blocks", ctypes.POINTER(ctypes.c_uint32)),
        ("block_count", ctypes.c_uint64),
        ("check_races", ctypes.c_int32),
        ("check_global", ctypes.c_int32),
        ("max_instructions", ctypes.c_uint64),
        ("trace_path", ctypes.c_char_p),
        ("trace_name", ctypes.c_char_p),
        ("trace_id", ctypes.c_int32),
        ("trace_limit", ctypes.c_uint64),
    ]


class Counters(ctypes.Structure):
    """Of one instruction; see core/machine.h."""

    _fields_ = [
        ("issued", ctypes.c_uint64),
        ("skipped", ctypes.c_uint64),
        ("lanes", ctypes.c_uint64),
        ("requests", ctypes.c_uint64),
        ("lines", ctypes.c_uint64),
        ("ideal", ctypes.c_uint64),
        ("sectors", ctypes.c_uint64),
        ("shared_requests", ctypes.c_uint64),
        ("shared_wavefronts", ctypes.c_uint64),
        ("shared_ideal", ctypes.c_uint64),
    ]


class Result(ctypes.Structure):
    _fields_ = [
        ("counters", ctypes.POINTER(Counters)),
        ("blocks_run", ctypes.c_uint64),
        ("unique_read_sectors", ctypes.c_uint64),
        ("block_unique_read_sectors", ctypes.c_uint64),
        ("unique_written_sectors", ctypes.c_uint64),
        ("fault", ctypes.c_int32),
        ("fault_thread", ctypes.c_int32),
        ("fault_other_thread", ctypes.c_int32),
        ("fault_has_address", ctypes.c_int32),
        ("fault_pc", ctypes.c_uint32),
        ("fault_block", ctypes.c_uint32 * 3),
        ("fault_address", ctypes.c_uint64),
        ("message", ctypes.c_char * 1024),
    ]


def _cpu_identity() -> str:
    # -march=native: a cache shared between machines must not hand one the other's instructions.
    try:
        with open("/proc/cpuinfo") as info:
            return next(line for line in info if line.startswith("flags"))
    except (OSError, StopIteration):
        return ""


def _compiler() -> str:
    """$GPU_EMULATOR_CXX where $CXX is for something else: an extension that nvcc builds in the same process, say."""
    return os.environ.get("GPU_EMULATOR_CXX") or os.environ.get("CXX", "g++")


def _key(sources: list[Path]) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([_compiler(), "--version"], capture_output=True, text=True).stdout
    for part in (*_flags(), version, _cpu_identity()):
        digest.update(part.encode() + b"\0")
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _build(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:

        def compile_one(source: Path) -> str:
            unit = str(Path(scratch) / (source.stem + ".o"))
            command = [_compiler(), *_flags(), "-c", str(source), "-o", unit]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode != 0:
                raise toolchain.ToolchainError(f"{' '.join(command)}\n{result.stderr}")
            return unit

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            units = list(pool.map(compile_one, sorted(_SOURCES.glob("*.cpp"))))
        library = Path(scratch) / target.name
        command = [_compiler(), *_flags(), "-shared", "-o", str(library), *units]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            raise toolchain.ToolchainError(f"linking the emulator failed:\n{result.stderr}")
        os.replace(library, target)


def _bind(library: ctypes.CDLL) -> None:
    library.emulator_parse.argtypes = [ctypes.c_char_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_uint64]
    library.emulator_parse.restype = ctypes.c_void_p
    library.emulator_free.argtypes = [ctypes.c_void_p]
    library.emulator_free.restype = None
    library.emulator_instruction_count.argtypes = [ctypes.c_void_p]
    library.emulator_instruction_count.restype = ctypes.c_uint64
    for name in ("text", "mnemonic", "problem"):
        function = getattr(library, f"emulator_instruction_{name}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        function.restype = ctypes.c_char_p
    library.emulator_launch.argtypes = [ctypes.POINTER(Launch), ctypes.POINTER(Result)]
    library.emulator_launch.restype = ctypes.c_int
    sizes = (ctypes.c_uint64 * 3)()
    library.emulator_sizes(sizes)
    expected = [ctypes.sizeof(Launch), ctypes.sizeof(Result), ctypes.sizeof(Counters)]
    if list(sizes) != expected:
        raise toolchain.ToolchainError(f"structure layouts differ: {list(sizes)} in C++, {expected} in Python")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    sources = sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")])
    directory = toolchain.cache_dir() / "gpu_emulator"
    directory.mkdir(exist_ok=True)
    target = directory / f"libemulator-{_key(sources)}.so"
    if not target.exists():
        with toolchain.lock(directory / ".lock"):
            if not target.exists():
                _build(target)
    loaded = ctypes.CDLL(str(target))
    _bind(loaded)
    return loaded


class Program:
    """A decoded kernel inside the core."""

    def __init__(self, disassembly: str, arch: str) -> None:
        self._library = library()
        error = ctypes.create_string_buffer(1024)
        self.handle = self._library.emulator_parse(
            disassembly.encode(), int(arch.removeprefix("sm_")), error, len(error)
        )
        if not self.handle:
            raise toolchain.ToolchainError(f"disassembly not understood: {error.value.decode()}")
        count = self._library.emulator_instruction_count(self.handle)
        self.text = [self._library.emulator_instruction_text(self.handle, i).decode() for i in range(count)]
        self.mnemonics = [self._library.emulator_instruction_mnemonic(self.handle, i).decode() for i in range(count)]

    def unsupported(self) -> list[str]:
        """Instructions that cannot be executed; they fault only when reached."""
        problems = (self._library.emulator_instruction_problem(self.handle, i).decode() for i in range(len(self.text)))
        return [p for p in problems if p]

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.emulator_free(self.handle)
