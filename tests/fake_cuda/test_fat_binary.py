"""Parsing fat binaries. Executing them is tested by `.ci/check_exported_model`, with a CUDA build of PyTorch."""

from __future__ import annotations

import ctypes
import struct

import pytest

from fake_cuda import fat_binary


def entry(arch: int, payload: bytes, *, kind: int = 2, flags: int = 0, unpacked: int = 0) -> bytes:
    """One entry: a 64-byte header and a payload padded to eight bytes."""
    padded = payload.ljust(-(-len(payload) // 8) * 8, b"\0")
    head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(padded), len(payload), 0, 0, 1, arch)
    return head.ljust(40, b"\0") + struct.pack("<QQQ", flags, 0, unpacked) + padded


def test_the_architecture_is_found() -> None:
    entries = entry(80, b"eighties") + entry(70, b"text", kind=1) + entry(70, b"seventy!") + entry(75, b"7five   ")
    assert fat_binary.find_machine_code(entries, 70) == b"seventy!"
    with pytest.raises(
        fat_binary.FatBinaryError, match=r"sm_61 \(there is sm_80, sm_70, sm_75\).*TORCH_CUDA_ARCH_LIST"
    ):
        fat_binary.find_machine_code(entries, 61)


def test_from_memory() -> None:
    entries = entry(70, b"machine ")
    memory = ctypes.create_string_buffer(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries)
    assert fat_binary.machine_code(ctypes.addressof(memory), 70) == b"machine "
    with pytest.raises(fat_binary.FatBinaryError, match="no fat binary"):
        fat_binary.machine_code(ctypes.addressof(memory) + 16, 70)


@pytest.mark.parametrize(
    ("packed", "expected"),
    [
        (b"\x50hello", b"hello"),
        (b"\x30abc\x03\x00\x00", b"abcabca"),  # an overlapping copy of four
        (b"\x40abcd\x04\x00\x20xy", b"abcdabcdxy"),
        (b"\x1fa\x01\x00\xff\x00\x00", b"a" + b"a" * (15 + 255 + 4)),  # lengths of more than one byte
        (b"\xf0\x05" + bytes(range(20)), bytes(range(20))),
    ],
)
def test_lz4(packed: bytes, expected: bytes) -> None:
    assert fat_binary.unpack_lz4(packed, len(expected)) == expected
    code = entry(70, packed, flags=0x2000, unpacked=len(expected))
    assert fat_binary.find_machine_code(code, 70) == expected


@pytest.mark.parametrize(
    "packed",
    [
        b"\x50hell",  # fewer literals than declared
        b"\x30abc\x04\x00\x00",  # a copy from before the start
        b"\x30abc\x00\x00\x00",  # an offset of zero
        b"\xf0\xff",  # an unterminated length
    ],
)
def test_a_damaged_block_is_cut_short(packed: bytes) -> None:
    assert len(fat_binary.unpack_lz4(packed, 100)) <= 5


def test_what_does_not_fit_is_left_out() -> None:
    assert fat_binary.unpack_lz4(b"\x30abc\x03\x00\x20xy", 4) == b"abc"


def test_what_cannot_be_read_says_so() -> None:
    with pytest.raises(fat_binary.FatBinaryError, match="5 bytes of machine code where 6 were promised"):
        fat_binary.find_machine_code(entry(70, b"\x50hello", flags=0x2000, unpacked=6), 70)
    with pytest.raises(fat_binary.FatBinaryError, match="not packed as LZ4"):
        fat_binary.find_machine_code(entry(70, b"\x50hello", flags=0x8000, unpacked=5), 70)
