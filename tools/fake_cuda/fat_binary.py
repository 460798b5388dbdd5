"""Fat binaries, which nvcc puts into object files: machine code for several architectures.

The format is undocumented; this is how CUDA 11.7 to 12.6 write it: a header, then entries, each with a header that
gives architecture and sizes, and machine code compressed as an LZ4 block.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path

from .building import build

_MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all entries
_ENTRY = struct.Struct(
    "<HHIQIIHHI"
)  # kind, version, header bytes, payload bytes, compressed bytes, -, minor, major, arch
_FLAGS_AT, _UNPACKED_BYTES_AT = 40, 56
_MACHINE_CODE = 2
_LZ4, _OTHER_COMPRESSION = 0x2000, 0x8000


class FatBinaryError(ValueError):
    """There is no machine code for the architecture, or it is compressed in an unknown way."""


@cache
def machine_code(address: int, arch: int) -> bytes:
    """The cubin for an architecture (70 is 7.0) in the fat binary at an address of this process."""
    magic, _version, header_bytes, entries_bytes = _HEADER.unpack(ctypes.string_at(address, _HEADER.size))
    if magic != _MAGIC:
        raise FatBinaryError(f"no fat binary at 0x{address:x}: it starts with 0x{magic:x}, not 0x{_MAGIC:x}")
    return find_machine_code(ctypes.string_at(address + header_bytes, entries_bytes), arch)


def find_machine_code(entries: bytes, arch: int) -> bytes:
    """The cubin for an architecture among the entries of a fat binary."""
    found = []
    at = 0
    while at < len(entries):
        kind, _, header_bytes, payload_bytes, packed_bytes, _, _, _, of_arch = _ENTRY.unpack_from(entries, at)
        if kind == _MACHINE_CODE:
            found.append(of_arch)
            if of_arch == arch:
                (flags,) = struct.unpack_from("<Q", entries, at + _FLAGS_AT)
                (unpacked_bytes,) = struct.unpack_from("<Q", entries, at + _UNPACKED_BYTES_AT)
                payload = entries[at + header_bytes : at + header_bytes + payload_bytes]
                return _unpacked(payload, flags, packed_bytes, unpacked_bytes)
        at += header_bytes + payload_bytes
    there = ", ".join(f"sm_{a}" for a in found) or "none"
    raise FatBinaryError(f"no machine code for sm_{arch} (there is {there}): set TORCH_CUDA_ARCH_LIST to {arch / 10}")


def _unpacked(payload: bytes, flags: int, packed_bytes: int, unpacked_bytes: int) -> bytes:
    if flags & _OTHER_COMPRESSION:
        raise FatBinaryError("the machine code is not packed as LZ4: build with nvcc -Xfatbin --compress-mode=speed")
    if not flags & _LZ4:
        return payload
    code = unpack_lz4(payload[:packed_bytes], unpacked_bytes)
    if len(code) != unpacked_bytes:
        raise FatBinaryError(f"{len(code)} bytes of machine code where {unpacked_bytes} were promised")
    return code


def unpack_lz4(packed: bytes, room: int) -> bytes:
    """Decompress at most ``room`` bytes of an LZ4 block. In C, as PyTorch's machine code has some megabytes."""
    out = ctypes.create_string_buffer(room)
    written = int(_lz4().unpack_lz4(packed, len(packed), out, room))
    return out.raw[:written]


@cache
def _lz4() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build("liblz4_block.so", [Path(__file__).resolve().parent / "lz4" / "lz4.c"])))
    library.unpack_lz4.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64]
    library.unpack_lz4.restype = ctypes.c_uint64
    return library
