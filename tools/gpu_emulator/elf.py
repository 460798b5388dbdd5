"""What a cubin says about its kernels: code, parameters, registers, memory. Pure ELF reading, no tool needed."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache

from .chips import CHIPS, Chip

# Attributes of .nv.info sections (format byte, attribute byte, then a 16-bit value or size).
_FORMAT_HALF = 3
_FORMAT_SIZED = 4
_ATTR_MAX_THREADS = 0x05
_ATTR_FRAME_SIZE = 0x11
_ATTR_MIN_STACK_SIZE = 0x12
_ATTR_KPARAM_INFO = 0x17
_ATTR_CBANK_PARAM_SIZE = 0x19
_ATTR_REGCOUNT = 0x2F

_SHT_NOBITS = 8
_SHT_REL = 9
_SHT_RELA = 4
_EM_CUDA = 190
_ABI_SHIFTED = 8
"""From this ELF ABI version on (cubins of CUDA 13, and of sm_100 before it) the flags hold the architecture higher."""
# Relocations: a 64-bit address in data; the lower or upper word of one as an instruction's 32-bit immediate.
R_CUDA_64 = 2
R_CUDA_ABS32_LO_32 = 56
R_CUDA_ABS32_HI_32 = 57


class CubinError(ValueError):
    """The bytes are not a cubin that this emulator can run, or hold no such kernel."""


@dataclass(frozen=True)
class Parameter:
    index: int
    offset: int  # from the start of the parameter block
    size: int


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    info: int
    link: int
    size: int
    data: bytes  # empty for NOBITS


@dataclass(frozen=True)
class Symbol:
    name: str
    section: int
    value: int
    size: int


@dataclass(frozen=True)
class Relocation:
    offset: int
    symbol: Symbol
    kind: int
    addend: int


@dataclass(frozen=True)
class KernelInfo:
    """Everything a launch needs to know about one kernel."""

    name: str
    chip: Chip
    code: bytes
    parameters: tuple[Parameter, ...]
    param_bytes: int
    registers: int
    static_shared: int
    frame_bytes: int  # local memory of the kernel itself: spills and indexed arrays
    stack_bytes: int  # including what it calls
    max_threads: int
    constants: dict[int, bytes] = field(repr=False)  # banks 2 and up, before relocation
    references: tuple[Relocation, ...]  # immediates in the code that hold parts of a variable's address


class Cubin:
    """A parsed cubin. Use :func:`load`, which remembers the last ones."""

    def __init__(self, image: bytes) -> None:
        if len(image) < 64 or image[:4] != b"\x7fELF":
            raise CubinError("not an ELF image: a cubin is expected (PTX and fatbins are not)")
        machine = struct.unpack_from("<H", image, 18)[0]
        flags = struct.unpack_from("<I", image, 48)[0]
        if machine != _EM_CUDA:
            raise CubinError(f"not a CUDA image (ELF machine {machine})")
        arch = f"sm_{flags >> 8 & 0xFF if image[8] >= _ABI_SHIFTED else flags & 0xFF}"
        if arch not in CHIPS:
            raise CubinError(f"compiled for {arch}; only {' and '.join(CHIPS)} can be executed")
        self.chip = CHIPS[arch]
        self.sections = _read_sections(image)
        self._by_name = {s.name: i for i, s in enumerate(self.sections)}
        self.symbols = self._read_symbols()
        self._registers: dict[str, int] = {}
        self._frames: dict[str, int] = {}
        self._stacks: dict[str, int] = {}
        self._read_global_info()
        self.kernel_names = tuple(s.name[9:] for s in self.sections if s.name.startswith(".nv.info."))

    def section(self, name: str) -> Section | None:
        index = self._by_name.get(name)
        return None if index is None else self.sections[index]

    def _read_symbols(self) -> list[Symbol]:
        table = self.section(".symtab")
        if table is None:
            return []
        strings = self.sections[table.link].data
        out = []
        for at in range(0, len(table.data) - 23, 24):
            name, _info, _other, section, value, size = struct.unpack_from("<IBBHQQ", table.data, at)
            out.append(Symbol(_c_string(strings, name), section, value, size))
        return out

    def _read_global_info(self) -> None:
        info = self.section(".nv.info")
        if info is None:
            return
        for attribute, data, _value in _attributes(info.data):
            target = {
                _ATTR_REGCOUNT: self._registers,
                _ATTR_FRAME_SIZE: self._frames,
                _ATTR_MIN_STACK_SIZE: self._stacks,
            }.get(attribute)
            if target is not None and len(data) >= 8:
                symbol, value = struct.unpack_from("<II", data)
                target[self.symbols[symbol].name] = value

    def relocations(self, section_name: str) -> list[Relocation]:
        out = []
        for prefix, kind, size in ((".rel", _SHT_REL, 16), (".rela", _SHT_RELA, 24)):
            section = self.section(prefix + section_name)
            if section is None or section.kind != kind:
                continue
            for at in range(0, len(section.data), size):
                offset, info = struct.unpack_from("<QQ", section.data, at)
                addend = struct.unpack_from("<q", section.data, at + 16)[0] if size == 24 else 0
                out.append(Relocation(offset, self.symbols[info >> 32], info & 0xFFFFFFFF, addend))
        return out

    def kernel(self, name: str) -> KernelInfo:
        text = self.section(f".text.{name}")
        info = self.section(f".nv.info.{name}")
        if text is None or info is None:
            raise CubinError(f"no kernel {name!r} in the cubin; it has {', '.join(self.kernel_names) or 'none'}")
        references = tuple(self.relocations(f".text.{name}"))
        for r in references:
            if r.kind not in (R_CUDA_ABS32_LO_32, R_CUDA_ABS32_HI_32):
                raise CubinError(f"kernel {name!r} refers to {r.symbol.name!r} (relocation {r.kind}): link it first")
        parameters: dict[int, Parameter] = {}
        param_bytes, max_threads = 0, 1024
        for attribute, data, value in _attributes(info.data):
            if attribute == _ATTR_CBANK_PARAM_SIZE:
                param_bytes = value
            elif attribute == _ATTR_KPARAM_INFO:
                _index, ordinal, offset, packed = struct.unpack_from("<IHHI", data)
                parameters[ordinal] = Parameter(ordinal, offset, packed >> 18)
            elif attribute == _ATTR_MAX_THREADS:
                x, y, z = struct.unpack_from("<III", data)
                max_threads = x * y * z
        shared = self.section(f".nv.shared.{name}")
        constants = {}
        for bank in range(1, 6):
            for suffix in ("", f".{name}"):
                section = self.section(f".nv.constant{bank}{suffix}")
                if section is not None:
                    constants[bank] = section.data
        frame = _known(self._frames.get(name, 0))
        return KernelInfo(
            name=name,
            chip=self.chip,
            code=text.data,
            parameters=tuple(parameters[i] for i in sorted(parameters)),
            param_bytes=param_bytes,
            registers=self._registers.get(name, text.info >> 24),
            static_shared=shared.size if shared else 0,
            frame_bytes=frame,
            stack_bytes=max(_known(self._stacks.get(name, 0)), frame),
            max_threads=max_threads,
            constants=constants,
            references=references,
        )


def _read_sections(image: bytes) -> list[Section]:
    table_at = struct.unpack_from("<Q", image, 40)[0]
    count, names_index = struct.unpack_from("<HH", image, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table_at + 64 * i) for i in range(count)]
    names = image[headers[names_index][4] :]
    out = []
    for name, kind, _flags, _address, offset, size, link, info, _align, _entry in headers:
        data = b"" if kind == _SHT_NOBITS else image[offset : offset + size]
        out.append(Section(_c_string(names, name), kind, info, link, size, data))
    return out


def _known(size: int) -> int:
    """Recursion has no bound that the compiler could state; it writes all ones."""
    return 0 if size == 0xFFFFFFFF else size


def _c_string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _attributes(data: bytes) -> list[tuple[int, bytes, int]]:
    """(attribute, payload, 16-bit value) of each entry."""
    out = []
    at = 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        payload = b""
        if form == _FORMAT_SIZED:
            payload = data[at : at + value]
            at += value
        out.append((attribute, payload, value if form == _FORMAT_HALF else 0))
    return out


@lru_cache(maxsize=64)
def load(image: bytes) -> Cubin:
    return Cubin(image)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of an SM."""

    chip: Chip = field(repr=False)
    registers: int
    static_shared: int
    frame_bytes: int  # local memory: spills and arrays indexed at run time
    stack_bytes: int
    max_threads: int
    param_bytes: int
    param_sizes: tuple[int, ...]

    def blocks_per_sm(self, threads: int, dynamic_shared: int = 0) -> int:
        return self.chip.blocks_per_sm(self.registers, threads, self.static_shared + dynamic_shared)


def resources(cubin: bytes, name: str) -> Resources:
    k = load(cubin).kernel(name)
    return Resources(
        chip=k.chip,
        registers=k.registers,
        static_shared=k.static_shared,
        frame_bytes=k.frame_bytes,
        stack_bytes=k.stack_bytes,
        max_threads=k.max_threads,
        param_bytes=k.param_bytes,
        param_sizes=tuple(p.size for p in k.parameters),
    )
