"""Launching a kernel: arguments in, memory changed, a report out."""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core, elf, toolchain
from .chips import REGISTERS_PER_SM, THREADS_PER_BLOCK
from .faults import BY_NUMBER, Fault, LaunchError
from .report import Report

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named in Python only from 3.12 on
_PARAM_BASE = 0x160
_SHARED_WINDOW = 0x00F0000000000000  # as in core/machine.h
_LOCAL_WINDOW = 0x00F1000000000000
_STACK_SLACK = 1024  # CUDA's default stack, for callees that the compiler did not account for
_DEFAULT_SHARED_LIMIT = 48 * 1024
_GRID_LIMIT = (2**31 - 1, 65535, 65535)
_BLOCK_LIMIT = (1024, 1024, 64)

Dim = int | Sequence[int]
BlockId = tuple[int, int, int]


def i32(value: int) -> ctypes.c_int32:
    return ctypes.c_int32(_in_range(value, -(2**31), 2**31 - 1))


def u32(value: int) -> ctypes.c_uint32:
    return ctypes.c_uint32(_in_range(value, 0, 2**32 - 1))


def i64(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(_in_range(value, -(2**63), 2**63 - 1))


def u64(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(_in_range(value, 0, 2**64 - 1))


def f32(value: float) -> ctypes.c_float:
    return ctypes.c_float(value)


def f64(value: float) -> ctypes.c_double:
    return ctypes.c_double(value)


def _in_range(value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise OverflowError(f"{value} does not fit the parameter's type")
    return int(value)


def sparse(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """A zero array that takes memory only where it is touched: for tensors of many gigabytes.

    Never scan it whole. Its start is page-aligned, as a CUDA allocation's is.
    """
    kind = np.dtype(dtype)
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    size = math.prod(extents) * kind.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, max(size, 1), flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(memory, dtype=kind, count=math.prod(extents)).reshape(extents)


@dataclass(frozen=True)
class Buffer:
    """A range of memory that the kernel may touch. `origin`: the start of the allocation it is part of."""

    address: int
    size: int
    origin: int


def _numpy_buffer(array: npt.NDArray[Any]) -> Buffer:
    low = high = array.ctypes.data
    if array.size:
        for extent, stride in zip(array.shape, array.strides, strict=True):
            span = (extent - 1) * stride
            low, high = low + min(span, 0), high + max(span, 0)
        high += array.itemsize
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return Buffer(low, high - low, owner.ctypes.data)


def _is_tensor(value: object) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "untyped_storage")


def buffer_of(value: Any) -> Buffer:
    """The memory behind a numpy array (its own extent) or a CPU tensor (its whole storage)."""
    if isinstance(value, Buffer):
        return value
    if isinstance(value, np.ndarray):
        return _numpy_buffer(value)
    if _is_tensor(value):
        if value.device.type != "cpu":
            raise LaunchError(f"a tensor on {value.device} cannot be reached; only CPU tensors are device memory here")
        storage = value.untyped_storage()
        return Buffer(storage.data_ptr(), storage.nbytes(), storage.data_ptr())
    if isinstance(value, tuple) and len(value) == 2:
        address, size = value
        return Buffer(int(address), int(size), int(address))
    raise LaunchError(f"not a buffer: {type(value).__name__}")


def _encode(value: Any, what: str) -> tuple[bytes, Buffer | None]:
    """One argument's bytes, and the buffer behind it if it is a pointer."""
    if isinstance(value, np.ndarray):
        return struct.pack("<Q", value.ctypes.data), buffer_of(value)
    if _is_tensor(value):
        return struct.pack("<Q", value.data_ptr()), buffer_of(value)
    if isinstance(value, np.generic):
        return value.tobytes(), None
    if isinstance(value, ctypes._SimpleCData | ctypes.Structure | ctypes.Array):
        return bytes(value), None
    if isinstance(value, (bytes, bytearray)):
        return bytes(value), None
    if value is None:
        return struct.pack("<Q", 0), None
    hint = " (wrap it: gpu_emulator.i32, i64, f32 ...)" if isinstance(value, (bool, int, float)) else ""
    raise LaunchError(f"{what}: cannot pass a {type(value).__name__}{hint}")


def _pack(kernel: elf.KernelInfo, args: Sequence[Any]) -> tuple[bytes, list[Buffer]]:
    if len(args) != len(kernel.parameters):
        raise LaunchError(f"kernel {kernel.name} takes {len(kernel.parameters)} parameters, {len(args)} were given")
    block = bytearray(kernel.param_bytes)
    buffers = []
    for parameter, value in zip(kernel.parameters, args, strict=True):
        what = f"parameter {parameter.index} of {kernel.name}"
        data, buffer = _encode(value, what)
        if len(data) != parameter.size:
            raise LaunchError(f"{what} takes {parameter.size} bytes, {len(data)} were given ({type(value).__name__})")
        block[parameter.offset : parameter.offset + parameter.size] = data
        if buffer is not None:
            buffers.append(buffer)
    return bytes(block), buffers


def _dim(value: Dim, what: str) -> tuple[int, int, int]:
    extents = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    if not 1 <= len(extents) <= 3:
        raise LaunchError(f"{what} has {len(extents)} dimensions")
    x, y, z = (*extents, 1, 1, 1)[:3]
    return x, y, z


def _check_limits(
    kernel: elf.KernelInfo,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    dynamic_shared: int,
    max_dynamic_shared: int | None,
) -> None:
    for what, dim, limits in (("grid", grid, _GRID_LIMIT), ("block", block, _BLOCK_LIMIT)):
        for axis, extent, limit in zip("xyz", dim, limits, strict=True):
            if not 1 <= extent <= limit:
                raise LaunchError(f"{what}.{axis} is {extent}: a GPU takes 1 to {limit}")
    threads, chip = math.prod(block), kernel.chip
    most = min(THREADS_PER_BLOCK, kernel.max_threads)
    if threads > most:
        raise LaunchError(f"{threads} threads per block: {kernel.name} takes at most {most}")
    if chip.blocks_per_sm(kernel.registers, threads, 0) == 0:
        raise LaunchError(f"{kernel.registers} registers for each of {threads} threads: an SM has {REGISTERS_PER_SM}")
    total = kernel.static_shared + dynamic_shared
    if total > chip.shared_per_block:
        raise LaunchError(f"{total} bytes of shared memory per block: the {chip.name} has {chip.shared_per_block}")
    opted_in = max_dynamic_shared is not None and max_dynamic_shared >= dynamic_shared
    if total > _DEFAULT_SHARED_LIMIT and not opted_in:
        raise LaunchError(
            f"{total} bytes of shared memory per block need the opt-in attribute "
            f"(max_dynamic_shared >= {dynamic_shared}; it is {max_dynamic_shared})"
        )


@lru_cache(maxsize=64)
def _program(code: bytes, arch: str, patches: tuple[tuple[int, int], ...] = ()) -> _core.Program:
    """Decoded code. `patches`: (pc, immediate), for addresses that are known only now."""
    text = toolchain.disassemble(code, arch)
    for pc, value in patches:
        text, count = re.subn(rf"(/\*{pc:04x}\*/[^;\n]*, )0x[0-9a-f]+ ;", rf"\g<1>0x{value:x} ;", text)
        if count != 1:
            raise elf.CubinError(f"no immediate to relocate at 0x{pc:04x}")
    return _core.Program(text, arch)


class _Module:
    """The global variables of one cubin: they live as long as the device does."""

    def __init__(self, cubin: elf.Cubin) -> None:
        self.memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._addresses: dict[str, int] = {}
        for index, section in enumerate(cubin.sections):
            if section.name in (".nv.global", ".nv.global.init") and section.size:
                array = sparse(section.size, np.uint8)
                if section.data:
                    array[:] = np.frombuffer(section.data, np.uint8)
                self.memory[index] = array
        for symbol in cubin.symbols:
            if symbol.section in self.memory:
                self._addresses[symbol.name] = self.memory[symbol.section].ctypes.data + symbol.value
        for index, array in self.memory.items():
            data = array.tobytes()
            array[:] = np.frombuffer(self.relocated(cubin, cubin.sections[index].name, data), np.uint8)

    def relocated(self, cubin: elf.Cubin, section: str, data: bytes) -> bytes:
        out = bytearray(data)
        for r in cubin.relocations(section):
            if r.symbol.name not in self._addresses:
                continue  # a function's address: offsets within the code are already in place
            address = self._addresses[r.symbol.name] + r.addend
            if r.kind != elf.R_CUDA_64:
                raise elf.CubinError(f"relocation of kind {r.kind} in {section} is not supported")
            struct.pack_into("<Q", out, r.offset, address + struct.unpack_from("<Q", out, r.offset)[0])
        return bytes(out)

    def patches(self, kernel: elf.KernelInfo) -> tuple[tuple[int, int], ...]:
        """Immediates of the code that must be replaced: (pc, value)."""
        out = []
        for r in kernel.references:
            if r.symbol.name not in self._addresses:
                raise elf.CubinError(f"{kernel.name!r} refers to {r.symbol.name!r}, which the cubin does not define")
            address = self._addresses[r.symbol.name] + r.addend
            out.append((r.offset, (address >> 32 if r.kind == elf.R_CUDA_ABS32_HI_32 else address) & 0xFFFFFFFF))
        return tuple(out)

    def symbol(self, name: str) -> int:
        return self._addresses[name]


class Device:
    """Memory that outlives a launch: the global variables of the cubins run on it, and the launch count.

    Buffers need no allocation: host memory is device memory.
    """

    def __init__(self) -> None:
        self._modules: dict[str, _Module] = {}
        self.launches = 0
        self._traced: dict[Path, int] = {}

    def _module(self, image: bytes) -> _Module:
        key = hashlib.sha256(image).hexdigest()
        if key not in self._modules:
            self._modules[key] = _Module(elf.load(image))
        return self._modules[key]

    def symbol_address(self, cubin: bytes, name: str) -> int:
        """Address of a ``__device__`` variable."""
        return self._module(cubin).symbol(name)

    def run(
        self,
        cubin: bytes,
        name: str,
        grid: Dim,
        block: Dim,
        args: Sequence[Any] | bytes,
        *,
        shared: int = 0,
        blocks: Iterable[Sequence[int]] | None = None,
        max_dynamic_shared: int | None = None,
        trace: str | Path | None = None,
        trace_limit: int = 0,
        extra_buffers: Iterable[Any] = (),
        check: bool = True,
        check_global: bool = False,
        max_instructions: int = 0,
    ) -> Report:
        """Runs a launch; see :func:`run`."""
        kernel = elf.load(cubin).kernel(name)
        if isinstance(args, (bytes, bytearray)):
            if len(args) != kernel.param_bytes:
                raise LaunchError(f"{name} takes {kernel.param_bytes} bytes of parameters, {len(args)} were given")
            params, buffers = bytes(args), list[Buffer]()
        else:
            params, buffers = _pack(kernel, args)
        buffers += [buffer_of(b) for b in extra_buffers]
        grid3, block3 = _dim(grid, "grid"), _dim(block, "block")
        _check_limits(kernel, grid3, block3, shared, max_dynamic_shared)
        chosen = None if blocks is None else [_dim(tuple(b), "block coordinate") for b in _coordinates(blocks, grid3)]
        return self._launch(
            cubin,
            kernel,
            grid3,
            block3,
            params,
            buffers,
            shared,
            chosen,
            None if trace is None else Path(trace),
            trace_limit,
            check,
            check_global,
            max_instructions,
        )

    def _launch(
        self,
        image: bytes,
        kernel: elf.KernelInfo,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: bytes,
        buffers: list[Buffer],
        dynamic_shared: int,
        blocks: list[tuple[int, int, int]] | None,
        trace: Path | None,
        trace_limit: int,
        check: bool,
        check_global: bool,
        max_instructions: int,
    ) -> Report:
        cubin, module = elf.load(image), self._module(image)
        program = _program(kernel.code, kernel.chip.arch, module.patches(kernel))
        stack = -(-(kernel.stack_bytes + _STACK_SLACK) // 16) * 16
        bank0 = struct.pack("<6I2Q2I", *block, *grid, _SHARED_WINDOW, _LOCAL_WINDOW, stack, 0)
        bank0 = bank0.ljust(_PARAM_BASE, b"\0") + params
        banks = {0: bank0}
        for number, data in kernel.constants.items():
            banks[number] = data
            for section in (f".nv.constant{number}", f".nv.constant{number}.{kernel.name}"):
                if cubin.section(section) is not None:
                    banks[number] = module.relocated(cubin, section, data)
        buffers = buffers + [buffer_of(array) for array in module.memory.values()]

        launch = _core.Launch(
            kernel=program.handle,
            grid=grid,
            block=block,
            shared_bytes=kernel.static_shared + dynamic_shared,
            local_bytes=stack,
            registers=kernel.registers,
            check_races=check,
            check_global=check_global,
            max_instructions=max_instructions,
        )
        bank_array = (_core.Bank * len(banks))(*(_core.Bank(n, d, len(d)) for n, d in banks.items()))
        launch.banks, launch.bank_count = bank_array, len(banks)
        ranges = (_core.Range * max(len(buffers), 1))(*(_core.Range(b.address, b.size, b.origin) for b in buffers))
        launch.buffers, launch.buffer_count = ranges, len(buffers)
        if blocks is not None:
            coordinates = (ctypes.c_uint32 * max(3 * len(blocks), 1))(*(c for b in blocks for c in b))
            launch.blocks, launch.block_count = coordinates, len(blocks)
        if trace is not None:
            self._open_trace(launch, kernel.name, trace, buffers)
            launch.trace_limit = trace_limit

        counters = (_core.Counters * len(program.text))()
        result = _core.Result(counters=counters)
        self.launches += 1
        if _core.library().emulator_launch(ctypes.byref(launch), ctypes.byref(result)) != 0:
            raise RuntimeError(f"the emulator failed: {result.message.decode()}")
        if result.fault:
            raise _fault(result, kernel, program, block)
        return Report.from_counters(
            kernel=kernel.name,
            chip=kernel.chip,
            grid=grid,
            block=block,
            blocks_run=result.blocks_run,
            registers=kernel.registers,
            shared_bytes=kernel.static_shared + dynamic_shared,
            frame_bytes=kernel.frame_bytes,
            text=program.text,
            mnemonics=program.mnemonics,
            counters=np.frombuffer(bytes(counters), np.uint64).reshape(-1, len(_core.Counters._fields_)),
            unique_read_sectors=result.unique_read_sectors,
            block_unique_read_sectors=result.block_unique_read_sectors,
            unique_written_sectors=result.unique_written_sectors,
        )

    def _open_trace(self, launch: _core.Launch, name: str, directory: Path, buffers: list[Buffer]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        listing = directory / "kernelslist.g"
        if not listing.exists():  # the directory was cleared, or is new
            self._traced.pop(directory, None)
        index = self._traced[directory] = self._traced.get(directory, 0) + 1
        launch.trace_path = str(directory / f"kernel-{index}.traceg").encode()
        launch.trace_name, launch.trace_id = name.encode(), index
        copied = dict.fromkeys(f"MemcpyHtoD,0x{b.address:016x},{b.size}" for b in buffers)
        before = listing.read_text().splitlines() if index > 1 else []
        new = [*(line for line in copied if line not in before), f"kernel-{index}.traceg"]
        listing.write_text("".join(f"{line}\n" for line in (*before, *new)))


def _coordinates(blocks: Iterable[Sequence[int]], grid: tuple[int, int, int]) -> Iterable[Sequence[int]]:
    for b in blocks:
        if len(b) != 3 or not all(0 <= c < g for c, g in zip(b, grid, strict=True)):
            raise LaunchError(f"block {tuple(b)} is not in the grid {grid}")
        yield b


def _fault(result: _core.Result, kernel: elf.KernelInfo, program: _core.Program, block: tuple[int, int, int]) -> Fault:
    thread = result.fault_thread if result.fault_thread >= 0 else None
    index = None
    if thread is not None:
        index = (thread % block[0], thread // block[0] % block[1], thread // (block[0] * block[1]))
    instruction = result.fault_pc // 16
    x, y, z = result.fault_block
    return BY_NUMBER[result.fault](
        message=result.message.decode(),
        kernel=kernel.name,
        block=(x, y, z),
        thread=thread,
        pc=result.fault_pc,
        sass=program.text[instruction] if instruction < len(program.text) else "(outside the kernel)",
        address=result.fault_address if result.fault_has_address else None,
        other_thread=result.fault_other_thread if result.fault_other_thread >= 0 else None,
        thread_index=index,
    )


_default = Device()


def run(
    cubin: bytes,
    name: str,
    grid: Dim,
    block: Dim,
    args: Sequence[Any] | bytes,
    *,
    shared: int = 0,
    blocks: Iterable[Sequence[int]] | None = None,
    max_dynamic_shared: int | None = None,
    trace: str | Path | None = None,
    trace_limit: int = 0,
    extra_buffers: Iterable[Any] = (),
    check: bool = True,
    check_global: bool = False,
    max_instructions: int = 0,
) -> Report:
    """Runs one kernel launch on the host's memory and reports what the chip that it is compiled for would spend.

    ``args``: numpy arrays and CPU tensors become pointers (and register their memory); scalars are wrapped
    (:func:`i32`, :func:`f32` ...), ctypes or numpy ones; structures are ctypes; or the whole parameter block as bytes.
    ``extra_buffers``: memory reached through pointers that are not arguments of their own.
    ``shared``: dynamic shared memory; ``max_dynamic_shared``: the opt-in attribute, needed above 48 KiB.
    ``blocks``: run only these (x, y, z). ``trace``: a directory for Accel-Sim traces;
    ``trace_limit``: cut each block's trace short after about so many instructions per warp (the block itself runs on).
    ``check``: races and uninitialised reads of shared memory. ``check_global``: also that no two threads store to
    one global word, and that no block loads what another has stored.
    Raises :class:`LaunchError` if a driver would refuse the launch, a :class:`Fault` if the kernel misbehaves.
    """
    return _default.run(
        cubin,
        name,
        grid,
        block,
        args,
        shared=shared,
        blocks=blocks,
        max_dynamic_shared=max_dynamic_shared,
        trace=trace,
        trace_limit=trace_limit,
        extra_buffers=extra_buffers,
        check=check,
        check_global=check_global,
        max_instructions=max_instructions,
    )


def run_raw(
    cubin: bytes,
    name: str,
    grid: Dim,
    block: Dim,
    params: bytes,
    buffers: Iterable[tuple[int, int]],
    shared: int = 0,
    *,
    max_dynamic_shared: int | None = None,
    check: bool = True,
    check_global: bool = False,
    device: Device | None = None,
) -> Report:
    """A launch as a driver sees it: the parameter block's bytes and the allocated ranges (address, size)."""
    return (device or _default).run(
        cubin,
        name,
        grid,
        block,
        bytes(params),
        shared=shared,
        max_dynamic_shared=max_dynamic_shared,
        extra_buffers=list(buffers),
        check=check,
        check_global=check_global,
    )
