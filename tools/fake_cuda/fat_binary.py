"""Fat binaries: what nvcc puts into an object file, machine code for several architectures side by side.

NVIDIA publishes no description. This one is of what CUDA 11.7 to 12.6 write: a header, then entries, each with a header
of its own that says architecture and sizes, the machine code compressed as an LZ4 block.
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
_ELF = b"\x7fELF"
_ELF_TABLES = struct.Struct("<32xQQ6xHHHH")  # where its two tables lie; bytes and number of the rows of each
_LZ4, _OTHER_COMPRESSION = 0x2000, 0x8000


class FatBinaryError(ValueError):
    """There is no machine code for the architecture, or it is packed in a way that is not known here."""


@cache
def machine_code(address: int, arch: int) -> bytes:
    """The cubin for an architecture (70 is 7.0) in the fat binary at an address of this process.

    A cubin by itself, which is what a driver is given to load, is that cubin.
    """
    if ctypes.string_at(address, len(_ELF)) == _ELF:
        return ctypes.string_at(address, _cubin_bytes(ctypes.string_at(address, _ELF_TABLES.size)))
    magic, _version, header_bytes, entries_bytes = _HEADER.unpack(ctypes.string_at(address, _HEADER.size))
    if magic != _MAGIC:
        raise FatBinaryError(f"no fat binary at 0x{address:x}: it starts with 0x{magic:x}, not 0x{_MAGIC:x}")
    return find_machine_code(ctypes.string_at(address + header_bytes, entries_bytes), arch)


def _cubin_bytes(header: bytes) -> int:
    """A cubin ends with one of its two tables."""
    segments_at, sections_at, segment_bytes, segments, section_bytes, sections = _ELF_TABLES.unpack(header)
    return max(int(segments_at + segment_bytes * segments), int(sections_at + section_bytes * sections))


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
    """What an LZ4 block holds, as far as there is room for it. In C: machine code of PyTorch's has some megabytes."""
    out = ctypes.create_string_buffer(room)
    written = int(_lz4().unpack_lz4(packed, len(packed), out, room))
    return out.raw[:written]


@cache
def _lz4() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build("liblz4_block.so", [Path(__file__).resolve().parent / "lz4" / "lz4.c"])))
    library.unpack_lz4.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64]
    library.unpack_lz4.restype = ctypes.c_uint64
    return library
