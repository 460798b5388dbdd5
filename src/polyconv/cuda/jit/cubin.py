"""Resource usage of a cubin, read from its ELF sections without CUDA tools or driver.

The numbers that ``ptxas -v`` and ``cuobjdump -res-usage`` print, so that tests can enforce a register budget and the
planner can compute occupancy. Checked against both for sm_70, 80, 90, 100 and 120. From sm_90 on the register count is
only in ``.nv.info`` (older cubins repeat it in the section header), and the size of static shared memory includes 1 KiB
reserved by the system; from sm_100 on the architecture is elsewhere in ``e_flags``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

_MACHINE_CUDA = 190
_ABI_BLACKWELL = 8
_RESERVED_SHARED = 1024
_SHT_SYMTAB = 2

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")

# Attributes in .nv.info, named as cuobjdump prints them.
_MAX_THREADS = 0x05
_FRAME_SIZE = 0x11
_KPARAM_INFO = 0x17
_CBANK_PARAM_SIZE = 0x19
_REGCOUNT = 0x2F

# Formats of an attribute: no value, a byte, a half word, or a counted payload.
_FORMAT_HALF = 3
_FORMAT_PAYLOAD = 4


class CubinError(ValueError):
    """The bytes are not a readable cubin."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One by-value parameter of a kernel."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """Resources of one kernel."""

    name: str
    arch: str
    registers: int = 0
    """Per thread."""
    static_shared: int = 0
    """Bytes per block, without dynamic shared memory and without the system's reserve."""
    stack: int = 0
    """Local memory per thread [bytes]. Our kernels index no local arrays, so all of it is spilled registers."""
    params_bytes: int = 0
    parameters: tuple[Parameter, ...] = ()
    max_threads: int = 1024
    """Threads per block that the launch bounds allow."""

    def __str__(self) -> str:
        spills = f"{self.stack} B spilled" if self.stack else "no spills"
        return (
            f"{self.name} ({self.arch}): {self.registers} registers, {spills}, {self.static_shared} B static shared, "
            f"{self.params_bytes} B parameters, up to {self.max_threads} threads"
        )


class _Section(NamedTuple):
    name: str
    kind: int
    size: int
    data: bytes
    link: int


def is_cubin(code: bytes) -> bool:
    """Whether ``code`` is machine code and not PTX."""
    return code[:4] == b"\x7fELF"


def kernel_info(cubin: bytes, name: str | None = None) -> KernelInfo:
    """Resources of the named kernel, or of the only one."""
    kernels = read_cubin(cubin)
    if name is None:
        if len(kernels) != 1:
            raise CubinError(f"the cubin holds {len(kernels)} kernels ({', '.join(kernels)}): say which one")
        return next(iter(kernels.values()))
    if name not in kernels:
        raise CubinError(f"the cubin holds no kernel {name!r}, only {', '.join(kernels) or 'none'}")
    return kernels[name]


def read_cubin(cubin: bytes) -> dict[str, KernelInfo]:
    """Resources of every kernel in the cubin, by name."""
    try:
        return _read(cubin)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CubinError(f"the cubin is truncated or damaged: {error}") from error


def _read(cubin: bytes) -> dict[str, KernelInfo]:
    if not is_cubin(cubin) or struct.unpack_from("<H", cubin, 18)[0] != _MACHINE_CUDA:
        raise CubinError("not a cubin: no ELF file for the NVIDIA architecture")
    arch = f"sm_{_arch_number(cubin)}"
    sections = _sections(cubin)
    by_name = {section.name: section for section in sections}
    reserved = _RESERVED_SHARED if ".nv.shared.reserved.0" in by_name else 0

    kernels: dict[str, dict[str, Any]] = {}
    for section in sections:
        if not section.name.startswith(".nv.info."):
            continue
        name = section.name.removeprefix(".nv.info.")
        shared = by_name.get(f".nv.shared.{name}")
        kernels[name] = {"static_shared": shared.size - reserved if shared else 0, **_own_attributes(section.data)}

    for attribute, form, payload in _attributes(by_name[".nv.info"].data if ".nv.info" in by_name else b""):
        if form != _FORMAT_PAYLOAD or attribute not in (_REGCOUNT, _FRAME_SIZE):
            continue
        symbol, value = struct.unpack_from("<II", payload)
        name = _symbol(sections, symbol)
        if name in kernels:
            kernels[name]["registers" if attribute == _REGCOUNT else "stack"] = value
    return {name: KernelInfo(name, arch, **found) for name, found in kernels.items()}


def _arch_number(cubin: bytes) -> int:
    flags: int = struct.unpack_from("<I", cubin, 48)[0]
    return (flags >> 8) & 0xFF if cubin[8] >= _ABI_BLACKWELL else flags & 0xFF


def _own_attributes(data: bytes) -> dict[str, Any]:
    """Members of :class:`KernelInfo` that a kernel's own ``.nv.info.<name>`` section has."""
    parameters: dict[int, Parameter] = {}
    found: dict[str, Any] = {}
    for attribute, form, payload in _attributes(data):
        if attribute == _CBANK_PARAM_SIZE and form == _FORMAT_HALF:
            (found["params_bytes"],) = struct.unpack("<H", payload)
        elif attribute == _MAX_THREADS:
            x, y, z = struct.unpack_from("<III", payload)
            found["max_threads"] = x * y * z
        elif attribute == _KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack_from("<IHHI", payload)
            parameters[ordinal] = Parameter(offset, packed >> 18)
    return {**found, "parameters": tuple(parameters[ordinal] for ordinal in sorted(parameters))}


def _attributes(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Attribute, format and payload of each record of an ``.nv.info`` section."""
    at = 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        payload = data[at + 4 : at + 4 + value] if form == _FORMAT_PAYLOAD else data[at + 2 : at + 4]
        at += 4 + (value if form == _FORMAT_PAYLOAD else 0)
        yield attribute, form, payload


def _sections(cubin: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    count, names_index = struct.unpack_from("<HH", cubin, 60)
    headers = [_SECTION.unpack_from(cubin, table + index * _SECTION.size) for index in range(count)]
    names = cubin[headers[names_index][4] :]
    sections = []
    for name, kind, _, _, offset, size, link, *_ in headers:
        sections.append(_Section(_string(names, name), kind, size, cubin[offset : offset + size], link))
    return sections


def _symbol(sections: list[_Section], index: int) -> str:
    """Name of a symbol: ``.nv.info`` refers to kernels by symbol index."""
    table = next((section for section in sections if section.kind == _SHT_SYMTAB), None)
    if table is None:
        raise CubinError("the cubin has no table of symbols")
    (name, *_) = _SYMBOL.unpack_from(table.data, index * _SYMBOL.size)
    return _string(sections[table.link].data, name)


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
